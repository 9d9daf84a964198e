"""`python -m benchmarks accuracy` without engines: task, lm-eval's files, evidence and verdict."""

from __future__ import annotations

import io
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.accuracy import page, report
from benchmarks.accuracy.comparison import Comparison, check_same_questions
from benchmarks.accuracy.evaluation import Answer, Evaluation, Score, read_evaluation
from benchmarks.accuracy.harness import Harness, HarnessError, Task, find_harness
from benchmarks.accuracy.moved import MovedKv, NothingMoved, check_moved, parse_moved
from benchmarks.accuracy.questions import count_questions, write_task
from benchmarks.accuracy.systems import alone, spoiled
from kvferry.errors import ConfigError
from kvferry.serving.launch import fleet_specs

RUN = Path(__file__).parent / "lm_eval_run"
"""What lm-eval wrote for the first two example questions, without prompts and settings."""
TASK = "kvferry_questions"
EXAMPLES = Path(__file__).parents[3] / "benchmarks" / "accuracy" / "examples.jsonl"
LINE = '{"question": "How many?", "answer": "All.\\n#### 7"}'
MOVED = MovedKv(asked=4, served=4, tokens=900, read_bytes=2 << 20, misses={})


def evaluation(value: float, *texts: str, error: float = 0.0) -> Evaluation:
    answers = {n: Answer(f"prompt {n}", text) for n, text in enumerate(texts)}
    return Evaluation("0.4.13", {"strict-match": Score(value, error)}, answers)


def comparison(pair: Evaluation, single: Evaluation, *, spoil: bool = False, least: float = 0) -> Comparison:
    return Comparison(
        model="tiny",
        questions="GSM8K",
        pair=pair,
        single=single,
        moved=MOVED,
        spoiled=spoil,
        least_same=least,
    )


def test_the_example_questions_can_be_asked():
    assert count_questions(EXAMPLES) == 8


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ([LINE] * 5, "has 5 questions; give at least 6"),
        ([LINE] * 6 + ["{"], "line 7"),
        ([LINE, '{"question": "How many?", "answer": "7"}'], "line 2"),
        (['{"question": "How many?"}'], "line 1"),
        (["[]"], "line 1"),
    ],
)
def test_a_file_of_other_lines_is_refused(tmp_path, lines, says):
    path = tmp_path / "questions.jsonl"
    path.write_text("\n".join(lines))
    with pytest.raises(ConfigError, match=says):
        count_questions(path)
    with pytest.raises(ConfigError, match="No such file"):
        count_questions(tmp_path / "others.jsonl")


def test_the_task_of_a_file_is_gsm8k_with_other_questions(tmp_path):
    questions = tmp_path / "mine.jsonl"
    task = json.loads(
        (tmp_path / f"{write_task(questions, Path('/lm_eval/gsm8k.yaml'), tmp_path)}.yaml").read_text()
    )
    assert task["include"] == "/lm_eval/gsm8k.yaml"
    assert task["dataset_path"] == "json"
    assert task["dataset_kwargs"] == {"data_files": {"test": str(questions)}}
    assert (task["test_split"], task["fewshot_split"], task["num_fewshot"]) == ("test", "test", 5)


def test_the_files_of_lm_eval_are_read():
    found = read_evaluation(RUN, TASK)
    assert found.version == "0.4.13"
    assert found.scores == {"strict-match": Score(0.5, 0.5), "flexible-extract": Score(0.5, 0.5)}
    assert {n: one.text for n, one in found.answers.items()} == {
        0: " It is 72 - 60.\n#### 12",
        1: " It is 436 kilometers.",
    }
    assert len({one.prompt for one in found.answers.values()}) == 2


def copied(folder: Path) -> tuple[Path, Path]:
    shutil.copytree(RUN, folder / "run")
    (results,) = folder.rglob("results_*.json")
    (samples,) = folder.rglob("samples_*.jsonl")
    return results, samples


def test_a_single_question_has_no_standard_error(tmp_path):
    results, _ = copied(tmp_path)
    document = json.loads(results.read_text())
    document["results"][TASK] |= {
        "exact_match,strict-match": 1.0,
        "exact_match_stderr,strict-match": "N/A",
        "exact_match,flexible-extract": 1.0,
        "exact_match_stderr,flexible-extract": "N/A",
    }
    results.write_text(json.dumps(document))
    assert read_evaluation(tmp_path, TASK).scores["strict-match"] == Score(1.0, 0.0)


def test_files_in_another_format_are_refused_in_words(tmp_path):
    results, samples = copied(tmp_path)
    whole = samples.read_text()
    samples.write_text('{"doc_id": 1}\n')
    with pytest.raises(HarnessError, match=r"not in the expected format .*accuracy\.lock"):
        read_evaluation(tmp_path, TASK)
    samples.write_text(whole)
    results.write_text('{"results": {}, "lm_eval_version": "9"}')
    with pytest.raises(HarnessError, match="not in the expected format"):
        read_evaluation(tmp_path, TASK)
    results.unlink()
    with pytest.raises(HarnessError, match="wrote 0 files results_"):
        read_evaluation(tmp_path, TASK)


def test_equal_scores_pass_and_so_do_scores_within_their_standard_error():
    single = evaluation(0.6, "a", "b", error=0.03)
    assert not comparison(evaluation(0.6, "a", "b"), evaluation(0.6, "a", "b")).failures
    assert not comparison(evaluation(0.55, "a", "c", error=0.04), single).failures
    (why,) = comparison(evaluation(0.549, "a", "c", error=0.04), single).failures
    assert "strict-match differ by -0.0510, allowed is 0.0500" in why
    assert comparison(evaluation(0.651, "a", "c", error=0.04), single).failures
    assert comparison(evaluation(0.5, "a"), evaluation(0.6, "a")).failures


def test_too_few_equal_answers_fail_if_a_least_number_is_given():
    pair, single = evaluation(0, "a", "b", "c", "d"), evaluation(0, "a", "b", "c", "x")
    found = comparison(pair, single, least=0.75)
    assert (found.same, found.different, found.failures) == (3, (3,), ())
    (why,) = comparison(pair, single, least=0.8).failures
    assert why.startswith("3 of 4 answers are the same text")


def test_spoiled_kv_must_change_an_answer_and_may_change_scores():
    single = evaluation(1.0, "a", "b")
    assert not comparison(evaluation(0.0, "a", "x"), single, spoil=True).failures
    (why,) = comparison(evaluation(1.0, "a", "b"), single, spoil=True).failures
    assert "cannot detect wrong KV" in why


def test_two_runs_must_have_asked_the_same_prompts():
    pair = evaluation(0, "a", "b")
    check_same_questions(pair, evaluation(1, "c", "d"))
    other = replace(pair, answers={**pair.answers, 1: Answer("another prompt", "b")})
    for single in (other, evaluation(0, "a"), replace(pair, scores={})):
        with pytest.raises(HarnessError, match="different questions"):
            check_same_questions(pair, single)


PAGE = """\
# TYPE kvferry_queries counter
kvferry_queries_total{engine="0",model_name="m",source="peer"} 4.0
kvferry_queries_total{engine="1",model_name="m",source="peer"} 2.0
kvferry_queries_total{engine="0",model_name="m",source="tiers"} 9.0
# TYPE kvferry_hits counter
kvferry_hits_total{engine="0",model_name="m",source="peer"} 4.0
kvferry_hits_total{engine="0",model_name="m",source="tiers"} 9.0
# TYPE kvferry_hit_tokens counter
kvferry_hit_tokens_total{engine="0",model_name="m",source="peer",tier="peer"} 3600.0
# TYPE kvferry_misses counter
kvferry_misses_total{engine="0",group="",model_name="m",reason="local",source="peer"} 0.0
kvferry_misses_total{engine="1",group="",model_name="m",reason="deadline",source="peer"} 2.0
# TYPE kvferry_load_bytes counter
kvferry_load_bytes_total{engine="0",group="0 full_attention",source="peer",strategy="direct"} 1e+06
kvferry_load_bytes_total{engine="0",group="1 full_attention",source="peer",strategy="staged"} 5.0
# TYPE vllm:something counter
vllm:something_total{source="peer"} nonsense
"""


def test_the_evidence_is_summed_over_engines_for_peers_alone():
    assert parse_moved(PAGE) == MovedKv(6, 4, 3600, 1_000_005, {"deadline": 2})
    assert parse_moved("") == MovedKv(0, 0, 0, 0, {})


def test_comparison_with_too_few_loads_is_an_error():
    check_moved(MOVED, 8)
    for moved, questions in ((MOVED, 9), (replace(MOVED, read_bytes=0), 4), (parse_moved(""), 4)):
        with pytest.raises(NothingMoved, match="proves nothing"):
            check_moved(moved, questions)
    with pytest.raises(NothingMoved, match=r"4 of 20 requests .*deadline: 2"):
        check_moved(parse_moved(PAGE), 20)


def test_the_single_engine_differs_from_the_decode_engine_in_its_connector_alone():
    _, decode = fleet_specs("model", arguments=["--enforce-eager"])
    single = alone(decode)
    assert single.kv_transfer is None
    assert decode.kv_transfer is not None
    assert single.arguments == decode.arguments
    assert single.port != decode.port
    spoiling = spoiled(decode)
    assert {**spoiling.kv_transfer, **decode.kv_transfer} == decode.kv_transfer
    assert spoiling.kv_transfer["kv_connector"] == "SpoilingConnector"


def fake(folder: Path, script: str) -> Harness:
    """Return an lm-eval whose Python is a shell script."""
    (folder / "bin").mkdir()
    python = folder / "bin" / "python"
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o700)
    task = folder / "lib/python3.11/site-packages/lm_eval/tasks/gsm8k"
    task.mkdir(parents=True)
    (task / "gsm8k.yaml").touch()
    return find_harness(folder)


def test_a_missing_lm_eval_names_the_target_that_installs_it(tmp_path):
    with pytest.raises(ConfigError, match="make accuracy"):
        find_harness(tmp_path)


def test_lm_eval_gets_the_endpoint_and_its_files_are_found(tmp_path):
    work = tmp_path / "work"
    work.mkdir()
    # The arguments are -I -m lm_eval run --config FILE.
    harness = fake(tmp_path, f'[ "$6" = {work}/run.yaml ] && cp -r {RUN} {work}/results')
    task = Task(questions=EXAMPLES, limit=2, concurrency=3)
    name = harness.evaluate(task, "http://127.0.0.1:9", "tiny, model", work, lambda: None)
    assert read_evaluation(work / "results", name).scores
    settings = json.loads((work / "run.yaml").read_text())
    assert settings["model_args"]["base_url"] == "http://127.0.0.1:9/v1/completions"
    assert settings["model_args"]["model"] == "tiny, model"
    assert settings["model_args"]["num_concurrent"] == 3
    assert (settings["limit"], settings["tasks"]) == (2, [TASK])


REFUSED = (
    "API request failed! Status code: 400, Response text: "
    '{"error":{"message":"too long"}}. Retrying...\nClientResponseError: 400'
)


@pytest.mark.parametrize(
    ("output", "says"),
    [
        (REFUSED, 'the engine refused a question: {"error":{"message":"too long"}}'),
        ("Traceback\nValueError: no such task", "ValueError: no such task"),
        ("", "it gave no reason"),
    ],
)
def test_a_failure_of_lm_eval_has_its_reason(tmp_path, output, says):
    (tmp_path / "output").write_text(output)
    harness = fake(tmp_path, f"cat {tmp_path}/output; exit 1")
    task = Task(questions=EXAMPLES, limit=None, concurrency=1)
    with pytest.raises(HarnessError) as failed:
        harness.evaluate(task, "http://127.0.0.1:9", "tiny", tmp_path, lambda: None)
    assert says in str(failed.value)


def test_a_dataset_that_cannot_be_downloaded_points_to_a_file_of_questions(tmp_path):
    harness = fake(tmp_path, "echo \"ConnectionError: Couldn't reach 'openai/gsm8k'\"; exit 1")
    with pytest.raises(ConfigError, match=r"Couldn't reach 'openai/gsm8k'.*--questions"):
        harness.check_dataset(tmp_path / "log", lambda: None)


def test_lm_eval_ends_if_an_engine_has_ended(tmp_path):
    harness = fake(tmp_path, f"echo $$ > {tmp_path}/pid; exec sleep 600")

    class EngineEnded(Exception):
        pass

    def check() -> None:
        if (tmp_path / "pid").exists() and (tmp_path / "pid").read_text():
            raise EngineEnded

    with pytest.raises(EngineEnded):
        harness.check_dataset(tmp_path / "log", check)
    assert not Path("/proc", (tmp_path / "pid").read_text().strip()).exists()


def text_of(found: Comparison) -> str:
    console = Console(file=io.StringIO(), width=80)
    report.show(found, console)
    text = console.file.getvalue()
    assert max(map(len, text.splitlines())) <= 80
    return text


def test_report_states_the_rule_and_the_verdict():
    good = comparison(evaluation(0.6, "a", "b", error=0.03), evaluation(0.58, "a", "x", error=0.03))
    text = text_of(good)
    assert "Same text: 1 of 2 answers." in text
    assert "4 of 4 requests got KV" in text
    assert "standard error of the difference" in text
    assert text.endswith("passed\n")
    assert text_of(replace(good, least_same=1)).endswith("failed\n")
    spoil = text_of(replace(good, spoiled=True))
    assert "spoiled on purpose" in spoil
    assert "standard error of" not in spoil


def test_the_json_has_all_that_the_page_shows():
    found = comparison(evaluation(0.6, "a", "b"), evaluation(0.5, "a", "x"), least=1)
    document = json.loads(json.dumps(report.as_json(found)))
    assert document["passed"] is False
    assert document["different"] == [1]
    summary = page.summary(document)
    assert summary.answer == (
        "A prefill/decode pair and a single engine score 0.600 and 0.500 by strict-match; 1 of 2 answers are "
        "the same text."
    )
    assert len(summary.notes) == 2
