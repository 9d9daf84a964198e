from __future__ import annotations

from dataclasses import dataclass, field, replace
from types import SimpleNamespace

from hypothesis import given, strategies as st

from kvferry.connector.bids import Bid, PlaceTokens, Speeds
from kvferry.connector.blocks import Headroom
from kvferry.connector.choosing import BidChooser
from kvferry.connector.engine import CacheGroup
from kvferry.engines.vllm.multi.child_admission import ChildAdmission
from kvferry.geometry import GroupKind
from support.clock import Clock
from support.offers import cost_policy, first_policy, weight_policy

PATIENCE, REST = 5.0, 1000


@dataclass
class Child:
    """A connector that answers as it is told to."""

    answer: tuple[int | None, bool] = (0, False)
    allocated: list[int] = field(default_factory=list)

    def get_num_new_matched_tokens(self, request: object, local_tokens: int) -> tuple[int | None, bool]:
        return self.answer

    def update_state_after_alloc(self, request: object, blocks: object, tokens: int) -> None:
        self.allocated.append(tokens)


def request(name: str = "r", tokens: int = REST) -> SimpleNamespace:
    return SimpleNamespace(request_id=name, num_tokens=tokens)


def blocks(*ids: int) -> SimpleNamespace:
    return SimpleNamespace(get_block_ids=lambda: (list(ids),))


def admission_of(*answers: tuple[int | None, bool], policy=None, attempts: int = 2, **more) -> tuple:
    clock = Clock()
    children = [Child(answer) for answer in answers]
    names = [f"c{n}" for n in range(len(children))]
    chooser = replace(policy or weight_policy({}), speeds=Speeds(clock), patience_seconds=PATIENCE)
    return ChildAdmission(names, children, chooser, attempts, clock, **more), children, clock


def test_the_best_bid_is_loaded_and_other_children_learn_the_blocks() -> None:
    ours, children, _ = admission_of((100, True), (300, True), (0, False))
    assert ours.matched(request(), 0) == (300, True)
    assert ours.chosen("r") == 1
    assert ours.allocated(request(), blocks(1), 300) is None, "it is loaded between steps"
    assert [child.allocated for child in children] == [[0], [300], [0]]
    assert ours.take_new() == {"r": 1}
    assert ours.take_new() == {}
    assert ours.counts.pending == {"c1": 1}
    ours.take_results({"r"}, set(), set())
    ours.allocated(request(), blocks(1), 0)  # as the engine does once the load is done
    assert [child.allocated for child in children] == [[0, 0], [300, 0], [0, 0]]
    ours.finished("r")
    assert len(ours) == 0
    assert ours.counts.take() == {
        **{("queries", name, ""): 1 for name in ("c0", "c1", "c2")},
        ("passed_over", "c0", ""): 1,
        ("hits", "c1", ""): 1,
        ("hit_tokens", "c1", ""): 300,
        ("misses", "c2", ""): 1,
        ("loads", "c1", "ready"): 1,
    }
    assert +ours.counts.pending == {}


def test_weights_and_order_decide() -> None:
    weighed, *_ = admission_of((100, True), (300, True), policy=weight_policy({"c0": 4.0}))
    assert weighed.matched(request(), 0) == (100, True)
    first, *_ = admission_of((1, True), (300, True), policy=first_policy())
    assert first.matched(request(), 0) == (1, True)
    equal, *_ = admission_of((300, True), (300, False))
    assert equal.matched(request(), 0) == (300, True)


def test_by_cost_a_slow_child_is_left_for_a_faster_one() -> None:
    clock = Clock()
    speeds = Speeds(clock)
    children = [Child((900, True)), Child((500, True))]
    ours = ChildAdmission(["slow", "fast"], children, BidChooser("cost", speeds, PATIENCE), 2, clock)
    speeds.record_computation(1000, 1.0)
    for name, seconds, tokens in (("a", 9.0, 900), ("b", 0.1, 500), ("c", 0.1, 500)):
        assert ours.matched(request(name), 0) == (tokens, True)
        ours.allocated(request(name), blocks(1), tokens)
        clock.now += seconds
        ours.take_results({name}, set(), set())


def test_by_cost_computing_begins_where_all_groups_can_continue() -> None:
    """The engine has the attention blocks of 800 of 1,000 tokens, and no state. Computing takes 1 s."""
    clock = Clock()
    speeds = Speeds(clock)
    speeds.record_computation(1000, 1.0)
    children = [Child((199, True))]
    ours = ChildAdmission(["one"], children, BidChooser("cost", speeds, PATIENCE), 2, clock)
    speeds.record_load((PlaceTokens("one", 199),), 0.3)
    assert ours.matched(request("a", 1000), 800) == (0, False), "the engine can compute the rest by itself"
    ours.prefix_cache = SimpleNamespace(resumable_tokens=lambda request: 0)
    assert ours.matched(request("b", 1000), 800) == (199, True)


def test_a_child_that_is_looking_holds_up_no_request_of_which_another_has_some() -> None:
    ours, children, _ = admission_of((None, False), (300, True))
    assert ours.matched(request(), 0) == (300, True)
    children[0].answer = (900, True)
    assert ours.matched(request(), 0) == (900, True), "it has answered before the load began"


def test_a_request_waits_for_silent_children_no_longer_than_computing_takes() -> None:
    ours, children, clock = admission_of((None, False), (0, False))
    for name, seconds in (("a", PATIENCE), ("b", 2.0)):
        assert ours.matched(request(name), 0) == (None, False)
        clock.now += seconds * 0.9
        assert ours.matched(request(name), 0) == (None, False)
        clock.now += seconds * 0.2
        assert ours.matched(request(name), 0) == (0, False)
        ours._chooser.speeds.record_computation(REST, 2.0)
    children[0].answer = (900, True)
    assert ours.matched(request("b"), 0) == (900, True), "it has answered after all"


def test_a_child_that_says_what_it_waits_for_bids_no_more_than_that() -> None:
    known = {}
    ours, *_ = admission_of((None, False), (300, True), awaited=lambda child, name: known[name])
    for name, tokens, promised, taken in (
        ("a", 900, True, None),
        ("b", 900, False, 300),
        ("c", 200, True, 300),
        ("d", 5 * REST, True, None),
    ):
        known[name] = Bid("peer", (PlaceTokens("peer", tokens),), looking=True, promised=promised)
        assert ours.matched(request(name), 0) == (taken, taken is not None), name
    most = Bid("c0", (PlaceTokens("c0", REST - 1),), looking=True, promised=True)
    assert ours._states["d"].awaited == most


def test_a_load_between_steps_waits_for_those_that_it_would_leave_no_room() -> None:
    ours, children, clock = admission_of((640, True))
    pool = SimpleNamespace(get_num_free_blocks=lambda: 21)
    groups = [
        CacheGroup(kind=GroupKind.FULL, attention_span=0, block_tokens=64),
        CacheGroup(kind=GroupKind.SLIDING, attention_span=64, block_tokens=64),
    ]
    ours.headroom = Headroom(groups, 256, pool)
    for name in "ab":
        assert ours.matched(request(name), 0) == (640, True), "11 blocks, and 6 and 4 are needed for the rest"
        ours.headroom.on_resumed({name})
    ours.allocated(request("a"), blocks(1), 640)
    pool.get_num_free_blocks = lambda: 20
    assert ours.matched(request("b"), 0) == (None, False)
    clock.now += PATIENCE
    assert ours.matched(request("b"), 0) == (0, False), "it is computed"
    ours.take_results({"a"}, {"a"}, set())
    ours.headroom.on_resumed({"a"})
    assert ours.matched(request("c"), 0) == (640, True), "nobody waits"
    ours.allocated(request("c"), blocks(1), 640)
    assert ours.matched(request("d"), 0) == (None, False)
    children[0].answer = (640, False)
    assert ours.matched(request("d"), 0) == (640, False), "within the step that uses it"


def test_no_child_is_waited_for_if_only_the_last_token_is_missing() -> None:
    ours, *_ = admission_of((None, False), (0, False))
    assert ours.matched(request(), REST - 1) == (0, False), "nothing is left to be found"


def test_the_chosen_child_stays_chosen_until_another_is_clearly_better() -> None:
    ours, children, _ = admission_of((300, True), (290, True))
    assert ours.matched(request(), 0) == (300, True)
    children[1].answer = (320, True)
    assert ours.matched(request(), 0) == (300, True)
    children[1].answer = (400, True)
    assert ours.matched(request(), 0) == (400, True)


def test_a_child_that_has_nothing_any_more_is_not_the_chosen_one() -> None:
    ours, children, _ = admission_of((300, True))
    assert ours.matched(request(), 0) == (300, True)
    children[0].answer = (0, False)
    assert ours.matched(request(), 0) == (0, False)
    assert ours.chosen("r") is None


def fail(ours: ChildAdmission, tokens: int) -> None:
    ours.allocated(request(), blocks(1), tokens)
    ours.take_results({"r"}, {"r"}, set())


def test_a_child_that_failed_is_struck_out_and_the_request_lets_others_pass_once() -> None:
    ours, *_ = admission_of((300, True), (100, True))
    assert ours.matched(request(), 0) == (300, True)
    fail(ours, 300)
    assert ours.matched(request(), 0) == (None, False)
    assert ours.matched(request(), 0) == (100, True)
    fail(ours, 100)
    assert ours.matched(request(), 0) == (None, False)
    assert ours.matched(request(), 0) == (0, False)
    assert (
        ours.counts.increments["loads", "c0", "failed"]
        == ours.counts.increments["loads", "c1", "failed"]
        == 1
    )


def test_an_offer_after_a_failure_that_finds_no_room_is_withdrawn() -> None:
    ours, *_ = admission_of((300, True), (100, True))
    ours.matched(request(), 0)
    fail(ours, 300)
    assert [ours.matched(request(), 0) for _ in range(3)] == [(None, False), (100, True), (0, False)]
    ours.allocated(request(), blocks(1), 0)
    assert ours.take_new() == {"r": 0}, "the withdrawn offer was loaded"


def test_a_failure_before_the_last_load_withdraws_no_later_offer() -> None:
    ours, *_ = admission_of((300, True), (100, True))
    ours.matched(request(), 0)
    fail(ours, 300)
    assert [ours.matched(request(), 0) for _ in range(2)] == [(None, False), (100, True)]
    ours.allocated(request(), blocks(1), 100)
    ours.take_results({"r"}, set(), set())
    ours.scheduled({"r"})
    assert [ours.matched(request(), 0) for _ in range(2)] == [(100, True)] * 2, "it was preempted"


def test_attempts_are_capped() -> None:
    ours, *_ = admission_of((300, True), (200, True), (100, True), attempts=2)
    for tokens in (300, 200):
        ours.matched(request(), 0)
        ours.matched(request(), 0)
        fail(ours, tokens)
    assert [ours.matched(request(), 0) for _ in range(2)] == [(None, False), (0, False)]


def test_a_preempted_request_may_be_served_again() -> None:
    ours, children, _ = admission_of((300, True), attempts=1)
    for _ in range(3):
        assert ours.matched(request(), 0) == (300, True)
        ours.allocated(request(), blocks(1), 300)
        ours.take_results({"r"}, set(), set())
        assert ours.matched(request(), 0) == (0, False), "nothing was computed since"
        ours.scheduled({"r"})
    assert children[0].allocated == [300] * 3


def test_the_last_token_alone_is_never_loaded() -> None:
    """Of a load of everything vLLM computes the last token again, and asks once more if there is no other."""
    ours, *_ = admission_of((1, True))
    assert ours.matched(request(tokens=1), 0) == (0, False)
    assert ours.matched(request(tokens=17), 16) == (0, False)
    assert ours.matched(request(tokens=2), 0) == (1, True)


def test_an_ended_request_is_forgotten_when_its_load_is_reported() -> None:
    ours, *_ = admission_of((300, True))
    ours.matched(request(), 0)
    ours.allocated(request(), blocks(1), 300)
    ours.finished("r")
    assert len(ours) == 1
    assert ours.counts.pending["c0"] == 1
    ours.take_results({"r"}, {"r"}, set())
    assert len(ours) == 0
    assert +ours.counts.pending == {}


def test_a_request_that_ends_right_after_its_load_is_forgotten() -> None:
    ours, *_ = admission_of((300, True))
    ours.matched(request(), 0)
    ours.allocated(request(), blocks(1), 300)
    ours.take_results({"r"}, set(), set())
    assert ours._loaded
    ours.finished("r")
    assert not ours._loaded


def test_a_synchronous_child_is_struck_out_by_the_blocks_that_did_not_load() -> None:
    ours, *_ = admission_of((300, False), (100, True))
    assert ours.matched(request(), 0) == (300, False)
    assert ours.allocated(request(), blocks(4, 5), 300) == 0
    assert ours.take_new() == {}, "nobody will report it"
    ours.take_results(set(), set(), {9})
    ours.take_results(set(), set(), {5})
    assert ours.matched(request(), 0) == (100, True), "preempted, it is asked for again"
    assert ours.counts.increments["loads", "c0", "failed"] == 1
    good, *_ = admission_of((300, False))
    good.matched(request(), 0)
    good.allocated(request(), blocks(4), 300)
    good.finished("r")
    assert good.counts.increments["loads", "c0", "ready"] == 1
    assert len(good) == 0


def test_invalid_blocks_of_finished_loads_exclude_no_child() -> None:
    ours, *_ = admission_of((300, True))
    ours.matched(request(), 0)
    ours.allocated(request(), blocks(4), 300)
    ours.take_results({"r"}, set(), set())
    ours.take_results(set(), set(), {4})
    assert ours.matched(request(), 0) == (300, True)


ANSWERS = st.one_of(
    st.just((None, False)),
    st.tuples(st.integers(1, REST), st.booleans()),
    st.just((0, False)),
)


@given(st.data())
def test_every_request_ends_with_any_answers_of_children(data) -> None:
    """Until it is admitted without a load, or with one that succeeds, however often loads fail."""
    count, attempts = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))
    policy = data.draw(
        st.sampled_from(
            [weight_policy({"c0": 0.5}), weight_policy({"c1": 0.0}), first_policy(), cost_policy(Speeds())]
        )
    )
    ours, children, clock = admission_of(*[(0, False)] * count, policy=policy, attempts=attempts)
    failed, loads, waited = set(), 0, 0.0
    while True:
        for child in children:
            child.answer = data.draw(ANSWERS)
        tokens, waits = ours.matched(request(), 0)
        if tokens is None:
            clock.now += 1.0
            waited += 1.0
            assert waited <= PATIENCE + attempts + 1
            continue
        before = [len(child.allocated) for child in children]
        ours.allocated(request(), blocks(loads), tokens)
        given_to = [child.allocated[-1] for child in children]
        assert [len(child.allocated) for child in children] == [n + 1 for n in before]
        if not tokens:
            assert not any(given_to)
            break
        (place,) = [n for n, more in enumerate(given_to) if more]
        assert (given_to[place], waits) == children[place].answer
        assert place not in failed
        loads += 1
        assert loads <= attempts
        if not data.draw(st.booleans()) and waits:
            ours.take_results({"r"}, {"r"}, set())
            failed.add(place)
            continue
        ours.take_results({"r"} if waits else set(), set(), set())
        break
    ours.finished("r")
    assert len(ours) == 0
    assert +ours.counts.pending == {}
    more = ours.counts.take()
    for child in (f"c{n}" for n in range(count)):
        asked = sum(more[what, child, ""] for what in ("hits", "passed_over", "misses"))
        assert more["queries", child, ""] == asked
        assert more["hits", child, ""] == sum(more["loads", child, how] for how in ("ready", "failed"))
