"""What the tiers keep, on examples small enough to count by hand."""

from __future__ import annotations

import pytest

from kvferry.common.errors import ConfigError
from kvferry.tools.cli import plan as command
from kvferry.tools.models import read_model
from kvferry.tools.plan.kept import KeptSettings, forecast_tiers
from kvferry.tools.plan.side import EngineSide

# 4 KV heads of 16 elements of 2 bytes, K and V: 256 bytes per token and layer.
DENSE = {
    "model_type": "llama", "num_hidden_layers": 4, "hidden_size": 128, "num_attention_heads": 8,
    "num_key_value_heads": 4, "torch_dtype": "bfloat16",
}  # fmt: skip
# 5 layers of a window, 1 of full attention.
WINDOWED = {
    **DENSE, "model_type": "gemma3_text", "num_hidden_layers": 6, "head_dim": 16, "sliding_window": 64
}  # fmt: skip
# 2 layers of state: 8 heads of 32 x 16 elements of 4 bytes; 256, 32 and 32 channels of 3 elements of 2 bytes.
HYBRID = {
    **DENSE, "model_type": "nemotron_h", "hybrid_override_pattern": "MM*-", "mamba_num_heads": 8,
    "mamba_head_dim": 32, "n_groups": 2, "ssm_state_size": 16, "conv_kernel": 4,
    "mamba_ssm_cache_dtype": "float32",
}  # fmt: skip
PAGE = 4096


def kept(config, side=EngineSide(), **asked):  # noqa: B008 - frozen
    return forecast_tiers(read_model(config), side, KeptSettings(**asked))


def rows(config, **asked):
    found = kept(config, **asked).choices
    return [
        (c.steps.retention, c.steps.step_tokens, c.snapshot_tokens, c.snapshots, c.bytes, c.gap_tokens)
        for c in found
    ]


def test_full_attention_keeps_every_chunk():
    found = kept(DENSE, prompt=1024)
    (group,) = found.groups
    assert (found.chunk_tokens, found.first_tokens, group.layers) == (256, 256, 4)
    # A page for the header, then 4 layers of 256 tokens of 256 bytes.
    assert (group.group.chunk_bytes, group.file_bytes) == (4 * 65536, 4 * 65536 + PAGE)
    assert [(c.bytes, c.gap_tokens, c.snapshots) for c in found.choices] == [(4 * group.file_bytes, 256, 0)]


def test_a_partial_chunk_at_the_end_is_kept():
    (choice,) = kept(DENSE, prompt=1025).choices
    assert choice.bytes == 5 * (4 * 65536 + PAGE)


def test_kept_chunks_do_not_depend_on_the_ranks():
    assert kept(DENSE, EngineSide(4)).groups == kept(DENSE, EngineSide(1, layout="BHLNC")).groups


def test_a_state_is_kept_as_its_parts_each_from_a_page_on():
    attention, state = kept(HYBRID, prompt=1000).groups
    # 8 heads, each with its channels: 35840 bytes in 2 layers; 2 groups of channels: 768.
    assert (state.group.content_bytes, state.group.chunk_bytes) == (36608, 10 * PAGE)
    assert (state.is_state, state.layers, state.file_bytes) == (True, 2, 11 * PAGE)
    # A snapshot of a layer is 18304 bytes, a token 256: blocks of 80 tokens, chunks as well.
    assert (attention.group.chunk_bytes, attention.file_bytes) == (80 * 256, 6 * PAGE)


def test_finer_snapshots_cost_their_number_and_save_what_lies_between():
    # 12 chunks of attention; the last snapshot at 960.
    attention, state = 12 * 6 * PAGE, 11 * PAGE
    assert rows(HYBRID, prompt=1000, step_tokens=250) == [
        (0, 250, 80, 1, attention + state, 960),
        (None, 250, 80, 4, attention + 4 * state, 240),
        (None, 80, 80, 12, attention + 12 * state, 80),
    ]


def test_an_interval_keeps_the_ends_of_steps_that_lie_on_its_multiples():
    # Ends at 160, 320, ..., 960; of these 480 and 960 are multiples of 240.
    assert rows(HYBRID, prompt=1000, step_tokens=160, retention=240)[0][3:] == (
        2,
        (12 * 6 + 2 * 11) * PAGE,
        480,
    )


def test_thinned_snapshots_are_kept_at_multiples_and_at_the_end():
    # Every 80 tokens one is left; kept are those at 400 and 800, and the last at 960.
    first, *_ = rows(HYBRID, prompt=1000, step_tokens=80, retention=None, snapshot_tokens=400)
    assert first == (None, 80, 400, 3, 12 * 6 * PAGE + 3 * 11 * PAGE, 400)


def test_snapshots_for_shared_prefixes_lie_at_doubles_and_where_prompts_depart():
    # Blocks of 80 tokens; a snapshot weighs 160 tokens, so the first one is at the least of 1,024 tokens.
    found = kept(HYBRID, prompt=9000)
    assert found.first_snapshot_tokens == 1040
    assert found.choices[0].snapshots == 5  # at 1040, 2080, 4160, 8320 and, by vLLM itself, 8960
    assert [(one.tokens, one.second, one.third, one.without) for one in found.shared] == [
        (2048, 1040, 1040, 0),
        (8192, 4160, 8160, 0),
    ]
    found = kept(HYBRID, prompt=9000, first_snapshot_tokens=500)
    assert (found.first_snapshot_tokens, found.choices[0].snapshots) == (560, 5)  # the last is 8960
    assert [(one.second, one.third) for one in found.shared] == [(1120, 2000), (4480, 8160)]


def test_a_model_without_states_has_no_snapshots_for_shared_prefixes():
    found = kept(WINDOWED, prompt=9000)
    assert (found.first_snapshot_tokens, found.shared) == (0, ())


def test_windows_can_be_thinned():
    full, window = 65536 + PAGE, 5 * 65536 + PAGE
    # 39 chunks and a tail; windows before 4096, 8192, and at the end, where the tail is kept too.
    assert rows(WINDOWED, prompt=10000) == [
        (0, 8192, 256, 0, 40 * (full + window), 256),
        (0, 8192, 4096, 0, 40 * full + 4 * window, 4096),
        (0, 8192, 32768, 0, 40 * full + 2 * window, 9984),
    ]


def test_chunks_that_no_snapshot_ends_keep_nothing_that_can_be_loaded():
    found = kept(HYBRID, prompt=1000, chunk_tokens=256)
    assert found.first_tokens == 1280
    assert found.why_not == "the shortest loadable prefix has 1,280 tokens, the prompt has 1,000"


def test_a_cache_without_canonical_form_is_reported(monkeypatch):
    from kvferry.common.errors import GeometryError
    from kvferry.tools.plan import kept as module

    def fail(*_):
        raise GeometryError("its bytes are opaque")

    monkeypatch.setattr(module, "canonical_form_of", fail)
    assert kept(DENSE).why_not == "its bytes are opaque"


@pytest.mark.parametrize(
    ("config", "asked", "said"),
    [
        (DENSE, {"retention": 512}, "vLLM takes 0 or None for a model without windows"),
        (HYBRID, {"first_snapshot_tokens": -1}, "--first-snapshot-tokens is -1, it must be at least 0"),
        (HYBRID, {"retention": 100}, "--retention is 100; vLLM takes 0, None or multiples of a block"),
        (DENSE, {"snapshot_tokens": 300}, "--snapshot-tokens is 300; it must be a multiple of a chunk's 256"),
        (DENSE, {"chunk_tokens": 0}, "--chunk-tokens is 0, it must be at least 1"),
        (DENSE, {"prompt": 0}, "--kept-tokens is 0"),
        (DENSE, {"step_tokens": 0}, "--step-tokens is 0"),
    ],
)
def test_settings_that_would_be_refused_are_refused(config, asked, said):
    with pytest.raises(ConfigError, match=said):
        kept(config, **asked)


def test_the_defaults_of_the_command_are_those_of_the_forecast():
    assert KeptSettings(command._STEP_TOKENS, prompt=command._PROMPT_TOKENS) == KeptSettings()
