"""What protections cost."""
