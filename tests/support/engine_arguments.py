"""Classification of vLLM's engine arguments by whether they decide the content of the KV cache.

A test compares these tables with the installed vLLM. An argument that a later vLLM adds fails the test until
somebody has classified it here. The tables hold the arguments of all supported releases.
"""

from __future__ import annotations

from collections.abc import Mapping

DECIDES: Mapping[str, tuple[str, ...]] = {
    "weights": (
        "model", "model_weights", "revision", "load_format", "seed",  # a seed makes dummy weights
    ),
    "model configuration": (
        "hf_config_path", "hf_overrides", "config_format",
        # A model's code writes the values that it derives from these into its configuration.
        "max_model_len", "generation_config", "override_generation_config", "disable_sliding_window",
    ),
    "built model": ("model_impl", "model_class_overrides", "trust_remote_code", "code_revision"),
    "model dtype": ("dtype",),
    "quantization": ("quantization",),
    "KV cache dtype": ("kv_cache_dtype",),
    "recurrent state dtypes": ("mamba_cache_dtype", "mamba_ssm_cache_dtype"),
    "multimodal processor": ("mm_processor_kwargs",),
    "engine settings": (
        "quantization_config", "ignore_patterns", "additional_config", "mm_encoder_attn_dtype",
        "mm_encoder_fp8_scale_path", "mm_device_do_normalize", "video_pruning_rate", "video_pruning_method",
        "diffusion_config",
    ),
    # Facts compared for every rank's memory: groups, element types, the order of a state's bytes, and
    # the draft model that a layer belongs to.
    "geometry": (
        "speculative_config", "spec_method", "spec_model", "spec_tokens",
        "kv_cache_dtype_skip_layers", "attention_backend", "disable_hybrid_kv_cache_manager",
        "mamba_cache_mode", "use_replayssm", "replayssm_buffer_len",
    ),
    # Facts compared for every request. They are also part of the names of its chunks.
    "request": (
        "default_mm_loras", "lora_dtype", "lora_target_modules", "enable_tower_connector_lora",
        "media_io_kwargs", "mm_processor_device", "tokenizer", "tokenizer_revision", "tokenizer_mode",
        "enable_prompt_embeds",  # prompts without token ids have no names
        "interleave_mm_strings",
    ),
}  # fmt: skip
"""Arguments that decide KV content. The key is the compared fact that differs if the argument does."""

REFUSED: Mapping[str, tuple[str, ...]] = {
    "the connector refuses to start: a sleeping engine gives up the memory of its cache": (
        "enable_sleep_mode",
    ),
}  # fmt: skip
"""Arguments that cannot be used in an engine with kvferry's connector. The key is the reason."""

DOES_NOT: Mapping[str, tuple[str, ...]] = {
    "only what is done with the answer": (
        "max_logprobs", "logprobs_mode", "use_fp64_gumbel", "return_sampling_mask",
        "enable_return_routed_experts", "structured_outputs_config", "reasoning_parser",
        "reasoning_parser_plugin", "reasoning_config", "logits_processors", "watermark_config",
        "stream_interval", "pooler_config", "runner", "convert", "aux_output_config", "tokens_only",
        "skip_tokenizer_init", "io_processor_plugin",
    ),
    "names and addresses": (
        "served_model_name", "hf_token", "download_dir", "allowed_local_media_path", "allowed_media_domains",
        "master_addr", "master_port", "nnodes", "node_rank", "data_parallel_address",
        "data_parallel_rpc_port",
    ),
    "how weights get into memory; what they are is digested": (
        "safetensors_load_strategy", "safetensors_prefetch_num_threads", "safetensors_prefetch_block_size",
        "model_loader_extra_config", "max_parallel_loading_workers", "use_tqdm_on_load",
        "pt_load_map_location", "offload_backend", "cpu_offload_gb", "cpu_offload_params",
        "offload_group_size", "offload_num_in_group", "offload_prefetch_step", "offload_params",
        "engram_config", "allow_deprecated_quantization",
    ),
    "weights that change at run time: kvferry forgets everything when the engine resets its cache": (
        "weight_transfer_config", "sleep_mode_offload_cudagraph", "sleep_mode_backend",
        "sleep_preserve_parameter_names", "enable_cumem_allocator", "enable_nccl_comm_suspend",
    ),
    "how work is shared out: any parallel size holds the same values": (
        "distributed_executor_backend", "pipeline_parallel_size", "tensor_parallel_size",
        "decode_context_parallel_size", "prefill_context_parallel_size", "dcp_kv_cache_interleave_size",
        "cp_kv_cache_interleave_size", "dcp_comm_backend", "dcp_q_replicate",
        "data_parallel_size", "data_parallel_rank", "data_parallel_start_rank", "data_parallel_size_local",
        "data_parallel_hybrid_lb", "data_parallel_external_lb", "data_parallel_multi_port_external_lb",
        "data_parallel_backend", "distributed_timeout_seconds", "cpu_distributed_timeout_seconds",
        "numa_bind", "numa_bind_nodes", "numa_bind_cpus", "device_ids", "enable_hc_sp",
        "enable_expert_parallel", "enable_batch_sharded_sampling", "enable_ep_weight_filter",
        "all2all_backend", "enable_elastic_ep", "elastic_ep_max_dp_size", "enable_dbo", "ubatch_size",
        "dbo_decode_token_threshold", "dp_sync_interval", "dbo_prefill_token_threshold",
        "disable_nccl_for_dp_synchronization", "eplb_config", "enable_eplb", "expert_placement_strategy",
        "_api_process_count", "_api_process_rank", "disable_custom_all_reduce", "enable_shm_tensor_arena",
        "ray_workers_use_nsight", "mm_encoder_tp_mode", "fully_sharded_loras",
    ),
    "kernels that compute the same up to rounding": (
        "cudagraph_capture_sizes", "max_cudagraph_capture_size", "ir_op_priority", "moe_backend",
        "linear_backend", "sparse_indexer_topk_backend", "disable_cascade_attn", "enforce_eager",
        "mm_encoder_attn_backend", "compilation_config", "attention_config", "mamba_config",
        "kernel_config", "monokernel", "enable_flashinfer_autotune", "mamba_backend", "mamba_ssu_algorithm",
        "enable_mamba_cache_stochastic_rounding", "mamba_cache_philox_rounds", "gdn_prefill_backend",
        "kda_prefill_backend", "kda_decode_backend", "optimization_level", "performance_mode",
        "jit_monitor_mode", "jit_monitor_verbose", "specialize_active_lora",
        "enable_mixed_moe_lora_format", "enable_moe_shared_loras",
    ),
    "sizes, and what is cached where; blocks of any size hold the same values": (
        "block_size", "enable_prefix_caching", "prefix_caching_hash_algo", "prefix_cache_retention_interval",
        "gpu_memory_utilization", "kv_cache_memory_bytes", "num_gpu_blocks_override", "mamba_block_size",
        "prefix_match_unit", "enable_mamba_shared_prefix_checkpoint", "kv_sharing_fast_prefill",
        "swa_bounded_replay", "kv_offloading_size", "kv_offloading_backend", "mm_processor_cache_gb",
        "mm_processor_cache_type", "mm_shm_cache_max_object_size_mb", "mm_ipc_gpu_memory_gb",
        "mm_tensor_ipc", "max_loras", "max_lora_rank", "max_cpu_loras", "max_lora_cls_labels",
        "ec_manager_config",
    ),
    "which requests are taken, and when": (
        "max_num_batched_tokens", "max_num_scheduled_tokens", "long_prefill_token_threshold",
        "long_prefill_token_threshold_adaptive", "max_num_seqs", "max_num_active_seqs",
        "max_num_queued_reqs", "max_num_queued_tokens", "enable_chunked_prefill",
        "disable_chunked_mm_input", "scheduler_reserve_full_isl", "prefill_schedule_interval", "watermark",
        "scheduling_policy", "scheduler_cls", "async_scheduling", "limit_mm_per_prompt",
        "language_model_only", "mm_encoder_only", "enable_mm_embeds", "enable_lora", "skip_mm_profiling",
        "renderer_num_workers", "enable_trace_replay", "fault_tolerance_config", "enable_fault_tolerance",
        "shutdown_timeout", "fail_on_environ_validation",
    ),
    "names of images are kvferry's own": ("mm_hasher_algorithm",),
    "only written, or only watched": (
        "mm_encoder_fp8_scale_save_path", "mm_encoder_fp8_scale_save_margin", "disable_log_stats",
        "aggregate_engine_logging", "show_hidden_metrics_for_version", "otlp_traces_endpoint",
        "collect_detailed_traces", "per_request_spec_decode_metrics", "kv_cache_metrics",
        "kv_cache_metrics_sample", "custom_histogram_buckets", "cudagraph_metrics",
        "enable_layerwise_nvtx_tracing", "enable_mfu_metrics", "enable_logging_iteration_details",
        "enable_mm_processor_stats", "profiler_config", "logging_config", "log_level", "log_config_file",
        "enable_log_requests", "watchdog_config",
    ),
    "connectors and transports themselves": ("kv_transfer_config", "kv_events_config", "ec_transfer_config"),
    "code of the operator's own, which nothing can compare": ("worker_cls", "worker_extension_cls"),
}  # fmt: skip
"""Arguments that do not decide KV content. The key is the reason."""
