"""The commands of ``kvferry``, one module each. `main` combines them into one command-line application."""
