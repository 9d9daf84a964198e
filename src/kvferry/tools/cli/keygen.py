"""`kvferry keygen`: create a secret for engines on several machines."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.tools.cli.options import argument, command


@dataclass(frozen=True)
class KeygenOptions:
    """The options of `kvferry keygen`."""

    file: str = argument("FILE", "File to create; - for standard output.")


@command
def keygen(options: KeygenOptions) -> None:
    """Create a secret for engines on several machines.

    Copy the file to all machines, and set the engines' secret_file to it: only they can then exchange KV. An
    existing file is never overwritten.
    """
    from pathlib import Path

    from kvferry.transport.key_file import existing_keys, new_secret, write_secret

    file = options.file
    if file == "-":
        print(new_secret(), end="")
        return
    write_secret(Path(file))
    keys = existing_keys(file)
    # Users compare fingerprints, which the doctor prints too, and never print the secret itself.
    assert keys is not None  # noqa: S101 - it was written
    print(f"{file}: fingerprint {keys.fingerprint}")
