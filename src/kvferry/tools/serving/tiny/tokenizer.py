"""The tokenizer of the tiny checkpoints: byte-level BPE, trained on `corpus` at its first use."""

from __future__ import annotations

import hashlib
import os
import pydoc_data.topics
import shutil
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from kvferry.common.errors import ConfigError

VOCABULARY = 2048
_BOS, _EOS, _PAD = "<s>", "</s>", "<pad>"
# The trainer numbers special tokens first, in this order.
SPECIAL_IDS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}

_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


@cache
def corpus() -> str:
    """Return the Python language reference as one English text of about 400,000 characters."""
    topics: dict[str, str] = pydoc_data.topics.topics
    return "\n\n".join(topics[name].strip() for name in sorted(topics))


def passages(characters: int) -> Iterator[str]:
    """Yield passages of the text that `corpus` returns, in order, without overlap, each from a paragraph on.

    Raises:
        ConfigError: `characters` is not positive, or the text is shorter than one passage.
    """
    text = corpus()
    if not 0 < characters <= len(text):
        raise ConfigError(f"a passage of {characters} characters was asked for; the text has {len(text)}")
    start = 0
    while start + characters <= len(text):
        yield text[start : start + characters]
        # A passage that begins within a sentence reads oddly in the demo.
        paragraph = text.find("\n\n", start + characters)
        if paragraph < 0:
            return
        start = paragraph + 2


def digest(*parts: object) -> str:
    """Return the first ten hex digits of the SHA-256 of ``repr(parts)``."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:10]


def publish(directory: Path, name: str, fill: Callable[[Path], None]) -> Path:
    """Return the folder `directory/name`, created by `fill` if missing. Raise ConfigError if that fails."""
    try:
        return _published(directory, name, fill)
    except OSError as error:
        raise ConfigError(
            f"cannot keep {name} in {directory}: {error.strerror}; set XDG_CACHE_HOME to a directory with "
            "room that you may write"
        ) from error


def _published(directory: Path, name: str, fill: Callable[[Path], None]) -> Path:
    final = directory / name
    if final.is_dir():
        return final
    directory.mkdir(parents=True, exist_ok=True)
    # Renamed when it is complete. Of several callers, the first to rename wins.
    private = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=directory))
    try:
        fill(private)
        private.chmod(0o755)
        try:
            private.rename(final)
        except OSError:
            if not final.is_dir():
                raise
    finally:
        shutil.rmtree(private, ignore_errors=True)
    return final


def trained_tokenizer(directory: Path) -> Path:
    """Return the folder of the tiny models' tokenizer. If it does not exist, train it (about 1 s).

    Several processes may call this at the same time. Each sees either no folder or a complete folder.
    """
    corpus_digest = hashlib.sha256(corpus().encode()).hexdigest()
    name = "tokenizer-" + digest(corpus_digest, VOCABULARY, _BOS, _EOS, _PAD, _CHAT_TEMPLATE)
    return publish(directory, name, _train)


def _train(folder: Path) -> None:
    # Set this before the import: tokenizers warns in every process that is forked after its threads ran.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer: Any = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[_BOS, _EOS, _PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus().split("\n\n"), trainer=trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=_BOS,
        eos_token=_EOS,
        pad_token=_PAD,
        chat_template=_CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
    fast.save_pretrained(folder)
