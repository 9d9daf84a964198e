"""The sections of the page. Another benchmark needs an entry here, and a module `page` with `summary`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.attention.page import summary as attention
from benchmarks.handover.page import summary as handover
from benchmarks.page.figures import Comparison, Summary
from benchmarks.page.tiers import summary as tiers
from benchmarks.page.transfer import summary as transfer
from benchmarks.router.page import summary as router
from benchmarks.scale.page import summary as scale
from benchmarks.startup.page import summary as startup
from benchmarks.steps.page import summary as steps
from benchmarks.storage.page import summary as storage
from benchmarks.streaming.page import summary as streaming
from benchmarks.turns.page import summary as turns


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """The reason why kvferry is behind in some comparisons.

    Attributes:
        text: the reason, in a sentence or two.
        against: part of the name of the peer or limit; empty for all.
        label: part of the label of the work; empty for all.
    """

    text: str
    against: str = ""
    label: str = ""

    def explains(self, comparison: Comparison) -> bool:
        """Return whether this is the reason in a comparison in which kvferry is behind."""
        return self.against in comparison.against and self.label in comparison.label


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A section of the page.

    Attributes:
        name: name of the section in options, and of its files.
        title: heading.
        question: question that the section answers.
        program: name of a program, ``benchmarks`` or ``kvferry``, and of its command.
        arguments: arguments of the command, without ``--json``.
        quick_arguments: arguments of a run of a minute or less.
        summary: function that summarizes what the command prints with ``--json``.
        method: link to the description of the method, relative to the page.
        reasons: reasons why kvferry is behind. The first one that fits a comparison is shown.
    """

    name: str
    title: str
    question: str
    program: tuple[str, ...]
    arguments: tuple[str, ...] = ()
    quick_arguments: tuple[str, ...]
    summary: Callable[[Any], Summary]
    method: str
    reasons: tuple[Reason, ...] = ()

    def command(self, *, quick: bool) -> tuple[str, ...]:
        """Return the command, without ``--json``.

        Args:
            quick: True for a run of a minute or less.
        """
        return (*self.program, *(self.quick_arguments if quick else self.arguments))


_SPINNING_REASON = Reason(
    against="NixlConnector",
    text="The peer's progress threads spin. In the rounds in which they do not take the core that is needed, "
    "it is as fast as nixl+.",
)
_HANDOVER_REASON = Reason(
    against="nixl+",
    text="Each request takes 0.5 ms of the engine's thread, in Python that runs once per request: opening "
    "its sealed grant, choosing a source, planning, reporting. NixlConnector takes 0.05 ms. Stages, and "
    "what was tried, are in docs/performance.md.",
)
_MIX_REASONS = (
    Reason(
        against="one server",
        text="Two servers share this machine's cores, and each decodes with one of them. One server computes "
        "with both, and moves no KV. Disaggregation is for machines of their own.",
    ),
    _HANDOVER_REASON,
)

SECTIONS = (
    Section(
        name="transfer",
        title="A transfer beside raw NIXL",
        question="How fast does a request's KV move between two processes?",
        program=("kvferry", "bench", "transfer"),
        arguments=("--repeats", "15"),
        quick_arguments=("--repeats", "7"),
        summary=transfer,
        method="../docs/performance.md#how-fast-does-a-request-move",
        reasons=(
            Reason(against="memcpy", text="memcpy is a limit: one thread copies within one process."),
            Reason(
                against="2 MiB descriptors",
                text="Blocks are scattered, so kvferry's descriptors have the size of a page. NIXL is faster "
                "with larger ones.",
            ),
            Reason(
                against="same descriptors",
                text="kvferry's time also includes planning, the lease check and the acknowledgement.",
            ),
        ),
    ),
    Section(
        name="handover",
        title="A hand-over beside NixlConnector",
        question="How soon is the first token after a hand-over between two engines?",
        program=("benchmarks", "handover"),
        arguments=(
            *("--models", "qwen3,gemma3,nemotronh"),
            *("--loads", "512x1,2048x1,8192x1,512x8"),
            *("--rounds", "5"),
        ),
        quick_arguments=("--models", "qwen3", "--loads", "512x1,512x8", "--rounds", "3"),
        summary=handover,
        method="../docs/performance.md#how-soon-is-the-first-token-after-a-hand-over",
        reasons=(_HANDOVER_REASON, _SPINNING_REASON),
    ),
    Section(
        name="large",
        title="Large hand-overs beside NixlConnector",
        question="How soon is the first token of a long prompt, and of many prompts at once?",
        program=("benchmarks", "handover", "--peers", "nixl+"),
        arguments=("--models", "gemma3", "--loads", "16384x1,512x32", "--rounds", "3"),
        quick_arguments=("--models", "gemma3", "--loads", "4096x1", "--rounds", "2"),
        summary=handover,
        method="../docs/performance.md#how-soon-is-the-first-token-after-a-hand-over",
        reasons=(_HANDOVER_REASON, _SPINNING_REASON),
    ),
    Section(
        name="served",
        title="A hand-over between servers beside NixlConnector",
        question="How soon is the first token after a hand-over between two servers, over HTTP?",
        program=("benchmarks", "handover", "--served"),
        arguments=(
            *("--models", "qwen3,gemma3", "--loads", "512x1,8192x1,512x8"),
            *("--peers", "nixl+", "--rounds", "4"),
        ),
        quick_arguments=("--peers", "nixl+", "--quick"),
        summary=handover,
        method="../docs/performance.md#how-soon-is-the-first-token-between-servers",
        reasons=(_HANDOVER_REASON, _SPINNING_REASON),
    ),
    Section(
        name="mix",
        title="A served mix beside NixlConnector and one server",
        question="How many requests does a pair of servers serve, and how long do clients wait for tokens?",
        program=("benchmarks", "handover"),
        arguments=("--mix", "48x8", "--models", "qwen3,gemma3"),
        quick_arguments=("--mix", "8x4", "--quick"),
        summary=handover,
        method="../docs/performance.md#how-much-does-a-pair-of-servers-serve",
        reasons=_MIX_REASONS,
    ),
    Section(
        name="mix-no-hybrid",
        title="A served mix without the hybrid KV cache manager",
        question="The same, if sliding windows are kept as full attention?",
        program=("benchmarks", "handover"),
        arguments=("--mix", "48x8", "--models", "gemma3", "--no-hybrid"),
        quick_arguments=("--mix", "8x4", "--models", "gemma3", "--no-hybrid", "--quick"),
        summary=handover,
        method="../docs/performance.md#how-much-does-a-pair-of-servers-serve",
        reasons=_MIX_REASONS,
    ),
    Section(
        name="ranks",
        title="A hand-over between servers of unlike tensor parallelism",
        question="How soon is the first token if one rank prefills and two decode?",
        program=("benchmarks", "handover", "--ranks", "1:2"),
        arguments=("--models", "qwen3", "--loads", "512x1,2048x1", "--peers", "nixl+", "--rounds", "4"),
        quick_arguments=("--peers", "nixl+", "--quick"),
        summary=handover,
        method="../docs/performance.md#how-soon-is-the-first-token-between-servers",
        reasons=(_HANDOVER_REASON,),
    ),
    Section(
        name="second-runner",
        title="A hand-over with the second model runner",
        question="How soon is the first token with the model runner that is the default on GPUs?",
        program=("benchmarks", "handover", "--runner", "2", "--peers", "nixl+"),
        arguments=("--models", "qwen3", "--loads", "512x1,512x8", "--rounds", "9"),
        quick_arguments=("--quick",),
        summary=handover,
        method="../docs/performance.md#how-soon-is-the-first-token-after-a-hand-over",
        reasons=(_HANDOVER_REASON,),
    ),
    Section(
        name="streaming",
        title="A hand-over during the prefill",
        question="What does reading KV while the prompt is computed save?",
        program=("benchmarks", "streaming"),
        arguments=("--tokens", "4096", "--tokens", "16384", "--rounds", "5"),
        quick_arguments=("--tokens", "4096", "--link", "1", "--rounds", "3"),
        summary=streaming,
        method="../docs/performance.md#what-does-a-hand-over-during-the-prefill-save",
        reasons=tuple(
            Reason(
                label=link, text="Both engines share this machine's cores: reading slows the prefill down."
            )
            for link in ("10 Gbit/s", "no limit")
        ),
    ),
    Section(
        name="turns",
        title="Turns of a conversation",
        question="What does a turn of a conversation move, in models with recurrent layers?",
        program=("benchmarks", "turns"),
        quick_arguments=("--families", "lfm2", "--turns", "3"),
        summary=turns,
        method="../docs/performance.md#what-does-a-turn-of-a-conversation-move",
    ),
    Section(
        name="tiers",
        title="Tiers beside raw memory and raw files",
        question="How fast are KV chunks stored and loaded?",
        program=("kvferry", "bench", "tiers"),
        arguments=("--repeats", "7"),
        quick_arguments=("--repeats", "7", "--layers", "4", "--layouts", "BHLNC", "--depths", "1,8"),
        summary=tiers,
        method="../docs/performance.md#how-fast-are-the-tiers",
        reasons=(
            Reason(
                label="host",
                text="memcpy copies contiguous memory. Runs between a chunk and blocks of 16 tokens have "
                "512 B (LBNHC) or 8 KiB (BHLNC).",
            ),
            Reason(
                label="file, store",
                text="kvferry also computes checksums, keeps a ledger, and flushes the folder.",
            ),
            Reason(label="file, load", text="kvferry also checks checksums."),
        ),
    ),
    Section(
        name="storage",
        title="Storage beside ExampleConnector",
        question="How soon is the first token of a stored prompt, and what does storing cost?",
        program=("benchmarks", "storage"),
        arguments=("--rounds", "3"),
        quick_arguments=("--prompts", "512", "--rounds", "2"),
        summary=storage,
        method="../docs/performance.md#how-fast-is-storage-beside-vllms-exampleconnector",
        reasons=(
            Reason(
                label="storing",
                against="computing",
                text="A prompt is stored after it is computed. The first token does not wait for that.",
            ),
            Reason(
                label="first token of a new prompt",
                text="Chunks are copied and written beside the computation, on the same cores.",
            ),
            Reason(
                label="storing",
                text="kvferry writes to the disk, ExampleConnector to the page cache. The row with its files "
                "flushed compares the same work.",
            ),
            Reason(
                against="page cache",
                label="files",
                text="kvferry reads files from the disk, past the page cache, which would take memory from "
                "the host tier. ExampleConnector's files are in memory here.",
            ),
            Reason(
                against="page cache",
                label="host memory",
                text="A load of kvferry runs beside the engine's steps, so its request waits for the next "
                "one. ExampleConnector loads inside the step, and all other requests wait for it.",
            ),
            Reason(
                label="files",
                text="kvferry reads a file for each chunk, and checks checksums. With few tokens, that takes "
                "longer than the bytes.",
            ),
        ),
    ),
    Section(
        name="steps",
        title="Steps that only decode",
        question="What do a connector's hooks cost in a step in which nothing moves?",
        program=("benchmarks", "steps"),
        quick_arguments=("--rounds", "3", "--steps", "80"),
        summary=steps,
        method="../docs/performance.md#how-soon-is-the-first-token-after-a-hand-over",
        reasons=(
            Reason(
                label="tiers",
                text="In each step, kvferry also asks the tiers which reads and writes have ended.",
            ),
            Reason(
                text="Each step's message, reports and metrics pass through Python code that is not in the "
                "processor's caches. NixlConnector asks NIXL for notifications instead."
            ),
        ),
    ),
    Section(
        name="attention",
        title="Cross-layer and per-layer caches",
        question="Does a cross-layer layout slow attention down, and what does it gain?",
        program=("benchmarks", "attention"),
        quick_arguments=("--rounds", "2"),
        summary=attention,
        method="../docs/performance.md#does-a-cross-layer-layout-slow-attention-down",
        reasons=(
            Reason(
                label="prefill",
                text="Probably because the KV of one layer lies further apart. kvferry asks for a "
                "cross-layer layout only where the attention backend declares it, and the CPU's does not.",
            ),
            Reason(text="The range reaches over 1: rounds differ more than layouts."),
        ),
    ),
    Section(
        name="startup",
        title="The start of an engine",
        question="What does a connector add to an engine's start?",
        program=("benchmarks", "startup"),
        arguments=("--rounds", "3"),
        quick_arguments=("--rounds", "1"),
        summary=startup,
        method="../docs/performance.md#what-does-a-connector-add-to-an-engines-start",
        reasons=(
            Reason(
                against="no connector",
                text="A connector imports its modules, and starts NIXL or allocates host memory.",
            ),
            Reason(
                against="NixlConnector",
                label="peers",
                text="kvferry also starts a NIXL agent for each lane and a process that validates the "
                "metadata of peers, finds out how the engine's pages are laid out, and moves the KV cache to "
                "huge pages in the background.",
            ),
            Reason(
                against="NixlConnector",
                text="kvferry also finds out how the engine's pages are laid out, and allocates the first "
                "memory of the host tier.",
            ),
        ),
    ),
    Section(
        name="router",
        title="The router beside vllm-router",
        question="How much CPU time does a request take in the router?",
        program=("benchmarks", "router"),
        arguments=("--requests", "200"),
        quick_arguments=("--requests", "50", "--rounds", "1"),
        summary=router,
        method="../docs/performance.md#what-does-a-request-cost-the-router",
        reasons=(Reason(text="kvferry's router is written in Python, vllm-router in Rust."),),
    ),
    Section(
        name="scale",
        title="Growing numbers",
        question="Do time and memory per unit grow with the number of units?",
        program=("benchmarks", "scale"),
        arguments=("--rounds", "3"),
        quick_arguments=("--rounds", "1"),
        summary=scale,
        method="../docs/performance.md#do-costs-per-unit-grow-with-numbers",
        reasons=(
            Reason(
                label="claim",
                text="A claim waits for threads, whose data is not in the processor's caches.",
            ),
            Reason(label="offer", text="The number of tokens has two digits more."),
            Reason(label="memory", text="Names have more digits."),
            Reason(label="", text="The data of many units is not in the processor's caches."),
        ),
    ),
)
"""All sections, in the order of the page."""
