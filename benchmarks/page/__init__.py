"""The page of benchmarks: run them one after the other, and write `docs/benchmarks.md` with plots."""
