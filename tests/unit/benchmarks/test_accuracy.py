"""`python -m benchmarks accuracy` without engines: task, lm-eval's files, evidence and verdict."""

from __future__ import annotations

import io
import json
import re
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from rich.console import Console
from torch import Generator

from benchmarks.accuracy import report
from benchmarks.accuracy.comparison import Comparison, Results, check_same_questions
from benchmarks.accuracy.evaluation import Answer, Evaluation, Score, read_evaluation
from benchmarks.accuracy.harness import Harness, HarnessError, Task, find_harness
from benchmarks.accuracy.moved import MovedKv, NothingMoved, check_moved, parse_moved
from benchmarks.accuracy.questions import read_questions, write_task
from benchmarks.accuracy.recall.models import MODELS
from benchmarks.accuracy.recall.task import PAIRS, WORDS, draw
from benchmarks.accuracy.spoiling import (
    FullSpoilingConnector,
    SpoilingConnector,
    StateSpoilingConnector,
    WindowSpoilingConnector,
)
from benchmarks.accuracy.subjects import read_subjects
from benchmarks.accuracy.ways import PEER, WAYS, alone, read_ways
from kvferry.common.errors import ConfigError
from kvferry.tools.serving.launch import fleet_specs
from kvferry.tools.serving.role import Role

RUN = Path(__file__).parent / "lm_eval_run"
"""What lm-eval wrote for two questions, without prompts and settings."""
TASK = "kvferry_questions"
FACTS = Path(__file__).parents[3] / "benchmarks" / "accuracy" / "facts.jsonl"
LINE = '{"question": "How many?", "answer": "All.\\n#### 7"}'
MOVED = MovedKv(asked=4, served=4, tokens=900, read_bytes=2 << 20, misses={})


def evaluation(value: float, *texts: str, error: float = 0.0) -> Evaluation:
    answers = {n: Answer(f"prompt {n}", text) for n, text in enumerate(texts)}
    return Evaluation("0.4.13", {"strict-match": Score(value, error)}, answers)


def comparison(found: Evaluation, single: Evaluation, way: str = "pair", least: float = 0) -> Comparison:
    return Comparison(way=WAYS[way], found=found, single=single, moved=MOVED, least_same=least)


def results(*comparisons: Comparison) -> Results:
    return Results(
        model="tiny",
        questions="GSM8K",
        examples=5,
        single=comparisons[0].single,
        comparisons=tuple(comparisons),
    )


def test_the_questions_of_the_project_can_be_asked():
    answers = [answer.rpartition("#### ")[2] for answer in read_questions(FACTS)]
    assert len(answers) == 24
    # An engine that always gives the same number is near chance.
    assert max(map(answers.count, answers)) <= 3


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
        read_questions(path)
    with pytest.raises(ConfigError, match="No such file"):
        read_questions(tmp_path / "others.jsonl")


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
    assert "prefill/decode pair: the scores by strict-match differ by -0.0510, allowed is 0.0500" in why
    assert comparison(evaluation(0.651, "a", "c", error=0.04), single).failures
    assert comparison(evaluation(0.5, "a"), evaluation(0.6, "a")).failures


def test_too_few_equal_answers_fail_if_a_least_number_is_given():
    pair, single = evaluation(0, "a", "b", "c", "d"), evaluation(0, "a", "b", "c", "x")
    found = comparison(pair, single, least=0.75)
    assert (found.same, found.different, found.failures) == (3, (3,), ())
    (why,) = comparison(pair, single, least=0.8).failures
    assert "3 of 4 answers are the same text" in why


def test_spoiled_kv_must_change_an_answer_and_most_scores():
    single = evaluation(1.0, "a", "b")
    assert not comparison(evaluation(0.5, "a", "x"), single, "spoiled").failures
    (why,) = comparison(evaluation(0.51, "a", "x"), single, "spoiled").failures
    assert "0.5100 with spoiled KV" in why
    same = evaluation(0.0, "a", "b")
    (why,) = comparison(same, same, "spoiled").failures
    assert "no answer changed" in why


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


def test_the_evidence_is_summed_over_engines_for_one_source_alone():
    assert parse_moved(PAGE, WAYS["tiers"].source) == MovedKv(9, 9, 0, 0, {})
    assert parse_moved(PAGE, PEER) == MovedKv(6, 4, 3600, 1_000_005, {"deadline": 2})
    assert parse_moved("", PEER) == MovedKv(0, 0, 0, 0, {})


def test_comparison_with_too_few_loads_is_an_error():
    check_moved(MOVED, 8)
    for moved, questions in ((MOVED, 9), (replace(MOVED, read_bytes=0), 4), (parse_moved("", PEER), 4)):
        with pytest.raises(NothingMoved, match="proves nothing"):
            check_moved(moved, questions)
    with pytest.raises(NothingMoved, match=r"4 of 20 requests .*deadline: 2"):
        check_moved(parse_moved(PAGE, PEER), 20)


def test_the_single_engine_differs_from_the_decode_engine_in_its_connector_alone():
    _, decode = fleet_specs("model", arguments=["--enforce-eager"])
    single = alone(decode)
    assert single.kv_transfer is None
    assert decode.kv_transfer is not None
    assert single.arguments == decode.arguments
    assert single.port != decode.port


def test_each_way_changes_what_its_name_says(tmp_path):
    fleet = partial(fleet_specs, "model", arguments=["--enforce-eager"])
    engines = {name: way.engines(fleet, tmp_path) for name, way in WAYS.items()}
    assert [one.role for one in engines["pair"]] == [Role.PREFILL, Role.DECODE]
    assert [one.tensor_parallel for one in (*engines["tp-2-1"], *engines["tp-1-2"])] == [2, 1, 1, 2]
    assert [one.arguments[-2:] for one in engines["blocks"]] == [
        ("--enforce-eager", "--block-size=64"),
        ("--enforce-eager", "--block-size=128"),
    ]
    (engine,) = engines["tiers"]
    assert engine.kv_transfer["kv_connector_extra_config"]["tiers"] == [
        {"type": "file", "path": str(tmp_path)}
    ]
    assert WAYS["tiers"].starts == 2
    prefill, decode = engines["spoiled"]
    for spoiled, sound in zip((prefill, decode), engines["pair"], strict=True):
        # A port is drawn for every engine.
        for one in (spoiled, sound):
            one.kv_transfer["kv_connector_extra_config"].pop("port", None)
            one.kv_transfer["kv_connector_extra_config"].pop("peers", None)
        same = sound.kv_transfer.keys() - {"kv_connector", "kv_connector_module_path"}
        assert {name: spoiled.kv_transfer[name] for name in same} == {
            name: sound.kv_transfer[name] for name in same
        }
    assert prefill.kv_transfer == engines["pair"][0].kv_transfer
    assert decode.kv_transfer["kv_connector"] == "SpoilingConnector"


def test_each_negative_control_zeroes_the_kinds_of_groups_that_it_names():
    assert {name: way.spoils for name, way in WAYS.items() if way.spoils} == {
        "spoiled": SpoilingConnector.kinds,
        "spoiled-full": FullSpoilingConnector.kinds,
        "spoiled-window": WindowSpoilingConnector.kinds,
        "spoiled-state": StateSpoilingConnector.kinds,
    }


def test_a_model_is_not_asked_with_spoiled_groups_that_it_does_not_have(tmp_path):
    subjects = read_subjects(f"gemma3, lfm2,nemotronh,qwen3next,{tmp_path}", FACTS, ["--seed=1"])
    gemma, _, nemotron, qwen, own = subjects
    found = {one.name: [way.name for way in WAYS.values() if one.can_show(way)] for one in subjects}
    assert found == {
        "gemma3": [name for name in WAYS if name != "spoiled-state"],
        **{
            name: [way for way in WAYS if way != "spoiled-window"]
            for name in ("lfm2", "nemotronh", "qwen3next")
        },
        str(tmp_path): list(WAYS),
    }
    assert (gemma.examples, own.examples) == (0, 5)
    assert own.arguments == ("--seed=1",)
    assert gemma.arguments[-1] == "--seed=1"
    assert nemotron.arguments[-2:] == ("--max-num-batched-tokens=64", "--seed=1")
    assert qwen.arguments[-3:] == ("--dtype=bfloat16", "--block-size=64", "--seed=1")


@pytest.mark.parametrize("trained", MODELS.values(), ids=MODELS)
def test_questions_of_a_trained_model_need_every_part_of_the_prompt(trained):
    lines = [json.loads(line) for line in (trained.folder / "questions.jsonl").read_text().splitlines()]
    places, gaps = set(), set()
    for line in lines:
        words = line["question"].split()
        (asked,) = (n for n, word in enumerate(words) if word.isupper())
        key = words.pop(asked).lower()
        assert words.count(key) == 1
        assert line["answer"] == f"#### {words[words.index(key) + 1]}"
        places.add(words.index(key) // 2)
        gaps.add((len(words) - asked) // 2)
    assert len(places) == len(words) // 2 == PAIRS
    assert gaps == set(range(trained.reach + 1))


def test_a_sequence_to_train_on_has_the_answer_and_the_places_where_it_is_found():
    drawn = draw(3, 6, 4, 2, Generator().manual_seed(1))
    fields = drawn.tokens, drawn.targets, drawn.pair, drawn.near, drawn.key
    for tokens, targets, pair, near, key in zip(*fields, strict=True):
        words = [WORDS[token] for token in tokens]
        asked = words[9]
        assert words[-4:-2] == ["Answer:", "####"]
        assert WORDS[targets[-3]] == words[-2]
        (places,) = pair[-3].nonzero(as_tuple=True)
        assert {(words[at - 1], words[at]) for at in places} == {(asked.lower(), words[-2])}
        assert near[-3].nonzero().tolist() == [[9]]
        told = [words[at - 1] if word.isdigit() else None for at, word in enumerate(words)]
        assert [WORDS[one] if one >= 0 else None for one in key] == [*told[:-3], asked.lower(), None, None]
        for at in (targets[1:-4] >= 0).nonzero().flatten() + 1:
            assert words[at + 1] == WORDS[targets[at]]
            assert words[at] in words[1:at]


def test_an_unknown_way_is_refused():
    assert [way.name for way in read_ways("spoiled, pair,pair")] == ["spoiled", "pair"]
    with pytest.raises(ConfigError, match="'teleport'; it may have pair, tp-2-1, tp-1-2, blocks"):
        read_ways("pair,teleport")


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
    task = Task(questions=FACTS, limit=2, concurrency=3)
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
    task = Task(questions=FACTS, limit=None, concurrency=1)
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


def text_of(found: Results) -> str:
    console = Console(file=io.StringIO(), width=80)
    report.show(found, console)
    text = console.file.getvalue()
    assert max(map(len, text.splitlines())) <= 80
    return text


def scored(value: float, *texts: str, error: float = 0.0) -> Evaluation:
    """Return a result with both filters of GSM8K."""
    found = evaluation(value, *texts, error=error)
    return replace(found, scores=dict.fromkeys(("strict-match", "flexible-extract"), Score(value, error)))


def test_report_has_a_row_per_way_the_rule_and_the_verdict():
    single = scored(0.58, "a", "x", error=0.03)
    good = comparison(scored(0.6, "a", "b", error=0.03), single, "blocks")
    spoiled = comparison(scored(0.0, "c", "d"), single, "spoiled")
    text = text_of(results(good, spoiled))
    rows = [re.split(" {2,}", line.strip()) for line in text.splitlines()]
    assert ["single engine", "0.58 ± 0.03", "0.58 ± 0.03"] in rows
    assert ["pair, blocks 64 to 128", "0.60 ± 0.03", "0.60 ± 0.03", "1/2", "900", "2 MiB"] in rows
    assert ["pair, KV zeroed", "0.00 ± 0.00", "0.00 ± 0.00", "0/2", "900", "2 MiB"] in rows
    assert "standard error of the difference" in text
    assert text.endswith("passed\n")
    assert text_of(results(replace(good, least_same=1))).endswith("failed\n")
    assert "standard error of" not in text_of(results(spoiled))


def test_several_models_have_one_table_in_the_end_with_a_row_per_system():
    single = scored(1.0, "a", "b")
    one = results(comparison(single, single), comparison(scored(0.0, "c", "d"), single, "spoiled-window"))
    other = replace(results(comparison(scored(0.5, "a", "d"), single)), model="models/other")
    console = Console(file=io.StringIO(), width=80)
    report.show_every([one, other], console)
    last = console.file.getvalue().rpartition("right answers")[2].splitlines()
    assert [re.split(" {2,}", line.strip()) for line in last] == [
        ["tiny", "other"],
        ["single engine", "1.00", "1.00"],
        ["prefill/decode pair", "1.00", "0.50"],
        ["pair, window zeroed", "0.00"],
    ]


def test_the_json_has_all_that_the_report_shows():
    found = results(comparison(evaluation(0.6, "a", "b"), evaluation(0.5, "a", "x"), least=1))
    document = json.loads(json.dumps(report.as_json(found)))
    assert document["passed"] is False
    assert document["single"]["strict-match"]["value"] == 0.5
    assert document["ways"]["pair"]["different"] == [1]
    assert len(document["failures"]) == len(document["ways"]["pair"]["failures"]) == 2
