"""Content adapters: the meaning of a page's bytes for one attention backend and KV cache dtype.

The shape and strides of a cache tensor tell where pages lie, but not what their bytes mean. On CPU, for
example, vLLM hands over a tensor of shape ``(blocks, heads, tokens, 2·D)``. For each head, it holds K
transposed (``[D][tokens]``) and then V (``[tokens][D]``). So each backend has `adapters`, which name the
fields of a page with their axes and strides.

An adapter is used only after a `probe` has confirmed it. The probe makes scratch pages with the same strides,
and writes known values into them with the backend's own cache-write operation. It then checks that every
value is where the adapter says. Some formats mix the elements of a token (rotations, packed codes with their
scales). For these formats, `cells` proves that the operation keeps all data of a head and token in one
contiguous range of bytes. Pages whose content cannot be proved move whole, as opaque bytes.
"""

from kvferry.engines.vllm.content.adapters import is_known
from kvferry.engines.vllm.content.page import page_of_attention, whole_page
from kvferry.engines.vllm.content.scales import scales_of
from kvferry.engines.vllm.content.strides import Shard

__all__ = ["Shard", "is_known", "page_of_attention", "scales_of", "whole_page"]
