"""`kvferry bench transfer` refuses in words what it cannot measure."""

from __future__ import annotations

import pytest
import typer

from kvferry.cli.bench import register
from kvferry.errors import ConfigError


def _run(*arguments: str) -> None:
    app = typer.Typer()
    register(app)
    app(["bench", "transfer", *arguments], standalone_mode=False)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--geometry", "gpt-9"), "--geometry gpt-9 is not known; choose one of llama-3.1-8b, qwen3-0.6b"),
        (("--order", "sorted"), "--order sorted is not known; choose one of scattered, contiguous"),
        (("--block-size", "1", "--kv-heads", "1", "--head-dim", "1"), "a page has 4 bytes"),
    ],
)
def test_a_setting_that_cannot_be_used_is_named(arguments: tuple[str, ...], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        _run(*arguments)


def test_fewer_rounds_than_a_median_needs_are_refused() -> None:
    with pytest.raises(Exception, match="7"):
        _run("--repeats", "6")
