"""Registration of host memory with CUDA, so that GPUs access it directly.

Several processes may register the same shared memory, each for itself.
"""

from __future__ import annotations

import torch

from kvferry.errors import TransferError
from kvferry.geometry import Region
from kvferry.units import format_bytes

# Flags of cudaHostRegister: for all CUDA contexts of the process, and mapped into their addresses.
_PORTABLE_AND_MAPPED = 3


class HostRegistration:
    """Host memory that is registered with CUDA until `close`, and must stay mapped until then.

    `memory` begins at a page. TransferError is raised if CUDA cannot register it.
    """

    def __init__(self, memory: Region) -> None:
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
