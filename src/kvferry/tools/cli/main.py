"""The `kvferry` command."""

from __future__ import annotations

import sys
from typing import Annotated, Any, NoReturn

import typer

from kvferry.common.errors import ConfigError, KVFerryError
from kvferry.tools.cli import bench, cache
from kvferry.tools.cli.config import config, init, keygen
from kvferry.tools.cli.demo import demo
from kvferry.tools.cli.doctor import doctor
from kvferry.tools.cli.explain import explain
from kvferry.tools.cli.options import INTERRUPTED, flushed_output, print_error
from kvferry.tools.cli.plan import plan
from kvferry.tools.cli.replay import replay
from kvferry.tools.cli.serve import router, serve
from kvferry.tools.cli.top import top
from kvferry.tools.cli.usage import HELP_OPTIONS, CommandGroup, UsageError, examples, usage_sentence

_FAILED = 1
# What the shell and click use for arguments that cannot be used, so scripts can tell it from a failure.
_USAGE = 2

app = typer.Typer(
    name="kvferry",
    cls=CommandGroup,
    epilog=examples("kvferry"),
    context_settings=HELP_OPTIONS,
    no_args_is_help=True,
    # Print usage errors as plain sentences, like kvferry's own errors.
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
for _purpose, _commands in {
    "Start here": (plan, serve, doctor, demo),
    "Run engines": (config, init, router, keygen),
    "Look at running engines": (top, explain),
    "Size": (replay,),
}.items():
    for _command in _commands:
        app.command(epilog=examples(_command.__name__), rich_help_panel=_purpose)(_command)
app.add_typer(cache.app, name="cache", rich_help_panel="Keep and measure")
app.add_typer(bench.app, name="bench", rich_help_panel="Keep and measure")


def _print_versions(requested: bool) -> None:
    """Print the versions of kvferry and, if installed, of vLLM and NIXL. Then exit."""
    if not requested:
        return
    from kvferry import __version__
    from kvferry.engines.vllm import nixl_version, vllm_version

    print(f"kvferry {__version__}")
    for name, found in (("vLLM", vllm_version()), ("NIXL", nixl_version())):
        if found is not None:
            print(f"{name} {found}")
    raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", "-V", callback=_print_versions, is_eager=True, help="Print versions and exit."
        ),
    ] = False,
) -> None:
    """Move the KV cache of language models between vLLM engines, and keep it in tiers.

    A tier is host memory, a directory or object storage.
    """


def main() -> None:
    """Run the `kvferry` command."""
    run(app, "kvferry")


def run(commands: typer.Typer, name: str) -> None:
    """Run a command-line application and flush standard output.

    If the application raises a kvferry error, print the error as one sentence and exit with an error code.

    Args:
        name: how users call it, for its help and its messages.
    """
    with flushed_output():
        try:
            code = commands(standalone_mode=False, prog_name=name)
        except UsageError as error:
            _exit_with_usage(error, commands, name)
        except typer.Abort:
            _exit_with_error(KVFerryError("aborted"), _FAILED)
        # The user can mend a ConfigError alone, by other arguments.
        except ConfigError as error:
            _exit_with_error(error, _USAGE)
        except KVFerryError as error:
            _exit_with_error(error, _FAILED)
        except KeyboardInterrupt:  # before a command that handles it has begun
            sys.exit(INTERRUPTED)
        sys.exit(code if isinstance(code, int) else 0)


def _exit_with_usage(error: Any, commands: typer.Typer, name: str) -> NoReturn:
    # `kvferry cache` alone gets the help. Typer has the class only in some releases.
    if type(error).__name__ == "NoArgsIsHelpError":
        error.show()
    else:
        print_error(usage_sentence(error, typer.main.get_command(commands), name, sys.argv[1:]))
    sys.exit(_USAGE)


def _exit_with_error(error: KVFerryError, code: int) -> NoReturn:
    print_error(str(error))
    sys.exit(code)
