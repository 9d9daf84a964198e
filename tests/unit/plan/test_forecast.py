"""What is planned, on examples small enough to count by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvferry.common.errors import GeometryError
from kvferry.planning.strategy import Costs, Strategy
from kvferry.tools.models import read_model
from kvferry.tools.plan.blocks import group_counts
from kvferry.tools.plan.forecast import Pricing, forecast, limit_bandwidth
from kvferry.tools.plan.side import EngineSide, block_tokens

DIRECT = Pricing(Costs(), Strategy.DIRECT)
# 4 layers, 4 KV heads of 16 elements of 2 bytes: 64 bytes per head and token, K and V.
DENSE = {
    "model_type": "llama", "num_hidden_layers": 4, "hidden_size": 128, "num_attention_heads": 8,
    "num_key_value_heads": 4, "torch_dtype": "bfloat16",
}  # fmt: skip
WINDOWED = {
    **DENSE,
    "model_type": "gemma3_text",
    "num_hidden_layers": 6,
    "head_dim": 16,
    "sliding_window": 64,
}
LATENT = {**DENSE, "model_type": "deepseek_v3", "kv_lora_rank": 512, "qk_rope_head_dim": 64}
HYBRID = {
    **DENSE, "model_type": "nemotron_h", "hybrid_override_pattern": "MM*-", "mamba_num_heads": 8,
    "mamba_head_dim": 32, "n_groups": 2, "ssm_state_size": 16, "conv_kernel": 4,
}  # fmt: skip
PAGE = 16 * 4 * 64
LAYOUTS = ("LBNHC", "LBHNC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")


def planned(config, here=EngineSide(), there=None, tokens=160, pricing=DIRECT, **more):  # noqa: B008 - frozen
    return forecast(read_model(config), (here, there or here), tokens, pricing, **more)


def test_pages_of_one_layer_are_one_run_each():
    whole = planned(DENSE).whole
    assert (whole.pages, whole.descriptors) == (40, 40)
    assert (whole.run_bytes, whole.block_run_bytes, whole.bytes) == (PAGE, PAGE, 40 * PAGE)
    assert whole.full_bytes == whole.bytes


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_moves_the_same_bytes_in_runs_of_its_own(layout):
    whole = planned(DENSE, EngineSide(layout=layout)).whole
    runs = {"L": PAGE, "B": 4 * PAGE}[layout[0]] if layout != "LHBNC" else PAGE // 4
    assert (whole.bytes, whole.run_bytes) == (40 * PAGE, runs)
    assert whole.descriptors == whole.bytes // runs


def test_heads_outside_tokens_are_shared_out_in_one_piece_per_layer():
    nhd, hnd = (
        planned(DENSE, EngineSide(layout=each), EngineSide(2, layout=each)).whole
        for each in ("LBNHC", "LBHNC")
    )
    assert (nhd.run_bytes, nhd.descriptors) == (2 * 64, 2 * 40 * 16)
    assert (hnd.run_bytes, hnd.descriptors) == (PAGE // 2, 2 * 40)
    assert nhd.bytes == hnd.bytes == 40 * PAGE


def test_one_descriptor_per_block_and_rank_with_heads_outside_layers():
    whole = planned(DENSE, EngineSide(layout="BHLNC"), EngineSide(4, layout="BHLNC")).whole
    assert (whole.descriptors, whole.block_run_bytes) == (4 * 10, PAGE)


def test_more_ranks_than_heads_get_copies():
    assert planned(DENSE, EngineSide(), EngineSide(8)).whole.bytes == 2 * 40 * PAGE


def test_a_latent_goes_to_every_rank_whole():
    whole = planned(LATENT, EngineSide(), EngineSide(4)).whole
    assert whole.bytes == 4 * 4 * 10 * 16 * 576 * 2


def test_pipeline_ranks_have_layers_of_their_own():
    one, two = planned(DENSE), planned(DENSE, EngineSide(), EngineSide(pp=2))
    assert two.whole.bytes == one.whole.bytes
    assert two.whole.seconds == pytest.approx(one.whole.seconds / 2)


def test_the_last_prompt_token_is_not_moved_so_one_that_opens_a_block_saves_it():
    assert planned(DENSE, tokens=161).whole.pages == 40
    assert planned(DENSE, tokens=162).whole.pages == 44
    assert planned(DENSE, tokens=1).whole.bytes == 0


def test_a_window_moves_the_blocks_that_hold_it():
    window, full = planned(WINDOWED).rows
    # Next is token 159, which sees 96 to 159: four blocks; the last one computes itself.
    assert (window.layers, window.cache.attention_span, window.estimate.pages) == (5, 64, 5 * 4)
    assert (full.layers, full.estimate.pages) == (1, 10)
    assert window.tokens == 63
    assert window.estimate.full_bytes == 5 * 10 * PAGE
    assert planned(WINDOWED).whole.full_bytes == 6 * 10 * PAGE


def test_groups_have_as_many_layers_as_the_rarest_kind():
    window, full = planned(WINDOWED, EngineSide(layout="BLHNC")).rows
    assert (window.tables, full.tables) == (5, 1)
    assert window.estimate.block_run_bytes == PAGE


@pytest.mark.parametrize(
    ("counts", "size"), [((12, 12), 12), ((12, 13), 13), ((10, 14), 14), ((10, 15), 10), ((10, 52), 10)]
)
def test_the_size_of_groups_is_vllms(counts, size):
    window, full = (next(iter(read_model(c).cache.layers)) for c in (WINDOWED, DENSE))
    layers = [window] * counts[0] + [full] * counts[1]
    found = group_counts(layers, 1, "LBNHC", dict.fromkeys(layers, 16))
    assert found == {window: -(-counts[0] // size), full: -(-counts[1] // size)}
    assert group_counts([full] * 9, 1, "LBNHC", {full: 16}) == {full: 1}


STATE = 3 * (8 * 32 + 2 * 2 * 16) * 2 + 8 * 32 * 16 * 4


def test_state_moves_one_snapshot_however_long_the_prompt_is():
    for tokens in (200, 4000):
        state, _ = planned(HYBRID, tokens=tokens).rows
        assert (state.estimate.pages, state.estimate.bytes) == (2, 2 * STATE)
        assert state.is_state


def test_the_longest_run_of_a_block_is_that_of_the_longest_kind():
    made = planned(HYBRID)
    assert [row.estimate.block_run_bytes for row in made.rows] == [STATE, 80 * 256]
    assert made.whole.block_run_bytes == 80 * 256


def test_state_is_compared_with_attention_in_its_place():
    made = planned(HYBRID, EngineSide(block_tokens=16), tokens=160)
    state, full = made.rows
    assert full.estimate.full_bytes == 10 * PAGE
    assert state.estimate.full_bytes == 2 * 10 * PAGE
    assert made.whole.full_bytes == 3 * 10 * PAGE


def test_a_model_without_attention_has_nothing_to_compare_with():
    made = planned({**HYBRID, "hybrid_override_pattern": "MMM-"})
    assert made.whole.full_bytes is None
    assert made.blocks == (16, 16)


def test_a_page_of_attention_holds_a_snapshot_unless_asked_otherwise():
    reading = read_model(HYBRID)
    # 18304 bytes of state, 16 x 256 bytes of attention in the least block: 5 of those.
    tokens, why = block_tokens(reading, EngineSide())
    assert (STATE, tokens) == (18304, 80)
    assert "hold a snapshot of state (18,304 bytes)" in why
    assert planned(HYBRID).notes == (why,)
    # At TP4 a rank has a head of attention and two of state, but the groups of B and C are copied.
    assert block_tokens(reading, EngineSide(4))[0] == 16 * -(
        -(3 * (2 * 32 + 2 * 16) * 2 + 2 * 32 * 16 * 4) // (16 * 64)
    )
    # A block size that was asked for is multiplied, unless it is large enough.
    assert block_tokens(reading, EngineSide(block_tokens=32))[0] == 96
    assert block_tokens(reading, EngineSide(block_tokens=128)) == (128, "")


def test_a_larger_block_on_one_side_cuts_runs_to_the_smaller_one():
    whole = planned(DENSE, EngineSide(), EngineSide(block_tokens=32)).whole
    assert (whole.run_bytes, whole.descriptors, whole.bytes) == (PAGE, 40, 40 * PAGE)
    assert whole.pages == 20


def test_k_and_v_apart_are_half_as_long_and_twice_as_many():
    whole = planned(DENSE, separate=True).whole
    assert (whole.run_bytes, whole.descriptors, whole.bytes) == (PAGE // 2, 80, 40 * PAGE)
    (row,) = planned(DENSE, separate=True).rows
    assert (row.layers, row.tables, row.page_bytes) == (4, 2, PAGE // 2)


def test_time_is_the_planners_own_and_a_slow_link_makes_it_longer():
    costs = Costs()
    made = planned(DENSE).whole
    expected = 40 * costs.read_descriptor_seconds + 40 * PAGE * costs.read_byte_seconds
    assert made.seconds == pytest.approx(expected)
    slow = planned(DENSE, pricing=Pricing(limit_bandwidth(Costs(), 1.0), Strategy.DIRECT)).whole
    assert slow.seconds == pytest.approx(40 * costs.read_descriptor_seconds + 40 * PAGE * 1e-9)
    assert limit_bandwidth(Costs(), 1e6) == replace(costs, lanes_byte_gain=1.0)


def test_short_runs_are_staged_and_a_pinned_strategy_is_kept():
    here, there = EngineSide(), EngineSide(2)
    cheapest = planned(DENSE, here, there, 16_000, Pricing(Costs())).whole
    direct = planned(DENSE, here, there, 16_000).whole
    assert cheapest.strategy == "staged"
    assert direct.strategy == "direct"
    assert cheapest.seconds < direct.seconds
    assert cheapest.read_descriptors < direct.read_descriptors == direct.descriptors


def test_engines_of_one_machine_share_memory_where_the_link_is_slow():
    slow = limit_bandwidth(Costs(), 0.2)
    apart, here = (
        planned(DENSE, tokens=16_000, pricing=Pricing(slow, one_machine=one)).whole for one in (False, True)
    )
    assert (apart.strategy, here.strategy) == ("direct", "shared")
    assert here.seconds < apart.seconds / 10
    assert (here.read_bytes, here.read_descriptors) == (0, 0)
    fast = Pricing(Costs(), one_machine=True)
    assert planned(DENSE, tokens=16_000, pricing=fast).whole.strategy == "direct"
    pinned = planned(DENSE, tokens=16_000, pricing=Pricing(slow, Strategy.SHARED)).whole
    assert (pinned.strategy, pinned.seconds) == ("shared", here.seconds)


def test_an_impossible_engine_is_refused():
    with pytest.raises(GeometryError, match="4 heads on 3 tensor-parallel ranks"):
        planned(DENSE, EngineSide(3))
    with pytest.raises(GeometryError, match="4 layers on 5 pipeline ranks"):
        planned(DENSE, EngineSide(pp=5))
    with pytest.raises(GeometryError, match="all pages of a rank must have one shape"):
        planned(HYBRID, EngineSide(layout="BHLNC"))


def test_blocks_that_have_only_a_token_in_common_move_token_by_token():
    whole = planned(DENSE, EngineSide(block_tokens=1024), EngineSide(block_tokens=1023), 3000).whole
    assert whole.bytes == 2999 * 4 * 4 * 64
    # The tokens of a layer lie side by side: only where a block ends on either side, a run does.
    assert whole.descriptors == 4 * 5
