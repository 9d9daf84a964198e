"""Commands; each module adds its own to the application through `register`."""
