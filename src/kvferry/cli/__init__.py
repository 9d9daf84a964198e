"""The commands. Each module has a `register` that adds its commands to the application."""
