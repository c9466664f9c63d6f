"""Every hook, in order. Each waits for its vLLM module to be imported."""

from vllm_moe_ep.adapters.vllm.hooks import Hook
from vllm_moe_ep.adapters.vllm.hooks import install as install_hooks

_V4_CPU = "vllm.models.deepseek_v4.cpu"
_LAYERWISE = "vllm.model_executor.model_loader.reload.layerwise"
_METADATA = "vllm.v1.attention.ops.metadata"
_MLA = "vllm.v1.attention.backends.mla"

HOOKS = (
    Hook(
        "vllm.envs",
        "vllm.envs.environment_variables",
        "environment.declare_variables",
        kind="change",
    ),
    Hook(
        "vllm.config.vllm",
        "vllm.config.vllm.get_current_vllm_config_or_none",
        kind="need",
    ),
    Hook(
        "vllm.config.vllm",
        "vllm.config.kernel.KernelConfig.moe_backend",
        "backend_name.widen_kernel_config",
        kind="change",
    ),
    Hook(
        "vllm.config.vllm",
        "vllm.config.speculative.SpeculativeConfig.moe_backend",
        "backend_name.widen_speculative_config",
        kind="change",
    ),
    Hook(
        "vllm.config.vllm",
        "vllm.config.vllm.VllmConfig.__post_init__",
        "engine_config.with_checks",
    ),
    Hook(
        "vllm.engine.arg_utils",
        "vllm.engine.arg_utils._compute_kwargs",
        "backend_name.forget_cached_arguments",
        kind="change",
    ),
    Hook(
        "vllm.engine.arg_utils",
        "vllm.engine.arg_utils.EngineArgs.add_cli_args",
        "backend_name.with_near_matches",
    ),
    Hook(
        "vllm.model_executor.layers.fused_moe.routed_experts",
        "vllm.model_executor.layers.fused_moe.routed_experts.RoutedExperts._get_quant_method",
        "stock_guard.with_guard",
        parameters=("prefix", "moe_config"),
    ),
    Hook(
        "vllm.model_executor.models.deepseek_v2",
        "vllm.model_executor.models.deepseek_v2.FusedMoEFactory",
        "moe_factory.with_our_experts",
        parameters=("runner_cls", "routed_experts_cls", "routed_experts_args"),
    ),
    Hook(
        "vllm.model_executor.models.deepseek_v2",
        "vllm.model_executor.models.deepseek_v2.DeepseekV2MLP.__init__",
        "moe_factory.with_whole_shared",
        parameters=("is_sequence_parallel", "prefix"),
    ),
    Hook(
        f"{_V4_CPU}.model",
        f"{_V4_CPU}.model.FusedMoEFactory",
        "moe_factory.with_our_experts",
        parameters=("runner_cls", "routed_experts_cls", "routed_experts_args"),
        platform="cpu",
    ),
    Hook(
        f"{_V4_CPU}.model",
        f"{_V4_CPU}.model.DeepseekV4MLP.__init__",
        "moe_factory.with_whole_shared",
        parameters=("is_sequence_parallel", "prefix"),
        platform="cpu",
    ),
    Hook(
        "vllm.model_executor.model_loader.base_loader",
        "vllm.model_executor.model_loader.base_loader.BaseModelLoader.create_model",
        "load_report.with_report",
        parameters=("vllm_config", "model_config"),
    ),
    Hook(
        "vllm.model_executor.model_loader.base_loader",
        "vllm.model_executor.model_loader.base_loader.BaseModelLoader.load_model",
        "serve_refusals.with_refusal_for_the_parent",
    ),
    Hook(
        "vllm.entrypoints.cli.serve",
        "vllm.entrypoints.cli.serve.ServeSubcommand.cmd",
        "serve_refusals.with_short_refusals",
        parameters=("args",),
    ),
)

NEURON_HOOKS = (
    Hook(
        "vllm_neuron.vllm.worker.neuron_model_runner",
        "vllm_neuron.vllm.worker.neuron_model_runner.NeuronModelRunner.load_model",
        "neuron_model.with_our_experts",
        platform="neuron",
    ),
    Hook(
        "vllm_neuron.model.deepseek_v4.model",
        "vllm_neuron.model.deepseek_v4.model.DeepseekV4ForCausalLM.from_configs",
        "neuron_model.taking_layers",
        platform="neuron",
    ),
    Hook(
        "vllm_neuron.model.deepseek_v4.model",
        "vllm_neuron.model.deepseek_v4.model.DeepseekV4ForCausalLM.load_weights",
        "neuron_model.preparing_layers",
        platform="neuron",
    ),
)

CURE_HOOKS = (
    Hook(
        "vllm.model_executor.kernels.linear.scaled_mm.cpu",
        "vllm.model_executor.kernels.linear.scaled_mm.cpu.CPUFp8BlockScaledMMKernel.is_supported",
        "cure_fp8_linear.with_cure",
        platform="cpu",
    ),
    Hook(
        _LAYERWISE,
        f"{_LAYERWISE}._copy_and_restore_kernel_tensors",
        "cure_amx_reload.with_freed_parameters",
        parameters=("layer", "info"),
        platform="cpu",
    ),
    Hook(
        f"{_V4_CPU}.cpu_mla",
        f"{_V4_CPU}.cpu_mla.DeepseekV4CPUSparseSWAMetadataBuilder.build_tile_scheduler",
        "cure_v4_schedule.with_all_types",
        platform="cpu",
    ),
    Hook(
        _METADATA,
        f"{_METADATA}.compute_token_to_req_indices",
        "cure_v4_metadata.with_plain_mapping",
        platform="cpu",
    ),
    Hook(
        f"{_MLA}.sparse_swa",
        f"{_MLA}.sparse_swa.ComputePrefillMetadataKernel.__call__",
        "cure_v4_metadata.with_plain_lengths",
        platform="cpu",
    ),
    Hook(
        f"{_MLA}.sparse_swa",
        f"{_MLA}.sparse_swa.ComputeSWAIndicesAndLensKernel.__call__",
        "cure_v4_metadata.with_plain_window",
        platform="cpu",
    ),
    Hook(
        f"{_MLA}.indexer",
        f"{_MLA}.indexer.BuildPrefillChunkMetadataKernel.__call__",
        "cure_v4_metadata.with_plain_chunk",
        platform="cpu",
    ),
    Hook(
        f"{_MLA}.compressor_utils",
        f"{_MLA}.compressor_utils.CompressedSlotMappingKernel.__call__",
        "cure_v4_metadata.with_plain_slots",
        platform="cpu",
    ),
)

_installed = False


def install() -> None:
    """Install the hooks once per process; imports nothing of vLLM itself."""
    global _installed
    if _installed:
        return
    _installed = True
    install_hooks((*HOOKS, *NEURON_HOOKS, *CURE_HOOKS))
