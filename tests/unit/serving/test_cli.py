"""The help of the commands, and errors in their arguments."""

import re
import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

from kvferry.tools import extras
from kvferry.tools.cli.main import app
from kvferry.tools.cli.usage import UsageError, usage_sentence
from support.command_line import parse_command_line, run_kvferry

KVFERRY = typer.main.get_command(app)
COMMANDS = sorted(KVFERRY.commands)


@pytest.mark.parametrize("group", ["", "bench", "cache"])
def test_help_describes_every_command_in_a_sentence(group):
    done = CliRunner().invoke(app, [*group.split(), "--help"], env={"COLUMNS": "80"})
    listed = re.findall(r"^  [a-z-]+ {2,}.*$", done.output.split(" --help ")[1], re.MULTILINE)
    assert len(listed) > 1
    for line in listed:
        assert re.fullmatch(r"  [a-z-]+ +[A-Z].*[^.]\.", line), line
        assert len(line) <= 80


def test_the_command_line_loads_nothing_of_the_core_before_a_command_runs():
    code = "import sys, kvferry.tools.cli.main; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    modules = [name for name in done.stdout.split() if name.startswith("kvferry.")]
    assert [name for name in modules if name.split(".")[1] not in ("common", "tools")] == []
    assert not {"httpx", "numpy", "obstore", "zmq"} & {*done.stdout.split()}


def test_help_lists_every_command_by_purpose_and_plan_serve_doctor_first():
    assert [*KVFERRY.commands][:3] == ["plan", "serve", "doctor"]
    output = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "80"}).output
    assert "\nStart here:\n  plan " in output
    assert "\nCommands:\n" not in output, "give the command a purpose in kvferry/cli/main.py"


@pytest.mark.parametrize("command", ["", "serve", "cache", "cache ls"])
def test_h_is_short_for_help(command):
    short, whole = (CliRunner().invoke(app, [*command.split(), option]) for option in ("-h", "--help"))
    assert (short.exit_code, short.output) == (0, whole.output)


@pytest.mark.parametrize("command", ["", "plan", "cache ls"])
def test_help_is_a_command_too(command):
    *groups, last = command.split() or [""]
    short, whole = (
        CliRunner().invoke(app, words)
        for words in ([*groups, "help", *last.split()], [*command.split(), "--help"])
    )
    assert (short.exit_code, short.output) == (0, whole.output)


def test_a_shell_completes_commands(monkeypatch):
    monkeypatch.setenv("_KVFERRY_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "kvferry re")
    monkeypatch.setenv("COMP_CWORD", "1")
    assert run_kvferry().stdout.split() == ["replay"]


@pytest.mark.parametrize("command", COMMANDS)
def test_help_fits_80_columns_and_shows_examples_that_have_known_options(command):
    output = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "80"}).output
    assert max(map(len, output.splitlines())) <= 80
    shown = re.findall(rf"^ +kvferry {command}(.*)$", output.partition("Examples:\n")[2], re.MULTILINE)
    assert shown or command in {"bench", "cache", "config"}
    for option in re.findall(r"--[a-z]\S*", " ".join(line.partition(" -- ")[0] for line in shown)):
        assert re.search(rf"^  .*{option}\b", output, re.MULTILINE), option


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("pln", "no such command 'pln'; did you mean 'plan'"),
        ("dashboard --out .", "no such command 'dashboard'; did you mean kvferry top --dashboard DIR?"),
        ("size --users 5", "no such command 'size'; did you mean kvferry replay TRACE --target-hit SHARE?"),
        ("bench calibrate", "no such command 'calibrate'; did you mean kvferry doctor --calibrate?"),
        ("cache lss .", "no such command 'lss'; did you mean 'ls'?"),
        ("plan --tokenz 5", "kvferry plan has no option --tokenz; did you mean --tokens?"),
        ("--hepl", "kvferry has no option --hepl; did you mean --help?"),
        ("replay --hepl", "kvferry replay has no option --hepl; did you mean --help?"),
        ("top", "URL is missing; give the address of an engine or a router, or --dashboard DIR"),
        ("top http://a --dashboard .", "--dashboard reads no engine; leave out the URLs, or --dashboard"),
        ("help nothing", "no such command 'nothing'"),
        ("plan --qqqq", "kvferry plan has no option --qqqq; run kvferry plan --help for its options"),
        ("plan m --tokens x", "--tokens is 'x'; give a whole number, such as 32768, 32k (32,000) or"),
        ("plan m n", "got unexpected extra argument"),
        ("serve", "MODEL is missing; give a path or a Hugging Face id, such as Qwen/Qwen3-0.6B"),
        ("keygen", "missing argument 'FILE'; run kvferry keygen --help for its arguments"),
        (
            "serve m --port 0 --max-model-len 8192",
            (
                "kvferry serve has no option --max-model-len; if it is vLLM's, write it after --: "
                "kvferry serve MODEL -- --max-model-len 8192\n"
            ),
        ),
        (
            "serve m --dtype=half --port 0",
            (
                "kvferry serve has no option --dtype; if it is vLLM's, write it after --: "
                "kvferry serve MODEL -- --dtype=half\n"
            ),
        ),
        (
            "demo --enforce-eager",
            (
                "kvferry demo has no option --enforce-eager; if it is vLLM's, write it after --: "
                "kvferry demo -- --enforce-eager\n"
            ),
        ),
        (
            "serve m --tensor-parallel-size 2",
            "kvferry serve has no option --tensor-parallel-size; use --tp\n",
        ),
        ("plan m -tp=2", "kvferry plan has no option -tp; use --tp\n"),
        ("config -tp 2", "kvferry config has no option -tp; run kvferry config --help for its options\n"),
        ("serve --model m", "kvferry serve has no option --model; give MODEL without an option\n"),
        ("config --role x", "--role: 'x' is not one of 'prefill', 'decode', 'both'\n"),
        ("plan m --bandwidth fast", "--bandwidth is 'fast'; give a number\n"),
        ("config --port http", "--port is 'http'; give a whole number\n"),
        ("serve m --port 99999", "--port is '99999'; give at most 65535\n"),
        ("bench transfer --tokens 0", "--tokens is '0'; give at least 1\n"),
        ("cache ls -o", "option '-o' requires an argument; run kvferry cache ls --help for its arguments\n"),
    ],
)
def test_usage_error_is_one_sentence_with_the_nearest_option(arguments, message):
    done = run_kvferry(*arguments.split())
    assert done.stderr.startswith(f"kvferry: {message}")
    assert (done.stderr.count("\n"), done.returncode) == (1, 2)


def options_with_a_value(command, path=()):
    """Yield (words of a command, option) for every option and command that takes a value."""
    for name, inner in getattr(command, "commands", {}).items():
        yield from options_with_a_value(inner, (*path, name))
    for option in command.params:
        if option.opts[0].startswith("-") and not option.is_flag and option.param_type_name == "option":
            yield path, option.opts[0]


def refusal_of(*arguments):
    """Return what a command says about its arguments; empty if it takes them. The command is not run."""
    try:
        parse_command_line(arguments)
    except UsageError as error:
        return usage_sentence(error, KVFERRY, "kvferry", arguments)
    return ""


def test_no_option_answers_in_the_words_of_a_library():
    refused = 0
    for path, option in options_with_a_value(KVFERRY):
        said = refusal_of(*path, option, "\N{SNOWMAN}")
        assert not re.search("[Ii]nput|pars|pydantic|validat|[Vv]alue error|invalid", said), said
        refused += "\N{SNOWMAN}" in said
    assert refused > 50


@pytest.mark.parametrize(
    ("option", "tokens"), [("32k", "32,000"), ("32K", "32,768"), ("1.5m", "1,500,000"), ("1", "1")]
)
def test_a_count_of_tokens_may_have_a_suffix_as_in_vllm(option, tokens):
    done = run_kvferry("plan", "Llama-3.1-8B", "--tokens", option)
    noun = "token" if tokens == "1" else "tokens"
    assert done.stdout.startswith(f"Llama-3.1-8B, a prompt of {tokens} {noun}\n")


def test_every_option_for_tokens_takes_a_suffix():
    found = 0
    for path, option in options_with_a_value(KVFERRY):
        if path[0] != "cache" and option.endswith(("tokens", "block-size")):
            assert "1k" not in refusal_of(*path, option, "1k")
            assert refusal_of(*path, option, "1.5").startswith(f"{option} is '1.5'; give a whole number")
            found += 1
    assert found > 20


@pytest.mark.parametrize(
    ("command", "package", "extra"), [("serve m", "vLLM", "vllm"), ("bench tiers", "torch", "bench")]
)
def test_command_names_the_extra_that_it_needs(command, package, extra, monkeypatch):
    monkeypatch.setattr(extras, "find_spec", lambda _: None)
    done = run_kvferry(*command.split())
    name = command.removesuffix(" m")
    on_a_cpu = ", or vLLM's build for CPUs," if extra == "vllm" else ""
    advice = f"install kvferry's extra {extra}{on_a_cpu} as {extras.INSTALL_PAGE} says"
    message = f"kvferry: kvferry {name} needs {package}, which is not installed; {advice}\n"
    assert (done.returncode, done.stderr) == (2, message)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["/nowhere"], "there is no model at /nowhere"),
        (["/", "--port", "0"], "the folder / holds no config.json or params.json; give a folder with a"),
        (["m", "--", "--kv-offloading-size", "4"], "--kv-offloading-size cannot be the same for every"),
        (
            ["m", "--role", "both", "--prefill", "2"],
            "--prefill is given beside --role both, but it is for prefill and decode engines; use --engines",
        ),
        (["m", "--role", "decode"], "--role is decode, but kvferry serve starts both sides of an"),
        (["m", "--engines", "2"], "--engines is given without --role both; use --prefill and"),
        (["m", "--role", "both", "--engines", "0"], "engine is 0, it must be at least 1"),
        (["m", "--prefill-args", "'x"], '--prefill-args is "\'x": No closing quotation; close'),
        (["m", "--tiers", '[{"type": "file", "path": "/no"}]'], "file tier: /no does not exist"),
        (["m", "--", "-dp", "0"], "--data-parallel-size is '0', it must be a whole number of at least 1"),
        (["m", "--", "--port", "7"], "--port cannot be the same for every engine"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_serve_refuses_wrong_arguments_in_one_sentence(arguments, message):
    done = run_kvferry("serve", *arguments)
    assert done.stderr.startswith(f"kvferry: {message}")
    assert (done.stderr.count("\n"), done.returncode) == (1, 2)
