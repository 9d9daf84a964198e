"""What this machine's processor can do, as far as vLLM for CPUs asks for it."""

from __future__ import annotations

from pathlib import Path

import pytest

HAS_AVX512 = "avx512f" in Path("/proc/cpuinfo").read_text()
"""vLLM for CPUs keeps KV in fp8 only with AVX-512."""

NO_AVX512 = "vLLM's fp8 KV cache on a CPU needs AVX-512, which this processor lacks"

needs_avx512 = pytest.mark.skipif(not HAS_AVX512, reason=NO_AVX512)
