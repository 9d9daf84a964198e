"""Measure the time that a request and a new peer cost the decode side, in addition to moving bytes."""
