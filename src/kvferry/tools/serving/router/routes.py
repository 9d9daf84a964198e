"""Table of all paths of vLLM's API server, and what the router does with each.

- `COMPLETED`: a request with a JSON body, for a prefill and a decode engine, or a decode engine alone
  (`bodies.DECODE_ONLY`). The client's ``kv_transfer_params`` are removed.
- `PASSED_THROUGH`: a request that any decode engine can answer, without a field for ``kv_transfer_params``.
- `OF_RESPONSES`: a request about a response, for the decode engine that keeps it.
- `ANSWERED`: the router answers by itself.
- `REFUSED`: the router says why it does not relay the request.

A test compares the table with vLLM's own routes.
"""

from __future__ import annotations

from kvferry.tools.serving.router.bodies import CHAT, COMPLETIONS, DECODE_ONLY
from kvferry.tools.serving.router.replies import MESSAGES, RESPONSES

COMPLETED = (COMPLETIONS, CHAT, MESSAGES, *sorted(DECODE_ONLY))
PASSED_THROUGH = (
    ("GET", "/v1/models"),
    ("GET", "/version"),
    ("GET", "/tokenizer_info"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
)
OF_RESPONSES = (
    ("GET", f"{RESPONSES}/{{response_id}}"),
    ("POST", f"{RESPONSES}/{{response_id}}/cancel"),
)
ANSWERED = (
    ("GET", "/health"),
    ("GET", "/load"),
    ("GET", "/metrics"),
    ("GET", "/ping"),
    ("POST", "/ping"),
)

_ONE_ENGINE = "it describes or changes a single engine; send it to the engine itself"
_BY_TOKENS = "it would let clients choose what an engine does for another one; send it to the engine itself"
_AUDIO = "the router relays no audio; send it to the engine itself"

# Reasons by path, for all methods.
REFUSED = {
    **dict.fromkeys(
        (
            "/abort_requests",
            "/adapters",
            "/adapters/{adapter_name}",
            "/collective_rpc",
            "/docs",
            "/docs/oauth2-redirect",
            "/fault_tolerance/apply",
            "/fault_tolerance/status",
            "/finish_weight_update",
            "/get_world_size",
            "/init_weight_transfer_engine",
            "/is_paused",
            "/is_scaling_elastic_ep",
            "/is_sleeping",
            "/kv_event_sources",
            "/openapi.json",
            "/pause",
            "/redoc",
            "/release_kv_cache_memory",
            "/reset_encoder_cache",
            "/reset_mm_cache",
            "/reset_prefix_cache",
            "/resume",
            "/scale_elastic_ep",
            "/server_info",
            "/shutdown_weight_transfer_engine",
            "/sleep",
            "/start_draft_weight_update",
            "/start_profile",
            "/start_weight_update",
            "/stop_profile",
            "/update_weight_version",
            "/update_weights",
            "/v1/load_lora_adapter",
            "/v1/unload_lora_adapter",
            "/wake_up",
            "/weight_checker",
            "/weight_info",
        ),
        _ONE_ENGINE,
    ),
    **dict.fromkeys(("/inference/v1/abort_requests", "/inference/v1/generate"), _BY_TOKENS),
    **dict.fromkeys(("/v1/audio/transcriptions", "/v1/audio/translations", "/v1/realtime"), _AUDIO),
}
