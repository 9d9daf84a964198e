"""The commands: a module each, whose functions `main` makes commands of one application."""
