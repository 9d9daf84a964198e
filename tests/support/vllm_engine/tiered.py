"""An engine with tiers on a directory, and what a test does to the chunks there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvferry.tiers.format.chunk import encode_header
from kvferry.tiers.format.decode import decode_header, make_header
from support.vllm_engine.checkpoints import checkpoint_of, family_of
from support.vllm_engine.pair import connector
from support.vllm_engine.process import Engine

STEP = {"max_num_batched_tokens": 256}
"""Of prefill: where snapshots of recurrent state are left follows from it."""


class Tiered:
    """One engine whose connector keeps chunks in `directory`, and moves nothing between engines."""

    def __init__(
        self,
        family: str,
        checkpoints: Path,
        directory: Path,
        log: Path,
        options: dict[str, Any] | None = None,
        settings: dict[str, Any] | None = None,
        tiers: list[dict[str, Any]] | None = None,
        model: Path | None = None,
        *,
        fresh: bool = False,
    ) -> None:
        """Start it, and wait until it is up.

        Args:
            family: of `checkpoints`.
            checkpoints: folder of checkpoints.
            directory: of the file tier.
            log: file for what the engine prints.
            options: of the engine, on top of the family's own.
            settings: of the connector, besides its tiers.
            tiers: in place of host memory and `directory`.
            model: another checkpoint of the family.
            fresh: in a new interpreter.
        """
        directory.mkdir(parents=True, exist_ok=True)
        self.directory, self.log = directory, log
        tiers = tiers or [
            {"type": "host", "capacity": "64MiB"},
            {"type": "file", "path": str(directory), "capacity": "1GiB"},
        ]
        own = {**family_of(family).engine_options(), **STEP, **(options or {})}
        self.engine = Engine(
            log,
            {"VLLM_LOGGING_LEVEL": "INFO"},
            model=str(model or checkpoint_of(family, checkpoints)),
            fresh=fresh,
            kv_transfer_config=connector(tiers=tiers, **(settings or {})),
            **own,
        )
        try:
            self.about = self.engine.ready(500.0)
        except BaseException:
            self.engine.close()
            raise

    def say(self, text: list[int], tokens: int = 8, **how: Any) -> dict[str, Any]:
        """The engine's answer; everything that follows from it is stored when this returns.

        Args:
            text: token ids.
            tokens: of the answer.
            how: salt and adapter, as of `inside.generate`.

        Returns:
            As of `inside.generate`, with ``hit``: tokens that came from the tiers, per admission.
        """
        self.engine.call("bids")
        (answer,) = self.engine.call("generate", [text], tokens=tokens, **how)
        self.settle()
        answer["hit"] = self.engine.call("bids")
        return answer

    def own_words(self, text: list[int], tokens: int = 8) -> tuple[list[int], dict[str, Any]]:
        """`text` with the engine's next token, and what it goes on to say: see `pair.Pair.own_words`."""
        said = self.say(text, tokens + 1)
        rest = {name: said[name][1:] for name in ("tokens", "logprobs")}
        return text + said["tokens"][:1], rest

    def settle(self) -> None:
        """Step until the tiers have nothing left to do."""
        self.engine.call("settle_tiers")

    def forget(self, *, host: bool = False) -> None:
        """Forget the engine's own prefixes, and host memory as well if asked to; not the directory."""
        assert self.engine.call("reset_prefix_cache")
        if host:
            self.engine.call("forget_host_memory")

    def close(self) -> None:
        """Stop it."""
        self.engine.close()


def chunk_files(directory: Path) -> dict[str, list[Path]]:
    """Files of chunks in a directory, by the group that they hold."""
    found: dict[str, list[Path]] = {}
    for path in sorted(directory.rglob("*.kv")):
        (group,) = decode_header(path.read_bytes()).chunk.groups
        found.setdefault(group.name, []).append(path)
    return found


def spoil(path: Path, *, with_checksum: bool) -> None:
    """Change the signs of what a chunk's file holds, whatever the elements are: of each, or of every second.

    Args:
        path: of the file.
        with_checksum: write the checksums that go with it, so that nobody can tell.
    """
    image = bytearray(path.read_bytes())
    header = decode_header(image)
    start = header.chunk.offsets[0]
    if not with_checksum:
        image[start + 3] ^= 0x80
    else:
        for section, offset in zip(header.chunk.sections, header.chunk.offsets, strict=True):
            for at in range(offset + 3, offset + section.total_bytes, 4):
                image[at] ^= 0x80
        image[:start] = make_header(header.chunk, memoryview(image)[start:])
        assert decode_header(image).chunk == header.chunk
        assert encode_header(header.chunk, decode_header(image).digests) == image[:start]
    path.write_bytes(image)
