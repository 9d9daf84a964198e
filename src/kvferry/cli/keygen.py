"""`kvferry keygen`: create a secret for engines on several machines."""

from __future__ import annotations

from typing import Annotated

import typer


def keygen(
    file: Annotated[str, typer.Argument(metavar="FILE", help="File to create; - for standard output.")],
) -> None:
    """Create a secret for engines on several machines.

    Copy the file to all machines, and set the engines' secret_file to it: only they can then exchange KV. An
    existing file is never overwritten.
    """
    from pathlib import Path

    from kvferry.transport.key_file import existing_keys, new_secret, write_secret

    if file == "-":
        print(new_secret(), end="")
        return
    write_secret(Path(file))
    keys = existing_keys(file)
    assert keys is not None  # noqa: S101 - it was written
    print(f"{file}: fingerprint {keys.fingerprint}")
