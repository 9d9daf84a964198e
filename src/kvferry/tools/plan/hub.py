"""A model's ``config.json`` on the Hugging Face hub."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from kvferry.errors import ConfigError

CONFIG_FILE = "config.json"
# A model in Mistral's format has this file. Beside weights in this format, vLLM takes it for ``config.json``.
PARAMS_FILE = "params.json"
# Older releases of ModelOpt keep here what vLLM takes for the ``quantization_config`` of a ``config.json``
# without one.
QUANTIZATION_FILE = "hf_quant_config.json"


class NotOnHub(ConfigError):
    """Raised if the hub does not know or give a model, or cannot be reached. The message is a clause."""


def hub_config(model: str) -> Path:
    """Return the path of a model's ``config.json`` in the local Hugging Face cache. Download it if needed.

    Also download the file with the quantization config, if the model has one.

    Raises:
        NotOnHub: the model is not in the cache, and the hub does not know it or cannot be reached.
        ConfigError: the model has no ``config.json``. The message is a clause.
    """
    import huggingface_hub as hub  # noqa: PLC0415 - slow to import
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError  # noqa: PLC0415 - the same

    try:
        # Without a network this fails at once. The download alone would repeat its request for half a minute.
        hub.get_hf_file_metadata(hub.hf_hub_url(model, CONFIG_FILE))
        found = Path(hub.hf_hub_download(model, CONFIG_FILE))
        with suppress(EntryNotFoundError):
            hub.hf_hub_download(model, QUANTIZATION_FILE)
    except Exception as error:  # for every failure of network or hub, the remedy is the same
        with suppress(ValueError):  # not the name of a model
            if isinstance(cached := hub.try_to_load_from_cache(model, CONFIG_FILE), str):
                return Path(cached)
        if isinstance(error, EntryNotFoundError):
            raise ConfigError(f"the Hugging Face hub has no {CONFIG_FILE} of it") from error
        if isinstance(error, HfHubHTTPError):
            why = "does not give it (is the name right, does it need HF_TOKEN?)"
        elif isinstance(error, ValueError):
            why = "has no such names"
        else:
            why = "cannot be reached"
        raise NotOnHub(f"the Hugging Face hub {why} ({type(error).__name__})") from error
    return found
