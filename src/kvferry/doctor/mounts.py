"""Find the file system of a path, and its properties."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

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
        point: where.
        kind: its type, as the kernel names it.
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


def list_mounts(table: Iterable[str] | None = None) -> list[Mount]:
    r"""Return all mounts that this process sees.

    Args:
        table: lines of ``/proc/self/mountinfo`` (proc(5)), by default this process's.

    >>> list_mounts([r"36 35 98:0 /mnt1 /mnt/a\040b rw - nfs4 server:/export rw"])
    [Mount(point='/mnt/a b', kind='nfs4', source='server:/export')]
    """
    if table is None:
        table = Path("/proc/self/mountinfo").read_text(errors="replace").splitlines()
    found = []
    for line in table:
        about, _, system = line.partition(" - ")
        if len(place := about.split()) > 4 and len(kind := system.split()) > 1:
            found.append(Mount(_unescaped(place[4]), kind[0], _unescaped(kind[1])))
    return found


def mount_of(path: str, among: Iterable[Mount]) -> Mount | None:
    """Return the mount of an absolute path: the longest matching mount point, and of equals the last.

    >>> among = [Mount("/", "ext4", ""), Mount("/mnt", "nfs", ""), Mount("/mn", "xfs", "")]
    >>> mount_of("/mnt/kv/x", among).kind
    'nfs'
    """
    above = [m for m in among if path == m.point or path.startswith(f"{m.point.rstrip('/')}/")]
    return max(reversed(above), key=lambda m: len(m.point), default=None)


def _unescaped(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), text)
