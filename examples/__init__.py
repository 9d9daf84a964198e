"""Engines in miniature that use kvferry's connector. They run from a checkout and are in no wheel."""
