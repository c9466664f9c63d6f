"""Install every hook, in order. Each hook waits for its vLLM module to be imported."""

from types import ModuleType

from vllm_moe_ep.adapters.vllm.import_hooks import when_imported

_installed = False


def install() -> None:
    """Install the hooks once per process; imports nothing of vLLM itself."""
    global _installed
    if _installed:
        return
    _installed = True
    when_imported("vllm.envs", _hook_environment)
    when_imported("vllm.config.vllm", _hook_config)
    when_imported("vllm.engine.arg_utils", _hook_arguments)
    when_imported("vllm.model_executor.layers.fused_moe.routed_experts", _hook_stock_experts)
    when_imported("vllm.model_executor.models.deepseek_v2", _hook_deepseek)
    when_imported("vllm.models.deepseek_v4.cpu.model", _hook_deepseek_v4)
    when_imported("vllm.model_executor.model_loader.base_loader", _hook_loader)
    _install_neuron()
    _install_cures()


def _install_neuron() -> None:
    when_imported("vllm_neuron.vllm.worker.neuron_model_runner", _hook_neuron_runner)
    when_imported("vllm_neuron.model.deepseek_v4.model", _hook_neuron_model)


def _install_cures() -> None:
    when_imported("vllm.model_executor.kernels.linear.scaled_mm.cpu", _hook_fp8_kernel)
    when_imported("vllm.model_executor.model_loader.reload.layerwise", _hook_reload)
    when_imported("vllm.models.deepseek_v4.cpu.cpu_mla", _hook_schedule)
    when_imported("vllm.v1.attention.ops.metadata", _hook_request_mapping)
    when_imported("vllm.v1.attention.backends.mla.sparse_swa", _hook_window)
    when_imported("vllm.v1.attention.backends.mla.indexer", _hook_indexer)
    when_imported("vllm.v1.attention.backends.mla.compressor_utils", _hook_compressor)


def _hook_environment(module: object) -> None:
    from vllm_moe_ep.adapters.vllm import environment

    environment.declare_variables(module)


def _hook_config(module: object) -> None:
    from vllm_moe_ep.adapters.vllm import backend_name, engine_config

    backend_name.widen_config_types()
    engine_config.hook_vllm_config()


def _hook_arguments(module: object) -> None:
    from vllm_moe_ep.adapters.vllm import backend_name

    backend_name.hook_arguments()


def _hook_stock_experts(module: object) -> None:
    from vllm_moe_ep.adapters.vllm import stock_guard

    stock_guard.hook_stock_experts()


def _hook_deepseek(module: object) -> None:
    from vllm_moe_ep.adapters.vllm import moe_factory

    moe_factory.hook_deepseek_factory()


def _hook_deepseek_v4(module: object) -> None:
    from vllm_moe_ep.adapters.vllm import moe_factory

    moe_factory.hook_deepseek_v4_factory()


def _hook_loader(module: object) -> None:
    from vllm_moe_ep.adapters.vllm import load_report

    load_report.hook_model_loader()


def _hook_neuron_runner(module: ModuleType) -> None:
    from vllm_moe_ep.adapters.vllm import neuron_model

    neuron_model.hook_runner(module)


def _hook_neuron_model(module: ModuleType) -> None:
    from vllm_moe_ep.adapters.vllm import neuron_model

    neuron_model.hook_model(module)


def _hook_fp8_kernel(module: object) -> None:
    from vllm_moe_ep.adapters.vllm import cure_fp8_linear

    cure_fp8_linear.hook_fp8_kernel()


def _hook_reload(module: object) -> None:
    from vllm_moe_ep.adapters.vllm import cure_amx_reload

    cure_amx_reload.hook_reload()


def _hook_schedule(module: object) -> None:
    from vllm_moe_ep.adapters.vllm import cure_v4_schedule

    cure_v4_schedule.hook_schedule()


def _hook_request_mapping(module: object) -> None:
    from vllm_moe_ep.adapters.vllm import cure_v4_metadata

    cure_v4_metadata.hook_request_mapping(module)


def _hook_window(module: object) -> None:
    from vllm_moe_ep.adapters.vllm import cure_v4_metadata

    cure_v4_metadata.hook_window(module)


def _hook_indexer(module: object) -> None:
    from vllm_moe_ep.adapters.vllm import cure_v4_metadata

    cure_v4_metadata.hook_indexer(module)


def _hook_compressor(module: object) -> None:
    from vllm_moe_ep.adapters.vllm import cure_v4_metadata

    cure_v4_metadata.hook_compressor(module)
