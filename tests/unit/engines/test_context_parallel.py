"""Context parallelism: which tokens vLLM keeps on which rank, and what kvferry makes of it."""

from __future__ import annotations

import ctypes
import itertools
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.config import CacheConfig, ModelConfig, ParallelConfig, VllmConfig
from vllm.distributed import parallel_state
from vllm.v1.attention.backends.utils import get_dcp_local_seq_lens
from vllm.v1.kv_cache_interface import CircularBufferSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.worker import block_table as first_runner
from vllm.v1.worker.gpu import block_table as second_runner

from kvferry.common.errors import ConfigError, Incompatible, KVFerryError
from kvferry.engines.vllm.compat.process import WorkerRanks, worker_ranks
from kvferry.engines.vllm.compat.specs import interleave_of, scheduled_groups
from kvferry.engines.vllm.content import page
from kvferry.engines.vllm.geometry import describe_cache, shard_of
from kvferry.engines.vllm.scheduler import cache_group
from kvferry.geometry import NOT_INTERLEAVED, Interleave, RankGeometry
from kvferry.geometry.canonical import canonical_form_of
from kvferry.planning.select import LoadSpan, select_cells
from kvferry.planning.template import build_templates
from kvferry.tools.models import ModelReading, read_model
from kvferry.tools.plan.contents import lay_out_engine
from kvferry.tools.plan.side import EngineSide
from support.backends import emulated
from support.backends.layers import BLOCKS, Case, make
from support.oracle import expand_cells
from support.played_worker import PlayedWorker
from support.triton_numpy import Pointer, run
from support.vllm_cache import VllmCache, full, state

MLA = Case("FLASHMLA", "auto", heads=1, k=64, v=0, tokens=16)
GQA = Case("FLASH_ATTN", "auto", heads=1, k=16, v=16, tokens=16)


def parallel(tp: int = 1, dcp: int = 1, interleave: int = 1, pcp: int = 1) -> Any:
    return SimpleNamespace(
        tensor_parallel_size=tp, pipeline_parallel_size=1, decode_context_parallel_size=dcp,
        prefill_context_parallel_size=pcp, cp_kv_cache_interleave_size=interleave,
    )  # fmt: skip


@cache
def vllm_config(block: int) -> Any:
    return VllmConfig(cache_config=CacheConfig(block_size=block))


class Engine:
    """An engine of one layer, with the cache of every rank; `table` has the blocks of one prompt."""

    def __init__(
        self,
        case: Case,
        seed: int,
        tp: int = 1,
        dcp: int = 1,
        interleave: int = 1,
        pcp: int = 1,
        heads: int = 1,
    ) -> None:
        self.case, self.tp, self.dcp, self.interleave, self.pcp = case, tp, dcp, interleave, pcp
        self.heads = heads  # of the model, over all ranks
        self.caches: list[torch.Tensor] = []
        self.ranks = [self._describe(WorkerRanks(tp=n, dcp=n % dcp), tp) for n in range(tp)]
        self.table = 1 + np.random.default_rng(seed).permutation(BLOCKS - 1)

    def _describe(self, ranks: WorkerRanks, tp: int) -> RankGeometry:
        config = vllm_config(self.case.tokens)
        config.parallel_config = parallel(tp, self.dcp, self.interleave, self.pcp)
        config.model_config = SimpleNamespace(get_total_num_kv_heads=lambda: self.heads)
        layer, spec, tensor = make(replace(self.case, heads=max(self.heads // tp, 1)))
        config.compilation_config.static_forward_context["layer.0"] = layer
        self._kept = PlayedWorker(config, torch.nn.Module())
        held = KVCacheConfig(BLOCKS, [], [KVCacheGroupSpec(["layer.0"], spec)])
        self.caches.append(tensor)
        return describe_cache(config, held, {"layer.0": tensor}, ranks)

    @property
    def tokens(self) -> int:
        return len(self.table) * self.case.tokens * self.dcp

    def slots(self, runner: str, rank: int, tokens: int) -> np.ndarray:
        """Where vLLM's kernel has a rank write each token of the prompt; -1 for nowhere."""
        return KERNELS[runner](self, rank % self.dcp, tokens)

    def held(self, rank: int) -> slice:
        """The heads of the model that a rank has. Neighbouring ranks have copies of the same head."""
        first = rank * self.heads // self.tp
        return slice(first, first + max(self.heads // self.tp, 1))

    def values(self, slots: np.ndarray, rank: int) -> torch.Tensor:
        """What is kept in slots, of shape (slots, heads, content)."""
        block, at = np.divmod(slots, self.case.tokens)
        return self.caches[rank][block, :, at]

    def write(self, runner: str, content: torch.Tensor) -> None:
        for rank, tensor in enumerate(self.caches):
            slots = self.slots(runner, rank, len(content))
            block, at = np.divmod(slots[slots >= 0], self.case.tokens)
            tensor[block, :, at] = content[slots >= 0][:, self.held(rank)]


def _by_first(engine: Engine, rank: int, tokens: int) -> np.ndarray:
    found = np.full(tokens, 99, np.int64)
    run(
        first_runner.ComputeSlotMappingKernel.kernel, first_runner, (2,),
        tokens, tokens, np.array([0, tokens]), np.arange(tokens), engine.table, len(engine.table), found,
        KV_CACHE_BLOCK_SIZE=engine.case.tokens, TOTAL_CP_WORLD_SIZE=engine.dcp, TOTAL_CP_RANK=rank,
        CP_KV_CACHE_INTERLEAVE_SIZE=engine.interleave, PAD_ID=-1, BLOCK_SIZE=8,
    )  # fmt: skip
    return found


def _by_second(engine: Engine, rank: int, tokens: int) -> np.ndarray:
    found, tables = np.full(tokens, 99, np.int64), np.empty(1, object)
    tables[0] = Pointer(engine.table)
    ones = np.ones(1, np.int64)
    run(
        second_runner._compute_slot_mappings_kernel, second_runner, (1, 2),
        tokens, np.zeros(1, np.int64), np.array([0, tokens]), np.arange(tokens), tables,
        ones * len(engine.table), ones * engine.case.tokens, ones > 0, ones > 0, found, tokens, rank,
        CP_SIZE=engine.dcp, CP_INTERLEAVE=engine.interleave, PAD_ID=-1, TRITON_BLOCK_SIZE=8,
    )  # fmt: skip
    return found


KERNELS = {"first runner": _by_first, "second runner": _by_second}
SHARED = [(2, 1), (2, 16), (4, 4)]


@pytest.fixture(autouse=True)
def operations(monkeypatch: pytest.MonkeyPatch) -> None:
    emulated.install(monkeypatch)
    monkeypatch.setattr(second_runner, "_load_ptr", lambda pointer, _: second_runner.tl.load(pointer))
    monkeypatch.setattr(page, "_proved", proved_once)


def proved_once(layer: Any, spec: Any, tensor: torch.Tensor, *more: Any) -> Any:
    """The probe's answer of one cache for all that are laid out alike; it takes its time."""
    key = layer.get_attn_backend(), tensor.shape, tensor.stride(), *more
    if key not in PROVED:
        PROVED[key] = PROBE(layer, spec, tensor, *more)
    return PROVED[key]


PROBE, PROVED = page._proved, dict[Any, Any]()


def read(sources: Engine, rank: RankGeometry, table: np.ndarray, span: LoadSpan) -> None:
    """Copy what the planner says, run by run."""
    for template in build_templates(sources.ranks, rank):
        for route in template.routes:
            cells = select_cells(route, rank.groups[0], span, sources.table, table)
            pieces = expand_cells(route, cells)
            for src, dst, length in zip(pieces.src, pieces.dst, pieces.length, strict=True):
                ctypes.memmove(int(dst), int(src), int(length))


def content_of(engine: Engine, tokens: int) -> torch.Tensor:
    """What the model keeps of a prompt, of shape (tokens, heads, content)."""
    shape = tokens, engine.heads, engine.caches[0].shape[-1]
    values = torch.arange(1, math.prod(shape) + 1).reshape(shape) % 251
    return values.to(engine.caches[0].dtype)


@pytest.mark.parametrize("runner", KERNELS)
@pytest.mark.parametrize(("dcp", "interleave"), SHARED)
def test_latents_move_from_and_to_where_vllm_writes_them(runner: str, dcp: int, interleave: int) -> None:
    shared, alone = Engine(MLA, 1, dcp, dcp, interleave), Engine(MLA, 2)
    check_move(shared, alone, runner)
    check_move(Engine(MLA, 3), Engine(MLA, 4, dcp, dcp, interleave), runner)
    check_move(Engine(MLA, 5, dcp, dcp, interleave), Engine(MLA, 6, 4, 2, 1), runner)


@pytest.mark.parametrize("runner", KERNELS)
def test_heads_that_ranks_have_copies_of_move_from_and_to_where_vllm_writes_them(runner: str) -> None:
    check_move(Engine(GQA, 1, 4, 2, 8), Engine(GQA, 2, 2), runner)
    check_move(Engine(GQA, 3, 2), Engine(GQA, 4, 4, 4, 16), runner)


@pytest.mark.parametrize("runner", KERNELS)
@pytest.mark.parametrize(("tp", "dcp", "interleave"), [(4, 2, 1), (8, 2, 16), (8, 4, 4)])
@pytest.mark.parametrize("other", [(1, 1, 1), (2, 1, 1), (4, 2, 4), (8, 1, 1), (8, 4, 16)], ids=str)
def test_each_of_two_heads_moves_from_and_to_where_vllm_writes_it(
    runner: str, tp: int, dcp: int, interleave: int, other: tuple[int, int, int]
) -> None:
    divided, beside = Engine(GQA, 1, tp, dcp, interleave, heads=2), Engine(GQA, 2, *other, heads=2)
    check_move(divided, beside, runner)
    check_move(Engine(GQA, 3, *other, heads=2), Engine(GQA, 4, tp, dcp, interleave, heads=2), runner)
    assert canonical_form_of(divided.ranks, 64) == canonical_form_of(Engine(GQA, 5, heads=2).ranks, 64)


def check_move(src: Engine, dst: Engine, runner: str) -> None:
    tokens = min(src.tokens, dst.tokens) - 3
    content = content_of(src, tokens)
    src.write(runner, content)
    span, held = LoadSpan(0, tokens, tokens), 0
    for number, rank in enumerate(dst.ranks):
        read(src, rank, dst.table, span)
        slots = dst.slots(runner, number, tokens)
        here = slots >= 0
        assert torch.equal(dst.values(slots[here], number), content[here][:, dst.held(number)])
        held += int(here.sum())
    assert held == tokens * len(dst.ranks) // dst.dcp, "each token is on as many ranks"


def test_another_interleave_puts_tokens_elsewhere() -> None:
    """The negative control of the tests above: their bytes depend on what vLLM is told."""
    src, dst = Engine(MLA, 1, 2, 2, 16), Engine(MLA, 2)
    content = content_of(src, 40)
    src.interleave = 8
    src.write("first runner", content)
    read(src, dst.ranks[0], dst.table, LoadSpan(0, 40, 40))
    assert not torch.equal(dst.values(dst.slots("first runner", 0, 40), 0), content)


@pytest.mark.parametrize(("dcp", "interleave"), SHARED)
def test_ranks_hold_as_many_tokens_of_a_prompt_as_vllm_counts(dcp: int, interleave: int) -> None:
    engine, lengths = Engine(MLA, 1, dcp, dcp, interleave), torch.arange(1, 300)
    for rank in range(dcp):
        held = np.cumsum(engine.ranks[rank].groups[0].layers[0].page.interleave.holds(np.arange(299)))
        assert held.tolist() == get_dcp_local_seq_lens(lengths, dcp, rank, interleave).tolist()


def test_chunks_are_the_same_with_and_without_context_parallelism() -> None:
    for case in (MLA, GQA):
        shared, alone = Engine(case, 1, 4, 4, 8), Engine(case, 2)
        assert canonical_form_of(shared.ranks, 64) == canonical_form_of(alone.ranks, 64)


def test_pages_of_unknown_content_move_whole_between_equal_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "_proved", lambda *_: ((), "a test"))
    for case in (MLA, GQA):
        src, dst = Engine(case, 1, 2, 2, 16), Engine(case, 2, 2, 2, 16)
        assert [rank.groups[0].layers[0].page.interleave for rank in src.ranks] == [NOT_INTERLEAVED] * 2
        check_move(src, dst, "second runner")
        for number, rank in enumerate(dst.ranks):
            supplies = [bool(one.routes) for one in build_templates(src.ranks[::-1], rank)]
            assert supplies[::-1].index(True) == number
        for other in (Engine(case, 3, 2, 2, 8), Engine(case, 3, 2), Engine(case, 3, 4, 4, 16)):
            with pytest.raises(Incompatible):
                build_templates(src.ranks, other.ranks[0])


@pytest.mark.parametrize("dcp", [1, 2, 4])
def test_blocks_cover_as_many_tokens_as_vllms_scheduler_allocates_them_for(dcp: int) -> None:
    specs = (full(), state())
    config = KVCacheConfig(8, [], [KVCacheGroupSpec([f"layer {n}"], spec) for n, spec in enumerate(specs)])
    groups = scheduled_groups(SimpleNamespace(parallel_config=parallel(dcp=dcp)), config)
    vllm = VllmCache(specs, 80, longest=999, common=4 * 16, dcp_world_size=dcp)
    managers = vllm.manager.coordinator.single_type_managers
    assert [cache_group(group).block_tokens for group in groups] == [one.block_size for one in managers]
    assert [one.block_size for one in managers] == [specs[0].block_size * dcp, specs[1].block_size]


@pytest.mark.parametrize(
    ("tp", "pcp", "dcp", "heads"),
    [(4, 1, 2, 0), (4, 1, 4, 0), (8, 1, 2, 2), (1, 2, 2, 0), (2, 2, 2, 0), (2, 2, 4, 0)],
)
def test_all_tokens_of_every_head_are_on_some_rank(
    monkeypatch: pytest.MonkeyPatch, tp: int, pcp: int, dcp: int, heads: int
) -> None:
    """`heads`: of the model; 0 for a latent."""
    found, places = defaultdict[int, set[int]](set), set()
    for ranks in ranks_of(monkeypatch, tp, 2, pcp, dcp):
        held = shard_of(1, ranks.tp, tp, None, heads).start if heads else 0
        found[held].add(ranks.dcp)
        places.add((ranks.pp, ranks.pcp * tp + ranks.tp))
    assert found == {held: set(range(dcp)) for held in range(heads or 1)}
    assert places == {(pp, place) for pp in range(2) for place in range(tp * pcp)}


def ranks_of(monkeypatch: pytest.MonkeyPatch, tp: int, pp: int, pcp: int, dcp: int) -> Sequence[WorkerRanks]:
    """The ranks of all workers of an engine, in groups as vLLM makes them."""
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(data_parallel_size=1, enable_elastic_ep=False),
        engram_config=None,
        model_config=SimpleNamespace(architecture="", is_moe=False),
    )
    monkeypatch.setattr("vllm.config.get_current_vllm_config", lambda: config)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: tp * pp * pcp)
    monkeypatch.setattr(torch.distributed, "get_backend", lambda *_: "gloo")
    monkeypatch.setattr(
        parallel_state, "get_world_group", lambda: SimpleNamespace(local_rank=0, device_group=None)
    )
    found = []
    for rank in range(tp * pp * pcp):
        monkeypatch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)

        def group(ranks: Sequence[Sequence[int]], *_: Any, rank: int = rank, **__: Any) -> Any:
            (own,) = (one for one in ranks if rank in one)
            return SimpleNamespace(rank_in_group=own.index(rank), world_size=len(own))

        monkeypatch.setattr(parallel_state, "init_model_parallel_group", group)
        for name in ("_TP", "_ETP", "_DCP", "_PCP", "_PP", "_DP", "_EP"):
            monkeypatch.setattr(parallel_state, name, None, raising=False)
        parallel_state.initialize_model_parallel(tp, pp, pcp, dcp)
        found.append(worker_ranks())
    return found


def test_ranks_of_prefill_context_parallelism_are_described_as_vllm_numbers_them() -> None:
    found = [
        Engine(MLA, 1, 2, 4, 8, pcp=2)._describe(WorkerRanks(tp, 0, pcp, 2 * tp + pcp), 2)
        for pcp in range(2)
        for tp in range(2)
    ]
    assert [(rank.tp_rank, rank.tp_size) for rank in found] == [(n, 4) for n in range(4)]
    assert {rank.groups[0].layers[0].page.interleave.rank for rank in found} == set(range(4))
    assert canonical_form_of(found, 64) == canonical_form_of(Engine(MLA, 2).ranks, 64)


def served(heads: int, queries: int) -> ModelReading:
    config = {"model_type": "llama", "num_hidden_layers": 1, "head_dim": 16, "hidden_size": 16 * queries}
    return read_model(config | {"num_attention_heads": queries, "num_key_value_heads": heads}, "bfloat16")


@pytest.mark.parametrize(("tp", "dcp", "interleave"), [(4, 2, 1), (8, 2, 16), (8, 4, 4), (2, 1, 1)])
def test_plan_lays_out_what_the_connector_describes(tp: int, dcp: int, interleave: int) -> None:
    side = EngineSide(tp, block_tokens=GQA.tokens, dcp=dcp, turn_tokens=interleave)
    planned = lay_out_engine(served(2, 8), side, BLOCKS)
    described = Engine(GQA, 1, tp, dcp, interleave, heads=2).ranks
    for one, other in zip(planned, described, strict=True):
        (group,), (own,) = one.groups, other.groups
        page, same = group.layers[0].page, own.layers[0].page
        assert (group.block_tokens, page.block_tokens) == (GQA.tokens * dcp, same.block_tokens)
        assert page.interleave == same.interleave
        assert {field.held for field in page.fields} == {field.held for field in same.fields}
        assert page.content_bytes == same.content_bytes


@pytest.mark.parametrize(("heads", "queries"), [(1, 8), (2, 16), (4, 16), (8, 16), (2, 12)])
def test_plan_takes_the_sizes_that_vllm_takes(heads: int, queries: int) -> None:
    vllm = SimpleNamespace(
        model_arch_config=SimpleNamespace(total_num_attention_heads=queries),
        use_mla=False,
        get_total_num_kv_heads=lambda: heads,
        multimodal_config=None,
    )
    taken = {}
    for tp, dcp in itertools.product((1, 2, 4, 8, 12, 16), (1, 2, 3, 4, 6, 8)):
        config = parallel(tp, dcp)
        config.enable_hc_sp = config.enable_expert_parallel = False
        try:
            ModelConfig.verify_with_parallel_config(vllm, config)
            ParallelConfig(tensor_parallel_size=tp, decode_context_parallel_size=dcp)
        except ValueError:
            taken[tp, dcp] = False
        else:
            taken[tp, dcp] = True
        try:
            lay_out_engine(served(heads, queries), EngineSide(tp, dcp=dcp), 2)
        except KVFerryError:
            assert not taken[tp, dcp]
        else:
            assert taken[tp, dcp]
    divided = [taken[tp, dcp] for tp, dcp in taken if dcp > 1]
    assert any(divided)
    assert not all(divided)


def test_only_groups_that_vllm_shards_are_divided() -> None:
    config = SimpleNamespace(parallel_config=parallel(4, 2, 8))
    assert interleave_of(config, full(), 1) == Interleave(1, 2, 8)
    assert interleave_of(config, state(), 1) == NOT_INTERLEAVED


def test_prefill_context_parallelism_alone_is_refused() -> None:
    config = SimpleNamespace(parallel_config=parallel(2, pcp=2))
    with pytest.raises(ConfigError, match=r"names only one of them.*parallel-size to 2 or 4, or --prefill"):
        describe_cache(config, KVCacheConfig(1, [], []), {}, WorkerRanks())


def test_a_ring_is_not_divided() -> None:
    ring = CircularBufferSpec(block_size=8, num_kv_heads=1, head_size=8, dtype=torch.float32)
    with pytest.raises(ConfigError, match="which tokens a rank keeps of a ring is not known"):
        interleave_of(SimpleNamespace(parallel_config=parallel(2, 2)), ring, 0)
