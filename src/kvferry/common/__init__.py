"""Helpers for any package: errors, units, text tables, files, processes. They import no other package."""
