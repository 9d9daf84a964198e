"""The tokenizer of the tiny checkpoints: byte-level BPE, trained on `serving.corpus` at its first use."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from kvferry.tools.serving.corpus import corpus, corpus_digest
from kvferry.tools.serving.tiny.publish import digest, publish

VOCABULARY = 2048
BOS, EOS, PAD = "<s>", "</s>", "<pad>"
# The trainer numbers special tokens first, in this order.
SPECIAL_IDS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}

_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def trained_tokenizer(directory: Path) -> Path:
    """Return the folder of the tiny models' tokenizer. If it does not exist, train it (about 1 s).

    Several processes may call this at the same time. Each sees either no folder or a complete folder.
    """
    name = "tokenizer-" + digest(corpus_digest(), VOCABULARY, BOS, EOS, PAD, _CHAT_TEMPLATE)
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
        special_tokens=[BOS, EOS, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus().split("\n\n"), trainer=trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        chat_template=_CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
    fast.save_pretrained(folder)
