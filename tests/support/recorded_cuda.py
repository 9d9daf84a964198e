"""In place of ``torch.cuda``: records the calls for streams, events and registered memory, in their order."""

from __future__ import annotations

import itertools
import threading
from types import SimpleNamespace


class RecordedCuda:
    """A GPU that does nothing. Streams and events are numbered as they are made.

    Attributes:
        calls: what was called, one text each.
        present: False if there is no GPU.
        error: what ``cudaHostRegister`` returns; 0 for success.
    """

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.present, self.error = True, 0
        self._numbers = {"stream": itertools.count(1), "event": itertools.count(1)}
        self._current = threading.local()

    def is_available(self) -> bool:
        return self.present

    is_initialized = is_available

    def set_device(self, device) -> None:
        self.calls.append(f"set_device {device}")

    def set_stream(self, stream) -> None:
        self._current.stream = stream
        self.calls.append(f"set_stream {stream.name}")

    def current_stream(self, device):
        assert device is not None
        return self._current.stream

    def Stream(self, device):  # noqa: N802 - torch's name
        name = f"{next(self._numbers['stream'])} of {device}"

        def waits(event) -> None:
            self.calls.append(f"stream {name} waits for event {event.number}")

        return SimpleNamespace(name=name, wait_event=waits)

    def Event(self, *, blocking):  # noqa: N802 - torch's name
        assert blocking, "a thread that waits would keep a core busy"
        number = next(self._numbers["event"])

        def record(stream=None) -> None:
            self.calls.append(f"record event {number}{f' on stream {stream.name}' if stream else ''}")

        return SimpleNamespace(
            number=number,
            record=record,
            query=lambda: True,
            synchronize=lambda: self.calls.append(f"synchronize event {number}"),
        )

    def cudart(self):
        return self

    def cudaHostRegister(self, address, size, flags):  # noqa: N802 - CUDA's name
        self.calls.append(f"cudaHostRegister {address} {size} {flags}")
        return SimpleNamespace(value=self.error)

    def cudaHostUnregister(self, address):  # noqa: N802 - CUDA's name
        self.calls.append(f"cudaHostUnregister {address}")
