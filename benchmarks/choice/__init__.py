"""Policies for choosing a source, compared on a replayed workload."""
