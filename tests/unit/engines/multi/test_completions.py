from __future__ import annotations

from hypothesis import given, strategies as st

from kvferry.engines.vllm.compat.connectors import KVConnectorTransferResults as Results
from kvferry.engines.vllm.multi.completions import Completions


def test_only_the_child_that_loads_says_when_a_request_has_arrived() -> None:
    ours = Completions()
    ours.expect({"a": 1}, {})
    assert ours.join([Results(finished_recving={"a"}, failed_recving={"a"}), Results()]) == Results()
    assert ours.join([Results(), Results(finished_recving={"a"})]) == Results(finished_recving={"a"})
    assert ours.join([Results(), Results(finished_recving={"a"})]) == Results(), "it was reported twice"
    assert len(ours) == 0


def test_a_failed_load_is_given_to_another_child() -> None:
    ours = Completions()
    ours.expect({"a": 0}, {})
    failed = Results(finished_recving={"a"}, failed_recving={"a"})
    assert ours.join([failed, Results()]) == failed
    ours.expect({"a": 1}, {})
    assert ours.join([failed, Results(finished_recving={"a"})]) == Results(finished_recving={"a"})


def test_results_of_unexpected_requests_are_dropped() -> None:
    assert Completions().join([Results({"a"}, {"b"}, {"b"})]) == Results()


@given(st.data())
def test_a_request_is_sent_once_after_all_children_have_released_its_blocks(data) -> None:
    places = data.draw(st.integers(1, 4))
    holders = {name: data.draw(st.sets(st.integers(0, places - 1), min_size=1)) for name in ("a", "b", "c")}
    says = [(name, place) for name, of in holders.items() for place in of]
    noise = [(name, place) for name in holders for place in range(places) if place not in holders[name]]
    order = data.draw(st.permutations(says + data.draw(st.permutations(noise))))
    ours, left, sent = Completions(), {name: set(of) for name, of in holders.items()}, []
    ours.expect({}, holders)
    for name, place in order:
        reports = [Results() for _ in range(places)]
        reports[place] = Results(finished_sending={name})
        found = ours.join(reports).finished_sending
        was = bool(left[name])
        left[name].discard(place)
        assert found == ({name} if was and not left[name] else set())
        sent += found
    assert sorted(sent) == sorted(holders)
    assert len(ours) == 0
