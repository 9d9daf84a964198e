"""Errors in the use of a command, as one sentence, and a list of commands grouped by purpose."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any, cast

import typer
from typer.core import TyperGroup

# Typer exports this class from click, or from its own copy of click, depending on its release.
UsageError = cast("type[Exception]", typer.BadParameter.__bases__[0])
"""The error that Typer raises if arguments cannot be used."""

_NEAR, _NEAR_BESIDE_VLLM = 0.6, 0.8
"""Least similarity of a name to suggest. vLLM has many options that are a bit like kvferry's."""


def usage_sentence(error: Any) -> str:
    """Return an error in the use of a command as one sentence, with the nearest known option.

    Args:
        error: `UsageError` that Typer raised.
    """
    context = error.ctx
    path = "kvferry" if context is None else context.command_path
    if hasattr(error, "possibilities"):
        known = [] if context is None else _options(context.command)
        near = difflib.get_close_matches(error.option_name, known, 1, _NEAR)
        end = f"did you mean {near[0]}?" if near else f"run {path} --help for its options"
        return f"{path} has no option {error.option_name}; {end}"
    message = error.format_message()
    message = message.replace(". Did you mean", "; did you mean").replace("Value error, ", "").rstrip(".")
    sentence = message[:1].lower() + message[1:]
    return sentence if sentence.endswith("?") else f"{sentence}; run {path} --help for its arguments"


def _options(command: Any) -> list[str]:
    return [
        name for each in command.params for name in (*each.opts, *each.secondary_opts) if name[:2] == "--"
    ]


class GroupedCommands(TyperGroup):
    """The `kvferry` command, whose help lists the other commands by purpose."""

    purposes: Mapping[str, Sequence[str]] = {
        "Start here": ("plan", "serve", "doctor", "demo"),
        "Run engines": ("config", "router", "keygen"),
        "Look at running engines": ("top", "explain", "dashboard"),
        "Keep and measure": ("cache", "bench"),
    }
    """Names of commands by purpose."""

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002 - Typer passes it
        """Return the names of all commands in the order of the help."""
        return [name for names in self.purposes.values() for name in names]

    def format_commands(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002 - Typer passes it
        """Write the list of commands to the help.

        Args:
            ctx: context of the call.
            formatter: writer of the help.
        """
        for purpose, names in self.purposes.items():
            with formatter.section(purpose):
                formatter.write_dl([(name, self.commands[name].get_short_help_str(100)) for name in names])
