"""Content adapters: the meaning of a page's bytes for one attention backend and KV cache dtype.

The shape and strides of a cache tensor tell where pages lie, but not what their bytes mean. On CPU, for
example, vLLM hands over a tensor of shape ``(blocks, heads, tokens, 2·D)``. For each head, it holds K
transposed (``[D][tokens]``) and then V (``[tokens][D]``). So each backend has `adapters`, which name the
fields of a page, and each is used only after a `probe` has confirmed it. Formats that mix the elements of a
token are moved in `cells`. Pages whose content cannot be proved move whole, as opaque bytes.
"""

from kvferry.engines.vllm.content.adapters import ADAPTERS
from kvferry.engines.vllm.content.page import page_of_attention, whole_page
from kvferry.engines.vllm.content.strides import Shard, scales_of

__all__ = ["ADAPTERS", "Shard", "page_of_attention", "scales_of", "whole_page"]
