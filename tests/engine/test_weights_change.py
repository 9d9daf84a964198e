"""Weights that change under a running engine: nothing that was computed with others is used, by anybody.

Both engines have one checkpoint at first and tiers of their own. A trainer then loads another checkpoint into
one of them and resets vLLM's own prefix cache, of which the connector is not told.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.test_refusals import other_weights
from kvferry.connector.messages import MOVED
from kvferry.tools.serving.tiny import FAMILIES, tiny_checkpoint
from support.vllm_engine.inside import distance
from support.vllm_engine.pair import SOON, connector, prompt
from support.vllm_engine.process import Engine

pytestmark = pytest.mark.engine

KEPT, OFFERED, PULLED, MOVED_PROMPT = (prompt(500, seed) for seed in (1, 2, 3, 5))
SLEPT, TURNED, UNCLAIMED = (prompt(500, seed) for seed in (6, 7, 8))
EARLY = prompt(200, 4)
"""One step computes it."""


class Trained:
    """An engine whose weights are changed, and beside it one that keeps those of the start."""

    def __init__(self, folder: Path, checkpoints: Path) -> None:
        model = tiny_checkpoint("qwen3", checkpoints)
        self.model, self.other_model = str(model), str(other_weights(model, folder))
        own = {"kv_cache_memory_bytes": 32 << 20, "max_num_batched_tokens": 256, "sleeps": True}
        transfer = connector(tiers=[{"type": "host", "capacity": "64 MiB"}], transfer=True)
        options = {**FAMILIES["qwen3"].engine_options(), **own, "kv_transfer_config": transfer}
        self.engine = Engine(folder / "trained.log", model=str(model), **options)
        self.engine.ready()
        self.engine.call("start_another", {"model": str(model), **options})

    def say(self, text: list[int], params: Any = None) -> dict[str, Any]:
        """The engine's answer, without its own prefix cache."""
        self.engine.call("step", SOON)  # blocks that are leased cannot be forgotten
        assert self.engine.call("reset_prefix_cache")
        answer: dict[str, Any] = self.engine.call("generate", [text], [params])[0]
        return answer

    def beside(self, text: list[int], params: Any = None) -> dict[str, Any]:
        """The answer of the engine whose weights stay; it forgets what its tiers have, too."""
        self.engine.call("other", "step", SOON)
        assert self.engine.call("other", "reset_all")
        answer: dict[str, Any] = self.engine.call("other", "generate", [text], [params])[0]
        return answer

    def fall_asleep(self, level: int = 1) -> None:
        """Pause the engine, run its steps until nothing is left to do, and let it sleep, as a server does."""
        self.engine.call("pause")
        self.engine.call("step", SOON)
        self.engine.call("fall_asleep", level)

    def loads(self) -> list[str]:
        """Sources of the engine's loads since the last call."""
        return [source for source, *_ in self.engine.call("new_loads")]


@pytest.fixture(scope="module")
def trained(running: Any, checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trained]:
    running.close()
    found = Trained(tmp_path_factory.mktemp("trained"), checkpoints)
    yield found
    found.engine.close()


def test_an_engine_that_has_slept_hands_over_and_uses_its_tiers_as_before(trained: Trained) -> None:
    engine = trained.engine
    said = trained.beside(SLEPT)
    offer = engine.call("prefill", [SLEPT])[0]["params"]
    assert distance(trained.beside(SLEPT, offer), said) < 1e-4
    assert engine.call("other", "new_loads"), "handed over before"

    unclaimed = engine.call("prefill", [UNCLAIMED])[0]["params"]
    trained.fall_asleep()
    assert distance(trained.beside(UNCLAIMED, unclaimed), trained.beside(UNCLAIMED)) < 1e-4
    engine.call("other", "new_loads")
    assert engine.call("other", "loads_of", "peer")["ready"] == 1, "it may be read in vain, with its grant"
    assert distance(trained.beside(UNCLAIMED, unclaimed), trained.beside(UNCLAIMED)) < 1e-4
    assert engine.call("other", "new_loads") == [], "what a sleeping engine offered is computed"
    asleep = engine.call("other", "loads_of", "peer")

    engine.call("wake_up")
    trained.loads()
    assert distance(trained.say(SLEPT), said) < 1e-4
    assert trained.loads() == ["tiers"], "tiers have kept what the KV cache has lost"
    offer = engine.call("prefill", [SLEPT])[0]["params"]
    assert distance(trained.beside(SLEPT, offer), said) < 1e-4
    assert engine.call("other", "loads_of", "peer") == {**asleep, "ready": 2}, "handed over again"
    trained.loads()
    offer = engine.call("other", "prefill", [TURNED])[0]["params"]
    assert distance(trained.say(TURNED, offer), trained.beside(TURNED)) < 1e-4
    assert trained.loads() == ["peer"]
    assert engine.call("loads_of", "peer") == {"ready": 1}, "it reads from others again"


def test_kv_of_other_weights_is_never_used(trained: Trained) -> None:
    engine = trained.engine
    before = trained.say(KEPT)
    assert distance(trained.say(KEPT), before) < 1e-4
    assert "tiers" in trained.loads(), "with the weights of the start, what is kept is loaded"
    offer = engine.call("prefill", [OFFERED])[0]["params"]
    assert distance(trained.beside(OFFERED, offer), trained.beside(OFFERED)) < 1e-4

    engine.call("reload_weights", trained.other_model)
    early = engine.call("prefill", [EARLY])[0]["params"]
    assert early["remote_num_tokens"], "offered in the step in which the scheduler gets to know"
    assert distance(trained.beside(EARLY, early), trained.beside(EARLY)) < 1e-4

    after = trained.say(KEPT)
    assert distance(trained.say(KEPT), after) < 1e-4, "computed both times"
    assert trained.loads() == [], "tiers are left alone until a reset"
    assert distance(after, before) > 0.01, "the other weights say something else"

    assert not engine.call("prefill", [OFFERED])[0]["params"].get("remote_num_tokens"), "it offers nothing"
    pulled = engine.call("other", "prefill", [PULLED])[0]["params"]
    alone = trained.say(PULLED)
    assert distance(trained.say(PULLED, pulled), alone) < 1e-4
    assert trained.loads() == [], "it reads from no peer"

    assert engine.call("reset_all")
    assert distance(trained.say(KEPT), after) < 1e-4
    assert distance(trained.say(KEPT), after) < 1e-4
    assert trained.loads() == ["tiers"], "after a reset, what is kept is of the weights that are there"


def test_load_in_the_step_that_notices_new_weights_is_not_used(trained: Trained) -> None:
    trained.engine.call("step", SOON)
    trained.engine.call("reload_weights", trained.model)
    again = trained.say(KEPT)
    assert trained.loads() == ["tiers"]
    assert distance(trained.say(KEPT), again) < 1e-4, "computed both times"
    assert trained.loads() == []
    assert distance(again, trained.beside(KEPT)) < 1e-4, "it has the weights of the start again"


def test_tiers_stay_in_use_if_weights_change_after_a_reset(trained: Trained) -> None:
    """As a trainer does it: pause and reset, change, go on."""
    assert trained.engine.call("reset_all")
    trained.engine.call("reload_weights", trained.other_model)
    first = trained.say(KEPT)
    assert distance(trained.say(KEPT), first) < 1e-4
    assert trained.loads() == ["tiers"]


def test_weights_that_change_while_the_engine_sleeps_leave_nothing_of_the_old_ones(trained: Trained) -> None:
    """As a trainer does it: sleep, new weights, and only then memory for the KV cache."""
    engine = trained.engine
    before = trained.say(KEPT)
    trained.fall_asleep(level=2)
    engine.call("wake_up", ["weights"])
    engine.call("reload_weights", trained.model)
    engine.call("wake_up", ["kv_cache"])
    trained.loads()
    after = trained.say(KEPT)
    assert trained.loads() == [], "what is kept is of other weights"
    assert distance(trained.say(KEPT), after) < 1e-4
    assert trained.loads() == ["tiers"], "what is kept since is used"
    assert distance(after, trained.beside(KEPT)) < 1e-4
    assert distance(after, before) > 0.01


def test_tiers_never_fill_memory_that_the_engine_has_left(trained: Trained) -> None:
    """The last test of the second engine: it uses its tiers no more from here on."""

    def loads() -> list[str]:
        return [source for source, *_ in trained.engine.call("other", "new_loads")]

    def generate() -> dict[str, Any]:
        answer: dict[str, Any] = trained.engine.call("other", "generate", [MOVED_PROMPT])[0]
        return answer

    def say() -> dict[str, Any]:
        trained.engine.call("other", "step", SOON)
        assert trained.engine.call("other", "reset_prefix_cache")
        return generate()

    first = say()
    loads()
    assert distance(say(), first) < 1e-4
    assert loads() == ["tiers"]
    trained.engine.call("other", "step", SOON)
    assert trained.engine.call("other", "reset_prefix_cache")
    trained.engine.call("other", "move_cache", "clone")
    assert distance(generate(), first) < 1e-4, "the load of the step in which it is noticed is not used"
    assert loads() == ["tiers"]
    for _ in range(2):
        assert distance(say(), first) < 1e-4
        assert loads() == []
        assert trained.engine.call("other", "reset_all")
    assert trained.engine.log.read_text().count(f"{MOVED}: layer") == 1
