"""What a guarded view of a cache lets through, and what not."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from kvferry.common.errors import SilentCopy
from kvferry.memory.address_space import guard

HAZARDS = {
    "reshape": lambda view: view.reshape(-1),
    "reshape to a shape": lambda view: view.reshape((4, -1)),
    "torch.reshape": lambda view: torch.reshape(view, (-1,)),
    "torch.reshape by keyword": lambda view: torch.reshape(input=view, shape=(-1,)),
    "reshape_as": lambda view: view.reshape_as(torch.zeros(4 * 2 * 3 * 6)),
    "flatten": lambda view: view.flatten(),
    "torch.flatten of inner axes": lambda view: torch.flatten(view, 1, 2),
    "nn.Flatten": torch.nn.Flatten(),
    "ravel": lambda view: view.ravel(),
    "torch.ravel": torch.ravel,
    "contiguous": lambda view: view.contiguous(),
    "contiguous in a memory format": lambda view: view.contiguous(memory_format=torch.channels_last),
    "contiguous, unbound": torch.Tensor.contiguous,
    "an operator": lambda view: torch.ops.aten.reshape(view, [-1]),
    "an operator's overload": torch.ops.aten.contiguous.default,
    "reshape of a part": lambda view: view[1:3].reshape(-1),
    "reshape of an iterated part": lambda view: next(iter(view)).reshape(-1),
    "contiguous of a permuted view": lambda view: view.permute(1, 0, 3, 2).contiguous(),
    "reshape of a split": lambda view: view.split(2, 1)[0].reshape(-1),
    "reshape of an unbound part": lambda view: view.unbind(2)[0].reshape(-1),
    "reshape of a detached view": lambda view: view.detach().reshape(-1),
    "reshape of the data": lambda view: view.data.reshape(-1),
    "reshape after a write": lambda view: view.mul_(2).reshape(-1),
    "reshape of transposed": lambda view: view.mT.reshape(-1),
    "reshape as other elements": lambda view: view.view(torch.int32).reshape(-1),
    "reshape of the same as a tensor": lambda view: torch.as_tensor(view).reshape(-1),
    "reshape of nothing converted": lambda view: view.to(torch.float32).reshape(-1),
}

VIEWS = {
    "a block": lambda view: view[1],
    "a slice": lambda view: view[:, 1:, ::2],
    "an ellipsis": lambda view: view[..., 0],
    "permute": lambda view: view.permute(0, 2, 1, 3),
    "transpose": lambda view: view.transpose(1, 2),
    "narrow": lambda view: view.narrow(0, 1, 2),
    "view": lambda view: view.view(4, 2, 3, 2, 3),
    "other elements": lambda view: view.view(torch.uint8),
    "unflatten": lambda view: view.unflatten(3, (2, 3)),
    "unsqueeze": lambda view: view.unsqueeze(0),
    "expand": lambda view: view[:1].expand(5, 2, 3, 6),
    "as_strided": lambda view: view.as_strided((2, 2), (1, 2)),
    "reshape that is a view": lambda view: view.reshape(4, 2, 3, 2, 3),
    "flatten that is a view": lambda view: view.permute(2, 1, 0, 3)[0].flatten(1, 1),
    "contiguous of what is": lambda view: view[0, 0, 0].contiguous(),
    "the memory order": lambda view: view.permute(1, 0, 2, 3).contiguous().reshape(-1),
    "nothing converted": lambda view: view.to(torch.float32),
    "chunk": lambda view: view.chunk(2)[1],
    "of a tuple of views": lambda view: torch.atleast_2d((view[0, 0, 0], view[1, 0, 0]))[1],
    "broadcast": lambda view: torch.broadcast_tensors(view, view)[1],
}

COPIES = {
    "clone": lambda view: view.clone(),
    "clone in order": lambda view: view.clone(memory_format=torch.contiguous_format),
    "gather by index": lambda view: view[torch.tensor([0, 2])],
    "index_select": lambda view: view.index_select(0, torch.tensor([1])),
    "another dtype": lambda view: view.to(torch.float16),
    "half": lambda view: view.half(),
    "an explicit copy": lambda view: view.to(torch.float32, copy=True),
    "an explicit copy in order": lambda view: view.to(
        torch.float32, copy=True, memory_format=torch.contiguous_format
    ),
    "arithmetic": lambda view: view * 2 + view,
    "a matrix product": lambda view: view @ torch.ones(6, 2),
    "einsum": lambda view: torch.einsum("bhnc,bhmc->bhnm", view, view),
    "attention": lambda view: functional.scaled_dot_product_attention(view, view, view),
    "pad": lambda view: functional.pad(view, (0, 1)),
    "sum": lambda view: view.sum(0),
    "cat": lambda view: torch.cat([view, view]),
    "like it": lambda view: torch.empty_like(view, memory_format=torch.contiguous_format),
    "reshape of a clone": lambda view: view.clone().reshape(-1),
    "reshape of a sum": lambda view: (view + 1).permute(3, 2, 1, 0).reshape(-1),
}

WRITES = {
    "assignment": lambda view: view.__setitem__((1, 0), 7.0),
    "copy_": lambda view: view[2].copy_(torch.full((2, 3, 6), 7.0)),
    "in place": lambda view: view.add_(7.0),
    "by index": lambda view: view.__setitem__(torch.tensor([0, 3]), 7.0),
    "index_copy_": lambda view: view.index_copy_(0, torch.tensor([2]), torch.full((1, 2, 3, 6), 7.0)),
    "out": lambda view: torch.add(torch.zeros(4, 2, 3, 6), 7.0, out=view),
    "through a view of a view": lambda view: view.permute(3, 2, 1, 0)[0].fill_(7.0),
    "augmented": lambda view: view.__iadd__(7.0),
}


def unguard(view: torch.Tensor) -> torch.Tensor:
    """An ordinary tensor over the same memory."""
    with torch._C.DisableTorchFunctionSubclass():
        return view.as_subclass(torch.Tensor)


@pytest.fixture
def buffer():
    return torch.arange(4 * 2 * 3 * 6, dtype=torch.float32)


@pytest.fixture
def view(buffer):
    """(blocks, heads, tokens, content), heads outermost in memory."""
    return guard(buffer.view(2, 4, 3, 6).permute(1, 0, 2, 3))


def named(operations):
    return pytest.mark.parametrize("operation", operations.values(), ids=operations.keys())


def shares(result, buffer) -> bool:
    return result.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()


@named(HAZARDS)
def test_silently_copying_operations_are_refused(view, operation):
    with pytest.raises(SilentCopy):
        operation(view)


@named(HAZARDS)
def test_the_hazards_are_real_without_the_guard(view, buffer, operation):
    assert not shares(operation(unguard(view)), buffer)


def test_the_guard_works_in_inference_mode(view):
    with torch.inference_mode(), pytest.raises(SilentCopy):
        view[1:].reshape(-1)


def test_guard_copies_no_data():
    """A view of 8 TB of one element repeated: a copy would fail for want of memory."""
    view = guard(torch.zeros(2).expand(1 << 40, 2).transpose(0, 1))
    with pytest.raises(SilentCopy):
        view.contiguous()


def test_the_message_says_what_was_done_to_what_and_what_to_do(view):
    with pytest.raises(SilentCopy) as raised:
        view[1:].flatten()
    for part in ("flatten", r"(3, 2, 3, 6)", "(18, 72, 6, 1)", "permute", "page map", "clone()"):
        assert part in str(raised.value)


@named(VIEWS)
def test_a_view_of_a_view_is_the_same_memory_and_guarded(view, buffer, operation):
    result = operation(view)
    assert shares(result, buffer)
    assert type(result) is type(view)
    result.zero_()
    assert (buffer == 0).any()


@named(COPIES)
def test_new_memory_that_was_asked_for_is_an_ordinary_tensor(view, buffer, operation):
    result = operation(view)
    assert type(result) is torch.Tensor
    assert not shares(result, buffer)
    expected = operation(unguard(view))
    assert result.shape == expected.shape


def test_copies_hold_what_the_cache_holds(view):
    assert torch.equal(view.clone(), unguard(view))
    assert torch.equal((view + 1).reshape(-1), (unguard(view) + 1).reshape(-1))


@named(WRITES)
def test_writes_go_to_the_buffer(view, buffer, operation):
    expected = buffer.clone()
    operation(expected.view(2, 4, 3, 6).permute(1, 0, 2, 3))
    assert not torch.equal(buffer, expected)
    operation(view)
    assert torch.equal(buffer, expected)


def test_einops_is_caught_where_it_would_copy_only(view, buffer):
    einops = pytest.importorskip("einops")
    with pytest.raises(SilentCopy):
        einops.rearrange(view, "b h n c -> (b h n) c")
    in_order = einops.rearrange(view, "b h n c -> (h b n) c")
    assert shares(in_order, buffer)
    assert shares(einops.rearrange(view, "b h n c -> n b h c"), buffer)


def test_a_guarded_view_prints_and_unguards(view, buffer):
    assert "0.," in repr(view)
    plain = unguard(view)
    assert type(plain) is torch.Tensor
    assert shares(plain, buffer)


def test_ordinary_tensors_may_be_copied_into_the_shape_of_a_guarded_one(view):
    other = torch.arange(4 * 2 * 3 * 6).view(12, 12).mT.reshape_as(view)
    assert type(other) is torch.Tensor
    assert other[0, 0, 0].tolist() == [0, 12, 24, 36, 48, 60]


def test_writing_in_place_gives_the_view_itself(view):
    assert view.add_(1) is view
