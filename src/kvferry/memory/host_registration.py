"""Registration of host memory with CUDA, so that GPUs access it directly.

Copies to and from registered memory are asynchronous, and kernels can read and write it. The memory stays
where it is: several processes may register the same shared memory, each for itself.
"""

from __future__ import annotations

import torch

from kvferry.errors import TransferError
from kvferry.geometry import Region
from kvferry.units import format_bytes

_PORTABLE_AND_MAPPED = 3
"""Flags of ``cudaHostRegister``: for all CUDA contexts of the process, and mapped into their addresses."""


class HostRegistration:
    """Host memory that is registered with CUDA until `close`."""

    def __init__(self, memory: Region) -> None:
        """Register host memory with CUDA.

        Args:
            memory: region of host memory, which begins at a page. It must stay mapped until `close`.

        Raises:
            TransferError: CUDA cannot register the memory.
        """
        self._address = memory.address
        cudart = torch.cuda.cudart()
        code = cudart.cudaHostRegister(memory.address, memory.length, _PORTABLE_AND_MAPPED).value
        if code:
            self._address = 0
            raise TransferError(
                f"CUDA cannot register {format_bytes(memory.length)} of host memory (error {code}); lower "
                "the capacity of the host tier or staging_mib, or raise ulimit -l and the container's memory "
                "limit"
            )

    def close(self) -> None:
        """End the registration. No copy of the memory may be in progress. Idempotent."""
        if self._address:
            torch.cuda.cudart().cudaHostUnregister(self._address)
            self._address = 0
