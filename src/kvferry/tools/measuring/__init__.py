"""Building blocks of measurements, shared by `bench`, `doctor` and the repository's benchmarks."""
