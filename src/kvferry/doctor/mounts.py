"""Find the file system of a path, and its properties."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import psutil

_NETWORK = (
    "nfs",
    "nfs4",
    "cifs",
    "smb3",
    "ceph",
    "lustre",
    "gpfs",
    "glusterfs",
    "beegfs",
    "9p",
    "afs",
    "wekafs",
)
_MEMORY = ("tmpfs", "ramfs", "devtmpfs")
_LAYERS = ("overlay", "aufs")


@dataclass(frozen=True, slots=True)
class Mount:
    """A mounted file system.

    Attributes:
        point: path of the mount point.
        kind: type of the file system, as the kernel names it.
        source: device or server.
    """

    point: str
    kind: str
    source: str

    @property
    def in_memory(self) -> bool:
        """Return whether its files are in memory, and lost at a restart."""
        return self.kind in _MEMORY

    @property
    def is_layer(self) -> bool:
        """Return whether it is a container's own layer, which is deleted with the container."""
        return self.kind in _LAYERS

    @property
    def is_network(self) -> bool:
        """Return whether its files are on another machine or behind a user-space process."""
        return self.kind in _NETWORK or self.kind.startswith("fuse")


def list_mounts() -> list[Mount]:
    """Return all mounts that this process sees."""
    return [Mount(one.mountpoint, one.fstype, one.device) for one in psutil.disk_partitions(all=True)]


def mount_of(path: str, among: Iterable[Mount]) -> Mount | None:
    """Return the mount of an absolute path: the longest matching mount point, and of equals the last.

    >>> among = [Mount("/", "ext4", ""), Mount("/mnt", "nfs", ""), Mount("/mn", "xfs", "")]
    >>> mount_of("/mnt/kv/x", among).kind
    'nfs'
    """
    above = [m for m in among if path == m.point or path.startswith(f"{m.point.rstrip('/')}/")]
    return max(reversed(above), key=lambda m: len(m.point), default=None)
