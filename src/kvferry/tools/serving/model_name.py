"""Check that vLLM can find a model, before engines take a minute to find out that it cannot."""

from __future__ import annotations

import os

from kvferry.errors import ConfigError
from kvferry.tools.plan.hub import CONFIG_FILE, PARAMS_FILE, NotOnHub, hub_config
from kvferry.user_cache import expanded

# vLLM needs one of them: Hugging Face's or Mistral's.
_CONFIGS = (CONFIG_FILE, PARAMS_FILE)
_REMEDY = "give a folder with a checkpoint, or the id of a model, such as Qwen/Qwen3-0.6B"


def check_model(model: str) -> None:
    """Check that a model is a folder with a checkpoint, or a name on the Hugging Face hub or in its cache.

    Raises:
        ConfigError: vLLM would not find the model.
    """
    # Models of other places, such as ``s3://`` or ModelScope, are not checked.
    if "://" in model or os.environ.get("VLLM_USE_MODELSCOPE", "").lower() in ("1", "true"):
        return
    check_path(model)
    path = expanded(model)
    if path.is_dir():
        if not any((path / name).is_file() for name in _CONFIGS):
            raise ConfigError(f"the folder {model} holds no {' or '.join(_CONFIGS)}; {_REMEDY}")
    elif not path.is_file():
        try:
            hub_config(model.partition(":")[0])  # a colon precedes the quantisation of a GGUF file
        except NotOnHub as error:
            raise ConfigError(f"there is no folder {model!r} here, and {error}; {_REMEDY}") from error
        except ConfigError:
            pass  # a model without config.json, such as one of Mistral's


def check_path(model: str) -> None:
    """Check that a model that is given as a path exists and can be read.

    Raises:
        ConfigError: it does not or cannot.
    """
    if model.startswith(("/", "./", "../", "~")):
        try:
            expanded(model).stat()
        except FileNotFoundError as error:
            raise ConfigError(
                f"there is no model at {model}; give a folder that exists, or the id of a model"
            ) from error
        except OSError as error:
            raise ConfigError(
                f"the model at {model} cannot be read: {error.strerror}; give a folder that user "
                f"{os.geteuid()} may read, or the id of a model"
            ) from error
