"""Check for models whose KV cache kvferry cannot transfer: encoders and encoder-decoders."""

from __future__ import annotations

from kvferry.errors import ConfigError
from kvferry.geometry.models.config import ModelConfig

_ENCODERS = frozenset((
    "albert", "bert", "camembert", "clip", "colmodernvbert", "convbert", "deberta", "deberta_v2",
    "distilbert", "electra", "ernie", "eurobert", "gte", "jina_embeddings_v3", "luke", "megatron_bert",
    "modernbert", "modernvbert", "mpnet", "new", "nomic_bert", "openai_privacy_filter", "rembert", "roberta",
    "roformer", "siglip", "siglip2", "siglip_text_model", "siglip_vision_model", "splade", "vit",
    "xlm-roberta", "xlm-roberta-xl",
))  # fmt: skip
_ENCODER_DECODERS = frozenset((
    "bart", "blenderbot", "byt5", "cohere_asr", "led", "longt5", "m2m_100", "marian", "mbart", "mllama",
    "moonshine", "mt5", "nllb-moe", "pegasus", "speech_to_text", "switch_transformers", "t5", "t5gemma",
    "t5gemma2", "umt5", "whisper",
))  # fmt: skip


def check_decoder(config: ModelConfig) -> None:
    """Check that the model is a decoder. The KV caches of other models are not supported.

    Raises:
        ConfigError: the model is an encoder without a KV cache, or an encoder-decoder.
    """
    name = config.model_type or "unknown"
    if config.get("is_encoder_decoder") is True or name in _ENCODER_DECODERS:
        raise ConfigError(
            f"model type {name} is an encoder-decoder: its decoder also keeps keys and values of the "
            "encoder's output (cross-attention), which no prompt token names, so nothing is handed over"
        )
    both_ways = config.get("use_bidirectional_attention") is True or config.get("is_causal") is False
    if name in _ENCODERS or both_ways:
        reason = (
            "reads its input in both directions" if both_ways else "is an encoder: it reads its input at once"
        )
        raise ConfigError(
            f"model type {name} {reason} and keeps no KV cache, so there is nothing to hand over"
        )
