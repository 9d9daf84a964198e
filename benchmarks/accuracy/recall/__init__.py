"""Tiny models that were trained here to recall pairs, so that a wrong byte in the KV cache costs points.

- `models`: their architectures, and the files that the repository has of them.
- `task`: vocabulary, sequences to train on, and questions.
- `train`: the loop; `python -m benchmarks.accuracy.recall.train NAME` writes a model's files again.
"""
