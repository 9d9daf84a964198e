"""Content adapters: the meaning of a page's bytes for one attention backend and KV cache dtype.

The place of pages is read from tensors. Their content cannot be read from there: on CPU vLLM hands over
``(blocks, heads, tokens, 2·D)`` and keeps, per head, K transposed (``[D][tokens]``) and then V
(``[tokens][D]``). So each backend has `adapters` that name fields, axes and strides. An adapter is used only
after a `probe`: it writes known values through the backend's own cache-write operation into scratch pages of
the same strides, and looks for every value where the adapter says. Formats that mix a token's elements
(rotations, packed codes with their scales) are proved as `cells`: the operation keeps all of a head and token
in one stretch of bytes. Content that cannot be proved moves as opaque whole pages.
"""

from kvferry.engines.vllm.content.adapters import is_known
from kvferry.engines.vllm.content.page import page_of_attention, whole_page
from kvferry.engines.vllm.content.scales import scales_of
from kvferry.engines.vllm.content.strides import Shard

__all__ = ["Shard", "is_known", "page_of_attention", "scales_of", "whole_page"]
