from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from kvferry.common.errors import ConfigError
from kvferry.tools.replay.trace.base import TraceFile
from kvferry.tools.replay.trace.hashed import HashedTrace
from support.examples import examples
from support.replayed import chained

MOONCAKE = [
    {"timestamp": 0, "input_length": 2290, "output_length": 316, "hash_ids": [0, 42, 43, 44, 45]},
    {"timestamp": 27482, "input_length": 1536, "output_length": 1, "hash_ids": [0, 42, 43]},
    {"timestamp": 30535, "input_length": 2290, "output_length": 5, "hash_ids": [0, 42, 43, 44, 45]},
    {"timestamp": 30535, "input_length": 2300, "output_length": 0, "hash_ids": [0, 42, 7, 44, 45]},
]
BLOCKS = {"block_size": 64, "hash_ids": [2001, 2002], "input_length": 128}


@pytest.fixture
def trace(tmp_path):
    def make(*records: object, unit_tokens: int | None = None) -> HashedTrace:
        (tmp_path / "trace").write_text("".join(json.dumps(each) + "\n" for each in records))
        return HashedTrace(TraceFile(tmp_path / "trace"), unit_tokens)

    return make


def ids(requests):
    return [request.prefix_ids.tolist() for request in requests]


def test_mooncakes_traces_have_milliseconds_and_units_of_512_tokens(trace):
    found = trace(*MOONCAKE)
    requests = list(found)
    assert (found.format, found.unit_tokens, found.header) == ("mooncake", 512, {})
    assert [each.arrival for each in requests] == [0.0, 27.482, 30.535, 30.535]
    assert [each.prompt_tokens for each in requests] == [2290, 1536, 2290, 2300]
    assert [each.output_tokens for each in requests] == [316, 1, 5, 0]
    assert found.notes() == []


def test_the_last_id_stands_for_the_incomplete_unit(trace):
    requests = list(trace(*MOONCAKE))
    whole = chained([0, 42, 43, 44, 45]).tolist()
    assert ids(requests)[:3] == [whole[:4], whole[:3], whole[:4]]
    assert [each.prompt_id for each in requests[::2]] == [whole[4]] * 2
    assert ids(requests)[3][:2] == whole[:2]
    assert not {*ids(requests)[3][2:], requests[3].prompt_id} & {*whole}


def test_a_trace_can_be_read_again(trace):
    found = trace(*MOONCAKE)
    assert ids(found) == ids(found)
    assert found.position() == found.length > 0


def test_bailians_traces_have_seconds_and_units_of_16_tokens(trace):
    record = {"chat_id": 159, "parent_chat_id": 55, "timestamp": 61.114, "input_length": 40}
    rest = {"output_length": 132, "type": "text", "turn": 2, "hash_ids": [1089, 1090, 6326]}
    found = trace(record | rest, record | rest | {"timestamp": 63.25})
    assert (found.format, found.unit_tokens) == ("bailian", 16)
    assert [each.arrival for each in found] == [0.0, pytest.approx(2.136)]


def test_a_block_size_is_the_length_of_units_and_an_argument_is_so_without_it(trace):
    assert (trace(BLOCKS).format, trace(BLOCKS, unit_tokens=16).unit_tokens) == ("blocks", 64)
    assert trace({"hash_ids": [1], "input_length": 30}, unit_tokens=32).unit_tokens == 32
    mooncake = trace(
        {"timestamp": 0, "input_length": 30, "output_length": 1, "hash_ids": [3]}, unit_tokens=32
    )
    assert (mooncake.format, mooncake.unit_tokens) == ("mooncake", 32)
    with pytest.raises(ConfigError, match=r"no block_size, so .* is unknown; give it with --unit-tokens$"):
        trace({"hash_ids": [1], "input_length": 30})


def test_requests_without_times_are_one_second_apart(trace):
    found = trace(BLOCKS, BLOCKS, BLOCKS)
    assert [each.arrival for each in found] == [0.0, 1.0, 2.0]
    assert found.notes() == ["the trace has no times; its requests are replayed one second apart"]
    with pytest.raises(ConfigError, match=r"^trace, line 2: only some requests have a timestamp; give all"):
        list(trace(BLOCKS, BLOCKS | {"timestamp": 5}))


def test_late_requests_are_counted_anew_in_each_reading(trace):
    found = trace(*(MOONCAKE[0] | {"timestamp": time} for time in (1000, 500, 700, 2000)))
    for _ in range(2):
        assert [each.arrival for each in found] == [0.0, 0.0, 0.0, 1.0]
        assert found.notes() == ["not in order of arrival: 2 requests, which arrive with the request before"]


def test_a_prompts_incomplete_unit_without_id_is_equal_to_no_other(trace):
    record = {"block_size": 16, "hash_ids": [5], "input_length": 20}
    first, second, short = trace(record, record, record | {"hash_ids": [], "input_length": 3})
    assert first.prefix_ids.tolist() == second.prefix_ids.tolist() == chained([5]).tolist()
    assert len({first.prompt_id, second.prompt_id, short.prompt_id}) == 3
    assert len(short.prefix_ids) == 0


def test_any_integer_or_string_is_an_identity(trace):
    values = [5, "5", "05", -1, "-1", 2**64 - 1, str(2**64 - 1), 2**64, str(2**64), "a1f", "\u0665", 10**300]
    records = [{"block_size": 1, "input_length": 1, "hash_ids": [value]} for value in values]
    found = [request.prefix_ids.tolist()[0] for request in trace(*records)]
    alone = [next(iter(trace(record))).prefix_ids.tolist()[0] for record in records]
    assert found == alone
    assert found[0] == chained([5])[0]
    equal = [tuple(str(one) for one in values if str(one) == str(value)) for value in values]
    assert [found.count(each) for each in found] == [len(each) for each in equal]


def test_blocks_of_other_lengths_share_as_far_as_units_are_equal(trace):
    base = {"block_size": 16, "input_length": 1}
    plain = {"block_size": 16, "input_length": 40, "hash_ids": [1, 2, 3]}
    even = base | {"hash_ids": [1, 2, 3], "block_tokens": [16, 16, 8]}
    odd = base | {"hash_ids": [1, 2, 3], "block_tokens": [16, 8, 10]}
    longer = base | {"hash_ids": [1, 2, 3, 4], "block_tokens": [16, 8, 10, 30]}
    requests = list(trace(plain, even, odd, longer))
    assert [each.prompt_tokens for each in requests] == [40, 40, 34, 64]
    assert ids(requests)[0] == ids(requests)[1]
    assert requests[0].prompt_id == requests[1].prompt_id
    assert [len(each) for each in ids(requests)] == [2, 2, 2, 4]
    # Units 0 and 1 end after 16 and 32 tokens, at the end of block 1 and inside block 3.
    assert ids(requests)[2] == ids(requests)[3][:2]
    assert ids(requests)[2][0] == ids(requests)[0][0]
    assert ids(requests)[2][1] != ids(requests)[0][1]
    assert len(set(ids(requests)[3])) == 4


@examples(60)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=5), st.integers(1, 20))
def test_blocks_of_any_lengths_give_an_identity_for_each_unit(tmp_path_factory, block_tokens, unit_tokens):
    path = tmp_path_factory.getbasetemp() / "any lengths"
    record = {"block_size": unit_tokens, "hash_ids": list(range(len(block_tokens))), "input_length": 1}
    path.write_text(json.dumps(record | {"block_tokens": block_tokens}))
    [request] = HashedTrace(TraceFile(path), None)
    assert request.prompt_tokens == sum(block_tokens)
    found = [*request.prefix_ids.tolist(), request.prompt_id]
    assert len(found) == len(set(found)) == sum(block_tokens) // unit_tokens + 1


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"input_length": 0}, "Expected `int` >= 1 - at `$.input_length`, in {"),
        ({"input_length": 1 << 25}, "Expected `int` <= 16777216"),
        ({"hash_ids": [1.5, 2]}, "Expected `int | str`, got `float`"),
        ({"hash_ids": [True, 2]}, "Expected `int | str`, got `bool`"),
        ({"hash_ids": None}, "Expected `array`, got `null`"),
        ({"output_length": -1}, "Expected `int` >= 0"),
        ({"block_size": 32}, "block_size is 32 after 64; all must be equal"),
        ({"block_tokens": [64]}, "1 block_tokens for 2 hash_ids; expected one for each"),
        ({"block_tokens": [64, 0]}, "Expected `int` >= 1"),
        ({"block_tokens": [1 << 24, 1]}, "16,777,217 tokens in block_tokens; expected at most 16,777,216"),
        ({"hash_ids": [], "block_tokens": []}, "0 block_tokens for 0 hash_ids"),
        ({"hash_ids": [1, 2, 3]}, "3 hash_ids for 128 prompt tokens; expected 2 of 64 tokens each; correct"),
        ({"hash_ids": []}, "0 hash_ids for 128 prompt tokens; expected 2 of 64 tokens each; correct"),
    ],
)
def test_a_wrong_record_is_refused_with_its_line(trace, change, problem):
    found = iter(trace(BLOCKS, BLOCKS | change))
    with pytest.raises(ConfigError) as caught:
        list(found)
    message = str(caught.value)
    assert message.startswith("trace, line 2: ")
    assert problem in message
    assert "; correct " in message


def test_a_wrong_number_of_ids_tells_which_units_would_fit(trace):
    with pytest.raises(ConfigError, match=r"; correct this line, or set --unit-tokens to 483 to 519$"):
        list(trace({"hash_ids": list(range(14)), "input_length": 6758}, unit_tokens=16))
    with pytest.raises(ConfigError, match=r"; correct this line$"):
        list(trace(BLOCKS | {"hash_ids": list(range(14)), "input_length": 6758}))


LOOK_UPS = Path(__file__).parent / "samples" / "lmcache.jsonl"
"""Look-ups of three prompts, written by LMCache 0.5.6 (`TokenHasher` and `LookupHashLoggingSubscriber`).

The first two share 600 tokens, and the third begins with all 1,030 tokens of the first.
"""


def test_look_ups_of_lmcache_have_seconds_and_a_chunk_per_hash():
    found = HashedTrace(TraceFile(LOOK_UPS), None)
    first, second, third = found
    assert (found.format, found.unit_tokens, found.notes()) == ("lmcache", 256, [])
    assert [each.arrival for each in (first, second, third)] == [0.0, 1.25, 3.75]
    assert [each.prompt_tokens for each in (first, second, third)] == [1030, 800, 1330]
    assert {each.output_tokens for each in (first, second, third)} == {0}
    assert second.prefix_ids[:2].tolist() == first.prefix_ids[:2].tolist()
    assert not set(second.prefix_ids[2:]) & set(first.prefix_ids)
    assert third.prefix_ids[:4].tolist() == first.prefix_ids.tolist()


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (
            {"model_name": "Qwen3-8B"},
            "line 2: model_name is Qwen3-8B after Llama-3.1-8B; replay the requests of each",
        ),
        (
            {"chunk_hashes": ["0x1"]},
            "line 2: 1 hash_ids for 1,030 prompt tokens; expected 5 of 256 tokens each",
        ),
        ({"chunk_size": 128}, "line 2: block_size is 128 after 256"),
    ],
)
def test_look_ups_that_cannot_be_used_are_refused(trace, change, problem):
    look_up = json.loads(LOOK_UPS.read_text().splitlines()[0])
    with pytest.raises(ConfigError, match=problem):
        list(trace(look_up, look_up | change))
