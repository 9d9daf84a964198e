"""Measure whether time and memory per unit stay the same as the number of units grows."""
