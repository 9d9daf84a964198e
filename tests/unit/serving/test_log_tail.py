"""Which line of an engine's log says why it ended."""

import pytest

from kvferry.tools.serving.engine import error_line, last_line, last_lines, process_code

CORE = "(EngineCore pid=7) ERROR 09-30 12:00:00 [core.py:1510] "
ECHO = "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}"


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([f"{CORE}ValueError: no room", "    raise RuntimeError(", ECHO], "ValueError: no room"),
        ([ECHO], ECHO),
        (["\x1b[31mOSError: no such model\x1b[0m"], "OSError: no such model"),
        (["huggingface_hub.errors.RepoError: gone", "OSError: later", "shutting down"], "OSError: later"),
        (["a.py: error: unrecognized arguments: --x"], "unrecognized arguments: --x"),
        (["p.ValidationError: 1 validation error for C", "  Value error, bad len [type=x]"],
         "ValidationError: Value error, bad len"),
        (["kvferry.common.errors.ConfigError: port is 7"], "ConfigError: port is 7"),
        (["Fatal Python error: Illegal instruction", "", "Current thread 0x1:", ECHO], "Illegal instruction"),
        (["all is well"], None),
        ([], None),
    ],
)  # fmt: skip
def test_error_line_is_the_last_error_that_is_no_echo(tmp_path, lines, said):
    log = tmp_path / "log"
    log.write_text("\n".join(lines))
    assert error_line(log) == said


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("RuntimeError: initialization failed. Failed core proc(s): {'EngineCore_DP0': -4}", -4),
        ("Worker proc VllmWorker-1 died unexpectedly (exit code: -9), shutting down executor.", -9),
        ("RuntimeError: Process ApiServer_0 (PID: 7) died with exit code 1", 1),
        ("RuntimeError: initialization failed. Failed core proc(s): {}", None),
        ("all is well", None),
    ],
)
def test_the_code_of_the_process_that_failed_is_found(tmp_path, line, code):
    log = tmp_path / "log"
    log.write_text(f"first\n{CORE}{line}\nlast")
    assert process_code(log) == code


def test_missing_log_has_no_lines(tmp_path):
    assert error_line(tmp_path / "none") is None
    assert last_line(tmp_path / "none") == ""
    assert last_lines(tmp_path / "none", 2) == []


def test_the_last_line_comes_without_its_prefix(tmp_path):
    log = tmp_path / "log"
    log.write_text("(Worker pid=7) INFO 09-30 12:00:00 [a.py:1] Loading weights\n\n")
    assert last_line(log) == "Loading weights"


def test_the_last_lines_are_those_with_text(tmp_path):
    log = tmp_path / "log"
    log.write_text("first\n(Worker pid=7) INFO 09-30 12:00:00 [a.py:1] second\n\nthird\n \n")
    assert last_lines(log, 2) == ["second", "third"]
    assert last_lines(log, 9) == ["first", "second", "third"]
