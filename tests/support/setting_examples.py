"""An example value of every setting, for docs/settings.md. No example is the setting's default."""

from __future__ import annotations

from typing import Any

import msgspec

from kvferry.connector.config import AdminConfig, ConnectorConfig, TenantConfig
from kvferry.tiers.files.tier import FileSettings
from kvferry.tiers.fleet.settings import FleetSettings
from kvferry.tiers.host.settings import HostSettings
from kvferry.tiers.objects.settings import ObjectSettings

EXAMPLES: dict[type[msgspec.Struct], dict[str, Any]] = {
    ConnectorConfig: {
        "host": "10.0.0.1",
        "port": 5600,
        "ports": "20000-20999",
        "advertise_host": "gpu-1.example.com",
        "secret_file": "/etc/kvferry/secret",
        "peers": ["10.0.0.0/24", "gpu-2.example.com"],
        "lease_seconds": 60,
        "load_timeout_seconds": 10,
        "handshake_seconds": 5,
        "attempts": 1,
        "late_blocks": 0.25,
        "transfer_log": "/var/log/kvferry/loads.jsonl",
        "record": "/var/log/kvferry/trace.jsonl",
        "layout": "BLHNC",
        "strategy": "staged",
        "staging_mib": 256,
        "lanes": 4,
        "verify_transfers": True,
        "costs": "/etc/kvferry/costs.json",
        "host_buffer": True,
        "tiers": [{"type": "host", "capacity": "64GiB"}, {"type": "file", "path": "/nvme/kv"}],
        "tenants": {"acme": {"salt_digest": "5f0c2a9b11de", "weight": 3}, "others": {"limit": 0.25}},
        "transfer": True,
        "chunk_tokens": 512,
        "snapshot_tokens": 2048,
        "first_snapshot_tokens": 4096,
        "hint_share": 0.05,
        "hint_seconds": 600,
        "tier_loads": 128,
        "source_policy": "cost",
        "load_weight": 0.5,
        "turn_seconds": 60,
        "turn_share": 0.1,
        "patience_seconds": 2.5,
        "whole_blocks": True,
        "name": "storage",
        "explain_requests": 4096,
        "admin": {"port": 5700},
    },
    TenantConfig: {"salt_digest": "5f0c2a9b11de", "adapter": "sql", "weight": 3, "limit": 0.25},
    AdminConfig: {"port": 5700, "host": "10.0.0.1"},
    FleetSettings: {
        "write": "back",
        "load_weight": 0.5,
        "min_uses": 2,
        "min_prompt_tokens": 1024,
        "port": 5700,
        "engines": ["10.0.0.1:5700", "10.0.0.2:5700"],
        "directory": "valkey://10.0.0.9:6379",
        "find_seconds": 0.02,
        "serve_per_second": "2GiB",
    },
    HostSettings: {"capacity": "64GiB", "eviction_policy": "s3fifo", "load_weight": 0.9},
    FileSettings: {
        "path": "/nvme/kv",
        "capacity": "500GiB",
        "durable": True,
        "page_cache": "20GiB",
        "write_per_day": "2TiB",
        "key_file": "/etc/kvferry/storage.keys",
        "write": "back",
        "load_weight": 0.7,
        "min_uses": 2,
        "min_prompt_tokens": 1024,
    },
    ObjectSettings: {
        "url": "s3://kv/prod",
        "options": {"endpoint": "http://minio:9000", "allow_http": "true"},
        "timeout_seconds": 5,
        "key_file": "/etc/kvferry/storage.keys",
        "write": "back",
        "load_weight": 0.5,
        "min_uses": 2,
        "min_prompt_tokens": 1024,
    },
}
