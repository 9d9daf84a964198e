"""Layouts, parallel sizes and strategies, compared."""
