"""Threads that copy on a GPU have a stream each, and wait for events, never for the whole device."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvferry.common.errors import TransferError
from kvferry.geometry import Region
from kvferry.memory import device_copy as host_registration, device_stream
from kvferry.memory.device_copy import HostRegistration
from support.recorded_cuda import RecordedCuda

ON_GPU, ON_HOST = Region(4096, 8192, "VRAM", 3), Region(4096, 8192)


@pytest.fixture
def cuda(monkeypatch) -> RecordedCuda:
    made = RecordedCuda()
    for module in (device_stream, host_registration):
        monkeypatch.setattr(module, "torch", SimpleNamespace(cuda=made, device=None))
    return made


def test_a_thread_enters_its_device_before_its_stream(cuda):
    device_stream.enter_stream(ON_GPU)
    assert cuda.calls == ["set_device 3", "set_stream 1 of 3"]
    device_stream.enter_stream(ON_HOST)
    assert len(cuda.calls) == 2


def test_copies_on_a_gpu_wait_for_the_forward_on_their_stream(cuda):
    device_stream.enter_stream(ON_GPU)
    cuda.calls.clear()
    event = device_stream.record_event()
    device_stream.wait_event(ON_GPU, event)
    assert cuda.calls == ["record event 1", "stream 1 of 3 waits for event 1"]


def test_copies_in_host_memory_wait_for_the_forward_themselves(cuda):
    device_stream.wait_event(ON_HOST, device_stream.record_event())
    device_stream.wait_event(ON_HOST, None)
    assert cuda.calls == ["record event 1", "synchronize event 1"]


def test_the_end_of_copies_is_awaited_by_an_event_of_their_stream(cuda):
    device_stream.enter_stream(ON_GPU)
    cuda.calls.clear()
    device_stream.finish_stream(SimpleNamespace(type="cuda", index=3))
    assert cuda.calls == ["record event 1 on stream 1 of 3", "synchronize event 1"]
    device_stream.finish_stream(SimpleNamespace(type="cpu", index=None))
    assert len(cuda.calls) == 2


def test_event_is_not_recorded_without_a_gpu(cuda):
    cuda.present = False
    assert device_stream.record_event() is None
    assert cuda.calls == []


def test_host_memory_is_registered_once_and_given_back_once(cuda):
    registration = HostRegistration(ON_HOST)
    registration.close()
    registration.close()
    assert cuda.calls == ["cudaHostRegister 4096 8192 3", "cudaHostUnregister 4096"]


def test_memory_that_cuda_cannot_register_is_an_error_in_words(cuda):
    cuda.error = 2
    with pytest.raises(TransferError, match=r"cannot register 8 KiB of host memory \(error 2\); lower the"):
        HostRegistration(ON_HOST)
