"""Building blocks of measurements, shared by the tools and the repository's benchmarks."""
