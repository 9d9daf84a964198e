"""Errors in the use of a command, as one sentence, and a list of commands grouped by purpose."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any, cast

import typer
from typer.core import TyperGroup

# What Typer raises if arguments cannot be used. Its class is click's, or that of Typer's own copy of click.
UsageError = cast("type[Exception]", typer.BadParameter.__bases__[0])

HELP_OPTIONS = {"help_option_names": ["-h", "--help"]}
"""Context settings of an application, so that all its commands take both."""

# Least similarity of a name to suggest. vLLM has many options that are a bit like kvferry's.
_NEAR, _NEAR_BESIDE_VLLM = 0.6, 0.8
# More characters than the first sentence of any command has: Typer would cut it at 45.
_WHOLE_SENTENCE = 1000
# Options of vLLM that kvferry names differently: kvferry's name, which the command must have, and what to do.
_VLLM_NAMES = {
    "--tensor-parallel-size": ("--tp", "use --tp"),
    "-tp": ("--tp", "use --tp"),
    "--model": ("MODEL", "give MODEL without an option"),
}
# What to write in place of commands of earlier releases.
_NEW_FORMS = {
    "kvferry dashboard": "kvferry top --dashboard DIR",
    "kvferry bench calibrate": "kvferry doctor --calibrate",
    "kvferry size": "kvferry replay TRACE --target-hit SHARE",
}
# By the first word of pydantic's name of the error, such as int_parsing.
_EXPECTED = {"int": "a whole number", "float": "a number", "finite": "a finite number"}
# What to give for a missing argument, by its placeholder.
_MISSING = {"MODEL": "give a path or a Hugging Face id, such as Qwen/Qwen3-0.6B"}


def usage_sentence(error: Any, application: Any, name: str, arguments: Sequence[str] = ()) -> str:
    """Return a `UsageError` as one sentence, with the nearest known option.

    Args:
        name: how users call the application.
    """
    # An option without its value has no context, so the command is looked up.
    words, one = [name], application
    for argument in arguments:
        one = getattr(one, "commands", {}).get(argument)
        if one is None:
            break
        words.append(argument)
    path = error.ctx.command_path if error.ctx else " ".join(words)
    if hasattr(error, "possibilities"):
        parameters = error.ctx.command.params if error.ctx else []
        option, value = _find_option(error.option_name, arguments[path.count(" ") :])
        hint = _option_hint(path, parameters, option, value)
        return f"{path} has no option {option}; {hint or f'run {path} --help for its options'}"
    if reason := _conversion_reason(error):
        return reason
    missing = error.param.metavar if type(error).__name__ == "MissingParameter" and error.param else None
    if missing in _MISSING:
        return f"{missing} is missing; {_MISSING[missing]}"
    message = error.format_message()
    message = message.replace(". Did you mean", "; did you mean").replace("Value error, ", "").rstrip(".")
    sentence = message[:1].lower() + message[1:]
    return sentence if sentence.endswith("?") else f"{sentence}; run {path} --help for its arguments"


def _conversion_reason(error: Any) -> str | None:
    """Return why the value of an option or argument cannot be converted; None for another error."""
    # Typer converts values with pydantic, whose messages are about its types: they get words of our own.
    details = getattr(error.__cause__, "errors", None)
    if details is None or error.param is None:
        return None
    first = details()[0]
    bounds = first.get("ctx", {})
    named = next((each for each in error.param.opts if each.startswith("--")), error.param.metavar)
    if "error" in bounds:  # raised by kvferry's own converter, or by Typer for a choice
        expected = str(bounds["error"]).rstrip(".")
        if not expected.startswith("give "):
            return f"{named}: {expected}"
    elif bounds:
        limits = {"ge": "at least", "le": "at most", "gt": "above", "lt": "below"}
        given = [f"{limits[name]} {bound}" for name, bound in bounds.items() if name in limits]
        expected = f"give {' and '.join(given)}"
    else:
        expected = f"give {_EXPECTED.get(first['type'].partition('_')[0], 'another value')}"
    return f"{named} is {first['input']!r}; {expected}"


def _option_hint(path: str, parameters: Sequence[Any], name: str, value: str) -> str | None:
    """Return what to do about an unknown option of the command `path`; None if nothing is known about it.

    `value` is the option with its value, as it was written.
    """
    known = {each for parameter in parameters for each in (*parameter.opts, *parameter.secondary_opts)}
    places = [parameter.metavar for parameter in parameters if parameter.param_type_name == "argument"]
    # `config` has no ranks: a hint may only name what the command has.
    own, hint = _VLLM_NAMES.get(name, (None, None))
    if own in known or own in places:
        return hint
    takes_vllm = any(place.startswith("-- ") for place in places)
    cutoff = _NEAR_BESIDE_VLLM if takes_vllm else _NEAR
    long = [each for each in (*known, *HELP_OPTIONS["help_option_names"]) if each.startswith("--")]
    near = difflib.get_close_matches(name, long, 1, cutoff)
    # A typing error of an option of kvferry is likelier than one of vLLM's options before the --.
    if near:
        return f"did you mean {near[0]}?"
    if takes_vllm:
        required = [parameter.metavar for parameter in parameters if parameter.required]
        return f"if it is vLLM's, write it after --: {' '.join([path, *required, '--', value])}"
    return None


def _find_option(name: str, arguments: Sequence[str]) -> tuple[str, str]:
    """Return an unknown option as it was written: its whole name, and its name with the value."""
    # Of ``-tp``, the parser reports only ``-t``.
    for index, argument in enumerate(arguments):
        written = argument.partition("=")[0]
        if written == name or (len(name) == 2 and written.startswith(name)):
            # If no argument comes before the option, the next word may be MODEL.
            after = () if arguments[0].startswith("-") else arguments[index + 1 : index + 2]
            return written, " ".join((argument, *(word for word in after if not word.startswith("-"))))
    return name, name


class CommandGroup(TyperGroup):
    """A command that has other commands. ``help COMMAND`` means ``COMMAND --help``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args[:1] == ["help"]:
            args = [*args[1:], "--help"]
        return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if form := _NEW_FORMS.get(f"{ctx.command_path} {args[0]}"):
            ctx.fail(f"No such command {args[0]!r}. Did you mean {form}?")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002 - Typer passes the context
        purposes: dict[str, list[tuple[str, str]]] = {}
        for name, one in self.commands.items():
            # Typer itself uses panels only in help that rich writes, and rich takes long to import.
            panel = getattr(one, "rich_help_panel", None)
            purpose = panel if isinstance(panel, str) else "Commands"
            purposes.setdefault(purpose, []).append((name, one.get_short_help_str(_WHOLE_SENTENCE)))
        for purpose, listed in purposes.items():
            with formatter.section(purpose):
                formatter.write_dl(listed)


_EXAMPLES: Mapping[str, Sequence[str]] = {
    "kvferry": (
        "kvferry plan gemma-3-27b-it --to-tp 2",
        "kvferry serve Qwen/Qwen3-0.6B -- --max-model-len 8192",
        "kvferry doctor http://127.0.0.1:8000",
    ),
    "plan": (
        "kvferry plan gemma-3-27b-it --to-tp 2 --tokens 32768",
        "kvferry plan ./model/config.json --block-size 16 --to-block-size 64",
        "kvferry plan Llama-3.1-8B --to-tp 2 --html picture.html",
        "kvferry plan --list",
    ),
    "replay": (
        "kvferry replay trace.jsonl --model Llama-3.1-8B --tier host=64GiB",
        "kvferry replay trace.jsonl --model gpt-oss-20b --engines 4 --route session",
        "kvferry replay trace.jsonl --model Llama-3.1-8B --curve --html curve.html",
        "kvferry replay trace.jsonl --model Llama-3.1-8B --target-hit 0.3",
        "kvferry replay users=2000,turns=8 --model gpt-oss-120b --target-hit 0.5",
    ),
    "serve": (
        "kvferry serve Qwen/Qwen3-0.6B --port 8000",
        "kvferry serve ./model --prefill 2 --decode-tp 2 -- --max-model-len 8192",
        "curl http://127.0.0.1:8000/v1/models",
    ),
    "doctor": (
        "kvferry doctor",
        "kvferry doctor http://127.0.0.1:8000",
        "kvferry doctor --config kv.json --no-machine",
        "kvferry doctor --calibrate",
    ),
    "demo": (
        "kvferry demo",
        "kvferry demo --families gemma3 --prompts 8",
        "kvferry demo Qwen/Qwen3-0.6B -- --max-model-len 4096",
    ),
    "config": (
        'vllm serve MODEL --kv-transfer-config "$(kvferry config --role decode)"',
        "kvferry config --tiers default",
    ),
    "init": ("kvferry init", "kvferry serve Qwen/Qwen3-0.6B --settings kvferry.toml"),
    "router": ("kvferry router --prefill http://first:8100 --decode http://second:8200",),
    "keygen": ("kvferry keygen secret.txt",),
    "top": (
        "kvferry top http://127.0.0.1:8000",
        "kvferry top --json http://10.0.0.1:8100 http://10.0.0.2:8200",
        "kvferry top --dashboard .",
    ),
    "explain": ("kvferry explain", "kvferry explain cmpl-4f1c"),
}


def examples(command: str) -> str:
    r"""Return the examples of a command, as the end of its help.

    The text begins with a backspace character, so that its lines are not joined.

    Args:
        command: name of the command; ``kvferry`` for the whole program.

    >>> examples("keygen")
    '\x08\nExamples:\n  kvferry keygen secret.txt'
    """
    return "\n".join(("\b", "Examples:", *(f"  {line}" for line in _EXAMPLES[command])))
