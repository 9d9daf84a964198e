"""Helpers for any package: errors, units, text, settings, files, processes. They import no other package."""
