from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from kvferry.common.errors import ConfigError
from kvferry.tools.replay.trace.base import TraceFile
from kvferry.tools.replay.trace.csv_trace import CsvTrace
from support.examples import examples

HEADER = "arrival,prompt_tokens,output_tokens,session\n"
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens"
BURSTGPT = "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"


@pytest.fixture
def trace(tmp_path):
    def make(text: str, unit_tokens: int | None = None) -> CsvTrace:
        (tmp_path / "trace").write_text(text, newline="")
        return CsvTrace(TraceFile(tmp_path / "trace"), unit_tokens)

    return make


def facts(requests):
    return [(each.arrival, each.prompt_tokens, each.output_tokens, each.session) for each in requests]


def shared_tokens(one, other):
    pairs = zip(one.prefix_ids.tolist(), other.prefix_ids.tolist(), strict=False)
    return sum(first == second for first, second in pairs) * one.unit_tokens


@pytest.mark.parametrize(
    "text",
    [
        HEADER + "100,5,7,\n100.5,300,0,\n",
        "output_length,Timestamp,input_length\n7,100,5\n0,100.5,300\n",
        "\ufeff" + AZURE + "\r\n2023-11-16 18:15:46.6805900,5,7\r\n2023-11-16 18:15:47.1805900,300,0\r\n",
        AZURE + "\n2024-05-10 00:00:00.5+00:00,5,7\n2024-05-10T00:00:01Z,300,0\n",
        BURSTGPT + "5,,1.5,GPT-4,5,7,12,API log\n5.5,,1,GPT-4,300,0,300,API log\n",
        '\n"arrival","prompt_tokens","output_tokens"\n\n"1"," 5",7.0\n\n1.5,300.0,0\n',
    ],
)
def test_tables_of_many_sources_are_read(trace, text):
    found = trace(text)
    assert (found.format, found.unit_tokens) == ("csv", 256)
    assert facts(found) == [(0.0, 5, 7, ""), (0.5, 300, 0, "")]
    assert [len(each.prefix_ids) for each in found] == [0, 1]
    assert found.tells_prefixes == ("session" in text.lower())
    (note,) = found.notes() or [""]
    assert ("only lengths" in note) == (not found.tells_prefixes)


def test_requests_without_a_session_share_no_prefix(trace):
    requests = list(trace(HEADER + "0,100,9,\n" * 3 + "0,100,9,someone\n", 16))
    found = [one for each in requests for one in (*each.prefix_ids.tolist(), each.prompt_id)]
    assert len(set(found)) == len(found) == 4 * 7


def test_a_request_continues_its_session(trace):
    first, other, second = trace(HEADER + "0,100,28,a\n1,500,1,b\n2,200,1,a\n", 16)
    assert shared_tokens(first, second) == 128
    assert shared_tokens(first, other) == shared_tokens(other, second) == 0
    assert facts([second]) == [(2.0, 200, 1, "a")]


def test_a_shorter_prompt_keeps_what_it_has_room_for_and_goes_on_with_new_text(trace):
    rows = "0,160,32,a\n1,64,32,a\n2,192,0,a\n3,80,0,a\n4,160,0,a\n"
    first, shorter, longer, again, last = trace(HEADER + rows, 16)
    assert shared_tokens(first, shorter) == 64
    assert shared_tokens(shorter, longer) == 96
    assert shared_tokens(first, longer) == 64
    assert shared_tokens(longer, again) == 80
    assert shared_tokens(longer, last) == 80


def test_a_repeated_prompt_is_equal_up_to_its_end(trace):
    first, again = trace(HEADER + "0,100,60,a\n1,100,60,a\n", 16)
    assert shared_tokens(first, again) == 96
    assert first.prompt_id == again.prompt_id


@examples(60)
@given(
    st.lists(st.tuples(st.integers(1, 60), st.integers(0, 30)), min_size=1, max_size=8), st.integers(1, 20)
)
def test_a_session_is_what_a_list_of_tokens_says(tmp_path_factory, turns, unit):
    path = tmp_path_factory.getbasetemp() / "session.csv"
    rows = (f"{n},{prompt},{output},a\n" for n, (prompt, output) in enumerate(turns))
    path.write_text(HEADER + "".join(rows))
    texts: list[list[object]] = [[]]
    for n, (prompt, output) in enumerate(turns):
        kept = texts[-1][:prompt]
        texts.append([*kept, *((n, place) for place in range(len(kept), prompt + output))])
    tokens_by_id: dict[int, tuple[object, ...]] = {}
    for request, text in zip(CsvTrace(TraceFile(path), unit), texts[1:], strict=True):
        for end, identity in enumerate(request.prefix_ids.tolist(), 1):
            tokens = tuple(text[: end * unit])
            assert tokens_by_id.setdefault(identity, tokens) == tokens
    # A text that a session goes on with is new, so equal tokens have the same identity too.
    assert len(set(tokens_by_id.values())) == len(tokens_by_id)


def test_a_missing_column_is_named(trace):
    with pytest.raises(
        ConfigError, match=r"^trace, line 2: no column arrival and output_tokens in the header "
    ):
        trace("\nwhen,prompt_tokens\n")


@pytest.mark.parametrize(
    "row",
    [
        "1,x,5,",
        "1,5",
        "1,0,5,",
        "1,5,-1,",
        "1,5.5,1,",
        "1,16777217,1,",
        "1,inf,1,",
        "2024-05-10,5,1,",
        ",5,1,",
    ],
)
def test_a_wrong_row_is_refused_with_its_line(trace, row):
    with pytest.raises(
        ConfigError, match=r"^trace, line 3: found .*; expected an arrival like the first requ"
    ):
        list(trace(HEADER + f"0,5,1,\n{row}\n"))


def test_the_line_of_an_error_counts_line_breaks_inside_of_cells(trace):
    with pytest.raises(ConfigError, match=r"^trace, line 5: found"):
        list(trace(HEADER + '0,5,1,"a\nb"\n\n1,x,5,\n'))


def test_invalid_csv_is_refused(trace):
    with pytest.raises(ConfigError, match=r"^trace, line 2: this is no CSV: "):
        list(trace(HEADER + '1,5,1,"' + "x" * 200_000))
    with pytest.raises(ConfigError, match=r"at most 1e.11 s"):
        list(trace(HEADER + "1760000000000,5,1,\n"))


def test_names_of_sessions_may_be_any_bytes(tmp_path):
    (tmp_path / "trace").write_bytes(HEADER.encode() + b"0,300,1,\xe9\n1,400,1,\xe8\n2,600,1,\xe9\n")
    first, other, second = CsvTrace(TraceFile(tmp_path / "trace"), 16)
    assert (first.session, other.session) == ("\\xe9", "\\xe8")
    assert (shared_tokens(first, second), shared_tokens(first, other)) == (288, 0)
