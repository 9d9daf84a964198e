"""Streams and events of a GPU, for threads that copy KV beside the engine's thread.

A thread that copies enters a stream of its own once (`enter_stream`). From then on all its copies are queued
there, and it waits for them alone (`finish_stream`), never for the whole device. The engine's thread records
an event after the forward pass (`record_event`). The copying thread's stream waits for the event
(`wait_event`), so the thread itself need not wait for the forward.

    engine's thread   forward ─ event ─ next forward ...
    copying thread              └▶ copies ─ finish_stream ─▶ report

The engine's kernels that start after `finish_stream` has returned see the copied bytes. All functions return
at once if the KV is in host memory and no GPU is in use.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch

from kvferry.geometry import Region


class DeviceEvent(Protocol):
    """A point in a GPU's work: the methods of ``torch.cuda.Event`` that are used here."""

    def record(self) -> None:
        """Record the work that the calling thread has queued on its current stream so far."""

    def query(self) -> bool:
        """Return whether the GPU has reached this point."""

    def synchronize(self) -> None:
        """Wait until the GPU has reached this point."""


def enter_stream(region: Region) -> None:
    """Make a region's GPU this thread's device, and a new stream its current one. Host memory has none."""
    if region.memory == "VRAM":
        # A thread without a device would use device 0. NIXL also needs the device's context in threads that
        # call it.
        torch.cuda.set_device(region.device)
        torch.cuda.set_stream(torch.cuda.Stream(region.device))


def on_device(region: Region) -> AbstractContextManager[object]:
    """Make a region's GPU the calling thread's device in the ``with`` statement. Host memory has none."""
    found: Any = torch.cuda.device(region.device) if region.memory == "VRAM" else nullcontext()
    return found  # type: ignore[no-any-return]


def record_event() -> DeviceEvent | None:
    """Record an event behind all work on the calling thread's current stream; None if no GPU is in use.

    Call it in the engine's thread after the forward pass was submitted.
    """
    if not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return None
    # A blocking event, for which a thread sleeps.
    event: DeviceEvent = torch.cuda.Event(blocking=True)
    event.record()
    return event


def wait_event(region: Region, event: DeviceEvent | None) -> None:
    """Make the calling thread's later copies of a region wait for an event, if there is one."""
    if event is None:
        return
    # The stream of a GPU waits, and the call returns at once. For host memory the call itself waits.
    if region.memory == "VRAM":
        torch.cuda.current_stream(region.device).wait_event(event)
    else:
        event.synchronize()


def finish_stream(device: torch.device) -> None:
    """Wait until the work on the calling thread's current stream of a device is done. A CPU has none."""
    if device.type == "cpu":
        return
    # A blocking event lets the thread sleep. `Stream.synchronize` would keep a core busy.
    event = torch.cuda.Event(blocking=True)
    event.record(torch.cuda.current_stream(device))
    event.synchronize()
