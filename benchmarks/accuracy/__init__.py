"""Compare answers from KV that moved with a single engine's on GSM8K, as lm-eval asks and scores it.

- `questions`: a file of one's own questions; `harness`: lm-eval in an environment of its own.
- `ways`: the ways to move KV; `systems`: running engines; `moved`: evidence that KV moved.
- `spoiling`: the negative control.
- `evaluation`: the result of one run of lm-eval; `comparison`: two results and the verdict.
"""
