"""Host memory through which workers of one machine exchange packed cells without a READ.

The source gathers cells into a sealed memory file, the *outgoing file*, in images as in its outgoing area. A
reader maps the file, and scatters the images from there into its blocks. The file is used only where that is
faster than READs (`read_speed`), and takes no memory before. A worker whose KV cache is on a GPU registers it
with CUDA, so that the GPU copies between blocks and file.

A reader can map the file if it runs on the same machine, as the same user and in the same process namespace
(`memory.sealed`). Otherwise it uses READs.
"""

from __future__ import annotations

import logging
import os

import numpy as np
import torch

from kvferry.errors import KVFerryError, TransferError
from kvferry.geometry import Region
from kvferry.memory.address_space import AddressSpace
from kvferry.memory.host_registration import HostRegistration
from kvferry.memory.huge_pages import map_shared
from kvferry.memory.sealed import SharedFile
from kvferry.memory.staging_copies import StagedImages
from kvferry.transport.staging import StagingArea

logger = logging.getLogger(__name__)

_HOST = Region(0, 1)


class OutgoingFile:
    """A memory file into which this worker gathers cells.

    Attributes:
        file: what a reader needs to map the memory.
        area: the memory as a staging area.
    """

    def __init__(self, size: int, like: Region) -> None:
        """Create and map the file. No memory is allocated until it is used, except by CUDA.

        Args:
            size: multiple of `staging.UNIT_BYTES`.
            like: region of the KV cache. If it is on a GPU, the memory is registered with CUDA.

        Raises:
            ConfigError: this system has no sealed memory files.
            TransferError: the memory cannot be mapped, or CUDA cannot register it.
        """
        self.file = SharedFile.create(size)
        try:
            self._memory = _Mapping(self.file.fd, size, like, writable=True)
        except BaseException:
            os.close(self.file.fd)
            raise
        self.area = StagingArea(size, _HOST, self._memory.tensor)

    def close(self) -> None:
        """Let no further reader map the file. Readers that have mapped it keep its memory."""
        self._memory.close()
        os.close(self.file.fd)


class MappedArea:
    """The outgoing file of another worker, mapped to be read."""

    def __init__(self, file: SharedFile, like: Region) -> None:
        """Map the file.

        Args:
            like: region of this worker's KV cache. If it is on a GPU, the memory is registered with CUDA.

        Raises:
            TransferError: it cannot be opened or mapped here. Its owner may run on another machine, or have
                ended.
        """
        writable = like.memory != "DRAM"  # CUDA refuses to register memory that is mapped to be read only
        fd = file.open(writable=writable)
        try:
            self._memory = _Mapping(fd, file.size, like, writable=writable)
        finally:
            os.close(fd)
        self._space = AddressSpace([self._memory.region])

    def images(self, stride: int) -> StagedImages:
        """Return a view of the whole file as images, as `StagingArea.images`."""
        return StagedImages(self._space, self._memory.region.address, stride)

    def close(self) -> None:
        """End the registration with CUDA. The memory stays mapped while it is in use."""
        self._memory.close()


class _Mapping:
    """A mapped memory file, as the tensor `tensor` (uint8 of shape (size,)) and as the region `region`."""

    def __init__(self, fd: int, size: int, like: Region, *, writable: bool) -> None:
        try:
            mapping, skip = map_shared(fd, size, writable=writable)
        except OSError as error:
            raise TransferError(f"shared memory cannot be mapped: {error.strerror}") from error
        self.tensor = torch.from_numpy(np.frombuffer(mapping, np.uint8, size, skip))
        self.region = Region(self.tensor.data_ptr(), size)
        self._registration = None if like.memory == "DRAM" else HostRegistration(self.region)

    def close(self) -> None:
        if self._registration is not None:
            self._registration.close()


def make_outgoing_file(size: int, like: Region) -> OutgoingFile | None:
    """Return a new `OutgoingFile`; None, with a line in the log, if this system does not allow it."""
    try:
        return OutgoingFile(size, like)
    except KVFerryError as error:
        logger.info("engines of this machine cannot map this engine's staging memory: %s", error)
        return None
