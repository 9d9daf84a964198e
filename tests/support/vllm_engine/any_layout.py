"""Lets vLLM's CPU backend declare what its kernels can do: they take strides, only the interior is fixed."""

from __future__ import annotations

from pathlib import Path


def declare() -> None:
    """In this process, before an engine is made in it."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
    from vllm.v1.kv_cache_layout import KVCacheLayout

    layouts = tuple(KVCacheLayout[name] for name in ("LBHNC", "BLHNC", "BHLNC", "LHBNC"))
    CPUAttentionBackend.supported_kv_cache_layouts = classmethod(lambda cls: layouts)


def write_plugin(folder: Path) -> Path:
    """Make a plugin of vLLM that does so in every process of an engine with this folder on its path."""
    installed = folder / "any_layout-1.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: any-layout\nVersion: 1\n")
    (installed / "entry_points.txt").write_text(
        f"[vllm.general_plugins]\nany_layout = {__name__}:{declare.__name__}\n"
    )
    return folder
