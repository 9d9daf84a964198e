"""The page of benchmarks: run them one after the other, and write `benchmarks/figures.md` with plots."""
