"""A pair of engines whose parts all run in one process per engine, so that stages can be stamped."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

from benchmarks.engine_process import EngineProcess, resumed
from benchmarks.handover.engine import HandoverEngine, Setup
from benchmarks.handover.measure import Handover, Result
from kvferry.tools.serving.devices import free_ports


@dataclass(frozen=True, slots=True)
class EnginePair:
    """A prefill and a decode engine, each in a process of its own.

    Attributes:
        prefill, decode: processes of the engines.
    """

    prefill: EngineProcess
    decode: EngineProcess

    @contextmanager
    def running(self) -> Iterator[None]:
        """Let both engines run until the ``with`` block ends. Pause them then."""
        with resumed(self.prefill, self.decode):
            yield

    def hand_over(self, prompts: Sequence[Sequence[int]]) -> Result:
        """Compute prompts in one engine and continue them in the other. See `Pair`."""
        params = self.prefill.call("prefill", prompts)
        answers = self.decode.call("decode", prompts, params)
        self.decode.call("settle")
        self.prefill.call("settle")
        stamps = tuple(stamps for stamps, _ in answers)
        return Result(Handover(stamps), [token for _, token in answers], all(one.received for one in stamps))


@contextmanager
def engine_pair(
    setup: Setup, make: Callable[[Setup], HandoverEngine] = HandoverEngine, name: str = ""
) -> Iterator[EnginePair]:
    """Start two engines, and end them with the ``with`` block.

    Args:
        setup: configuration of both engines. Each gets a port of its own.
        make: class of the engines.
        name: name of the pair, for messages; empty for that of the connector.

    Raises:
        TransferError: an engine does not start.
    """
    with ExitStack() as stack:
        engines = [
            stack.enter_context(
                EngineProcess(f"{name or setup.connector} {role}", make, replace(setup, port=port))
            )
            for role, port in zip(("prefill", "decode"), free_ports(2), strict=True)
        ]
        for one in engines:
            one.wait_ready()
        yield EnginePair(*engines)
