"""What this machine's processor can do, as far as vLLM for CPUs asks for it."""

from __future__ import annotations

from pathlib import Path

import pytest

_FLAGS = Path("/proc/cpuinfo").read_text()

HAS_AVX512 = "avx512f" in _FLAGS
"""vLLM for CPUs keeps KV in fp8 only with AVX-512."""

NO_AVX512 = "vLLM's fp8 KV cache on a CPU needs AVX-512, which this processor lacks"

needs_avx512 = pytest.mark.skipif(not HAS_AVX512, reason=NO_AVX512)

HAS_AVX512_BF16 = "avx512_bf16" in _FLAGS
"""vLLM for CPUs loads the library with AMX's operations only with AVX-512's bfloat16."""

needs_avx512_bf16 = pytest.mark.skipif(
    not HAS_AVX512_BF16, reason="vLLM's operations for AMX need avx512_bf16, which this processor lacks"
)
