from kvferry.engines.vllm.compat.connectors import SupportsHMA as SupportsHMA
from kvferry.engines.vllm.compat.cpu_attention import compute_attention as compute_attention
from kvferry.engines.vllm.connector import KVFerryConnector as KVFerryConnector
from kvferry.engines.vllm.transfer_config import TransferCheck as TransferCheck, Verdict as Verdict
from kvferry.engines.vllm.version import (
    check_release as check_release,
    is_supported as is_supported,
    nixl_version as nixl_version,
    supported_text as supported_text,
    vllm_version as vllm_version,
)
