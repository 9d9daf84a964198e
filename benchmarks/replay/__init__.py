"""Measure how fast `kvferry replay` simulates, and how much memory it takes."""
