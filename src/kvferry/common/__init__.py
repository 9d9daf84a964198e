"""Helpers for any package: errors, units, text, files, processes. They import no other package."""
