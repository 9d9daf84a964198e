"""The commands of `kvferry`, one module each. `main` combines them to one command-line application."""
