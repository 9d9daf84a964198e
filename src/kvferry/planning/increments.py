"""The parts of a load that can be read while the source still computes the prompt.

The parts follow each other (`LoadSpan.part`). All but the last transfer only layers that attend to all
tokens. Windows and recurrent state are final only when the source has computed all tokens.
"""

from __future__ import annotations

from dataclasses import replace

from kvferry.planning.select import LoadSpan


def next_part(
    span: LoadSpan, done: int, ready: int, *, alignment_tokens: int, whole: bool
) -> LoadSpan | None:
    """Return the next part of a load that can be read now; None if there is nothing to read yet.

    Args:
        done: position up to which earlier parts have been read; at first `span.begins`.
        ready: number of tokens whose KV the source has, from the start of the prompt.
        alignment_tokens: multiple of the block sizes of the destination's groups that attend to all tokens,
            at which two parts may meet; 0 without such a group.
        whole: True if the source has computed all tokens that it offers.

    >>> span = LoadSpan(local_tokens=16, total=100, prompt=101)
    >>> next_part(span, 16, 70, alignment_tokens=16, whole=False).part
    (16, 64)
    >>> next_part(span, 64, 100, alignment_tokens=16, whole=True).part
    (64, 100)
    >>> next_part(span, 16, 100, alignment_tokens=16, whole=True) == span
    True
    """
    if whole:
        end = span.ends
    elif not alignment_tokens:
        return None
    else:
        # The last part of a prefix also transfers windows and state, so it waits for the source's last token.
        most = span.ends - 1 if span.ends == span.total else span.ends
        end = min(ready, most) // alignment_tokens * alignment_tokens
    if end <= done:
        return None
    return span if (done, end) == (span.begins, span.ends) else replace(span, part=(done, end))
