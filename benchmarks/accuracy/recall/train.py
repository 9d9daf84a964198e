"""Train a model that recalls pairs, and write its files: `python -m benchmarks.accuracy.recall.train NAME`.

A model discovers late that it must look for the key that it saw before. So the loss also has the attention
that it gives to the right place.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.accuracy.recall.models import MODELS, Trained
from benchmarks.accuracy.recall.task import (
    NOTHING,
    PAIRS,
    SPECIAL_IDS,
    WORDS,
    Sequences,
    draw,
    write_questions,
    write_tokenizer,
)

if TYPE_CHECKING:
    from torch import Tensor

_SEED = 1
_QUESTIONS = 120
_SHARED = {
    "vocab_size": len(WORDS),
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
    **SPECIAL_IDS,
}
_FEWEST_KEYS = 4
_LEARNING_RATE = 3e-3
_WARM_UP_STEPS = 50
_GOOD_ENOUGH = 0.9
_LAST_STEPS = 200
_MOST_STEPS = 3000


def train(trained: Trained) -> Any:
    """Return the trained model, in float32.

    Whenever most answers are right, the reach doubles, up to the model's, or then the number of keys. The
    last steps, with all keys, lower the learning rate to zero.
    """
    import torch

    model = _untrained(trained)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98))
    generator = torch.Generator().manual_seed(_SEED)
    keys, right, left = _FEWEST_KEYS, 0.0, _LAST_STEPS
    reach = 0 if trained.carries else trained.reach
    for step in range(_MOST_STEPS):
        rate = _LEARNING_RATE * min(1, (step + 1) / _WARM_UP_STEPS, left / _LAST_STEPS)
        for group in optimizer.param_groups:
            group["lr"] = rate
        # Repeated keys give more to learn from.
        pairs = max(32, 2 * keys) if step % 2 or keys < 32 else keys
        gap = int(torch.randint(min(reach, pairs) + 1, (1,), generator=generator))
        drawn = draw(16, min(PAIRS, pairs), keys, gap, generator)
        loss, score = _loss(model, drawn, trained)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        right += 0.05 * (score - right)
        if step % 50 == 0:
            print(f"step {step}: {keys} keys, reach {reach}: {right:.2f} right", file=sys.stderr, flush=True)
        if keys == PAIRS:
            left -= 1
        elif right > _GOOD_ENOUGH and reach < trained.reach:
            reach, right = min(trained.reach, 2 * reach + 1), 0.5
        elif right > _GOOD_ENOUGH:
            keys, right = min(PAIRS, 2 * keys), 0.5
        if not left:
            break
    if not trained.is_tied:
        head = model.get_output_embeddings()
        head.weight = torch.nn.Parameter(head.weight.detach().clone())
    return model


def _untrained(trained: Trained) -> Any:
    """Return the model with random weights. Its output matrix is the embedding."""
    import torch
    import transformers

    torch.manual_seed(_SEED)
    config = getattr(transformers, trained.config)(**{**_SHARED, **trained.settings})
    model: Any = transformers.AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    )
    model.get_output_embeddings().weight = model.get_input_embeddings().weight
    for name, weight in model.named_parameters():
        if trained.decays and name.endswith("A_log"):
            weight.data = torch.linspace(*trained.decays, len(weight))
    return model


def _loss(model: Any, drawn: Sequences, trained: Trained) -> tuple[Tensor, float]:
    """Return the loss, and the share of right answers."""
    found = model(input_ids=drawn.tokens, output_attentions=True, output_hidden_states=True)
    attentions = [one for one in found.attentions if one is not None]

    def misses(part: slice) -> Tensor:
        loss = _entropy(found.logits, drawn.targets, part)
        if trained.carries:
            loss = loss + _misses(attentions[-1][:, :, part], drawn.pair[:, part])
        if trained.tells_key:
            logits = model.lm_head(model.model.norm(found.hidden_states[1]))
            loss = loss + _entropy(logits, drawn.key, part)
        return loss

    # The one answer counts as much as all keys that are repeated, if there are any.
    loss = misses(slice(-4, -1))
    if (drawn.targets[:, :-4] >= 0).any():
        loss = loss + misses(slice(-4))
    if not trained.carries:
        loss = loss + _misses(attentions[-1], drawn.pair)
    if trained.looks_back:
        loss = loss + _misses(attentions[0], drawn.near)
    answers = found.logits[:, -3].argmax(-1) == drawn.targets[:, -3]
    return loss, float(answers.float().mean())


def _entropy(logits: Tensor, targets: Tensor, part: slice) -> Tensor:
    """Return the cross entropy of a part of the tokens."""
    from torch.nn.functional import cross_entropy

    return cross_entropy(logits[:, part].flatten(0, 1), targets[:, part].flatten(), ignore_index=NOTHING)


def _misses(attention: Tensor, places: Tensor) -> Tensor:
    """Return how little of the heads' attention is on the right places, as a loss."""
    asks = places.any(2)
    on_places = (attention.mean(1) * places).sum(2)[asks]
    return -(on_places + 1e-6).log().mean()


def write(trained: Trained, folder: Path) -> None:
    """Train a model, and write checkpoint, tokenizer and questions into a folder, which is replaced."""
    import torch

    model = train(trained)
    shutil.rmtree(folder, ignore_errors=True)
    model.to(torch.bfloat16).save_pretrained(folder)
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **trained.engine_reads}
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    write_tokenizer(folder)
    write_questions(folder, _QUESTIONS, trained.reach, _SEED)


if __name__ == "__main__":
    for name in sys.argv[1:] or MODELS:
        write(MODELS[name], MODELS[name].folder)
