"""Content adapters: the meaning of a page's bytes for one attention backend and KV cache dtype.

Tensors tell where pages lie, but not what their bytes mean. On CPU, for example, vLLM hands over ``(blocks,
heads, tokens, 2·D)`` and keeps, per head, K transposed (``[D][tokens]``) and then V (``[tokens][D]``). So
each backend has `adapters` that name fields, axes and strides. An adapter is used only after a `probe`, which
writes known values through the backend's own cache-write operation into scratch pages of the same strides,
and checks that every value is where the adapter says. Some formats mix a token's elements (rotations, packed
codes with their scales). For them `cells` proves that the operation keeps everything of a head and token in
one stretch of bytes. Pages whose content cannot be proved move whole, as opaque bytes.
"""

from kvferry.engines.vllm.content.adapters import is_known
from kvferry.engines.vllm.content.page import page_of_attention, whole_page
from kvferry.engines.vllm.content.scales import scales_of
from kvferry.engines.vllm.content.strides import Shard

__all__ = ["Shard", "is_known", "page_of_attention", "scales_of", "whole_page"]
