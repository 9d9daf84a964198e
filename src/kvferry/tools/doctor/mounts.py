"""Find the file system of a path, and its properties."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import psutil

_NETWORK = frozenset(
    ["nfs", "nfs4", "cifs", "smb3", "ceph", "lustre", "gpfs", "glusterfs", "beegfs", "9p", "afs", "wekafs"]
)
_MEMORY = ("tmpfs", "ramfs", "devtmpfs")
# The root of a container is a stack of layers.
_LAYERS = ("overlay", "aufs")


@dataclass(frozen=True, slots=True)
class Mount:
    """A mounted file system.

    Attributes:
        point: path of the mount point.
        kind: type of the file system, as the kernel names it.
        source: device or server that holds the files.
    """

    point: str
    kind: str
    source: str

    @property
    def in_memory(self) -> bool:
        """Whether files are lost when the machine restarts."""
        return self.kind in _MEMORY

    @property
    def is_layer(self) -> bool:
        """Whether it is the root of a container, whose files are deleted with the container."""
        return self.kind in _LAYERS

    @property
    def is_network(self) -> bool:
        """Whether another machine or a process (FUSE) serves the files."""
        return self.kind in _NETWORK or self.kind.startswith("fuse")


def list_mounts() -> list[Mount]:
    """Return all mounted file systems that this process can see."""
    return [Mount(one.mountpoint, one.fstype, one.device) for one in psutil.disk_partitions(all=True)]


def mount_of(path: str, among: Iterable[Mount]) -> Mount | None:
    """Return the mounted file system that holds an absolute path; None if there is none.

    >>> among = [Mount("/", "ext4", ""), Mount("/mnt", "nfs", ""), Mount("/mn", "xfs", "")]
    >>> mount_of("/mnt/kv/x", among).kind
    'nfs'
    """
    above = [m for m in among if path == m.point or path.startswith(f"{m.point.rstrip('/')}/")]
    # A later mount at the same point hides the earlier ones, and `max` returns the first of equals.
    return max(reversed(above), key=lambda m: len(m.point), default=None)
