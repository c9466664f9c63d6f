"""Which cures a model needs here, switched on before it is built."""

from typing import Any

from vllm_moe_ep.adapters.vllm import cures


def prepare_for(vllm_config: Any, model_config: Any) -> None:
    """Switch on what `model_config` needs to run; on the CPU only.

    Raises:
        UnsupportedError: a cure that is needed does not work here.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    for cure in _needed(vllm_config, model_config):
        cures.switch_on(cure)


def _needed(vllm_config: Any, model_config: Any) -> list[cures.Cure]:
    from vllm_moe_ep.adapters.vllm import cure_amx_reload, cure_fp8_linear

    needed = []
    if cure_amx_reload.is_needed(vllm_config, model_config):
        needed.append(cure_amx_reload.CURE)
    if cure_fp8_linear.is_needed(vllm_config.quant_config):
        needed.append(cure_fp8_linear.CURE)
    if model_config.hf_text_config.model_type == "deepseek_v4":
        from vllm_moe_ep.adapters.vllm import cure_v4_metadata, cure_v4_schedule

        modules = (cure_v4_schedule, cure_v4_metadata)
        needed += [module.CURE for module in modules if module.is_needed()]
    return needed
