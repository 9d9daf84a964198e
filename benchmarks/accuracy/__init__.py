"""Compare a prefill/decode pair with a single engine on GSM8K, as lm-eval asks and scores it.

- `questions`: a file of one's own questions; `harness`: lm-eval in an environment of its own.
- `systems`: the engines; `moved`: evidence that the pair moved KV; `spoiling`: the negative control.
- `evaluation`: the result of one run of lm-eval; `comparison`: the two results and the verdict.
"""
