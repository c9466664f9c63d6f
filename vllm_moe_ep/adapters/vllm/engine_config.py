"""Check and adjust vLLM's configuration when static-ep was chosen; leave it alone otherwise."""

import functools
import logging
from collections.abc import Callable
from typing import Any

from vllm_moe_ep import BACKEND_NAME, __version__
from vllm_moe_ep.adapters.vllm import backend_name, failed_hooks, hooks, neuron_config
from vllm_moe_ep.adapters.vllm.checkpoint_files import check_checkpoint
from vllm_moe_ep.adapters.vllm.choice import backend_of, is_chosen, normalize
from vllm_moe_ep.adapters.vllm.cpu_attention import avoid_amx_attention
from vllm_moe_ep.config import EPConfig
from vllm_moe_ep.deepgemm.library import check_deep_gemm
from vllm_moe_ep.envs import OVERRIDE_KEY, Settings, given_names, load_settings
from vllm_moe_ep.errors import UnsupportedError
from vllm_moe_ep.hardware import Hardware, probe, require_layer

logger = logging.getLogger("vllm.vllm_moe_ep")

_NO_SEQUENCE_PARALLEL = "naive"
"""An `all2all_backend` that keeps tokens replicated over tensor-parallel ranks.

vLLM's default turns on sequence-parallel MoE at TP > 1 with DP > 1; its decoder layer then
takes a step of one token for one that is already split. Only this value switches that off
and is accepted, without effect, by every device communicator.
"""


def settings_of(vllm_config: Any) -> Settings:
    """The settings in force for this engine: environment, then `additional_config`."""
    return load_settings(_overrides(vllm_config))


def given_settings(vllm_config: Any) -> set[str]:
    """Names of the settings that somebody set for this engine."""
    return given_names(_overrides(vllm_config))


def _overrides(vllm_config: Any) -> Any:
    additional = vllm_config.additional_config
    return additional.get(OVERRIDE_KEY) if isinstance(additional, dict) else None


def ep_config_of(settings: Settings) -> EPConfig:
    """The layer's own configuration under these settings.

    Raises:
        SettingsError: the settings contradict each other.
    """
    return EPConfig(
        host_mode=probe(settings.platform).kind == "cpu",
        experts=settings.experts,
        gather=settings.gather,
        max_gated_rows=settings.gated_max_rows,
        expert_capacity=settings.expert_capacity,
        forced_gate=None if settings.forced_gate == "off" else int(settings.forced_gate),
    )


def with_checks(original: Callable[..., Any]) -> Callable[..., Any]:
    """Run our checks before `VllmConfig.__post_init__`, in every process that builds one."""

    @functools.wraps(original)
    def __post_init__(self: Any, *args: Any, **kwargs: Any) -> Any:
        _refuse_misspelling(backend_of(self))
        if is_chosen(self):
            prepare(self)
        return original(self, *args, **kwargs)

    return __post_init__


def _refuse_misspelling(backend: Any) -> None:
    """`LLM(moe_backend=...)` is not validated by vLLM: catch what was meant to be ours."""
    if not isinstance(backend, str) or normalize(backend) in backend_name.known_backends():
        return
    if BACKEND_NAME in backend_name.near_matches(backend):
        raise ValueError(backend_name.unknown_backend_message(backend) + ".")


def prepare(vllm_config: Any) -> None:
    """Validate the platform, the settings and the parallel layout, then adjust the config.

    Raises:
        UnsupportedError: what was asked for cannot run; names the option to change.
        SettingsError: a setting is unknown or has a value that is not allowed.
        CheckpointError: a file of the checkpoint is damaged or missing.
    """
    failed_hooks.refuse_if_any()
    settings = settings_of(vllm_config)
    hardware = probe(settings.platform)
    require_layer(hardware)
    hooks.refuse_failed(hardware.kind)
    if hardware.kind == "cuda":
        _check_cuda(settings)
    if hardware.kind == "cpu":
        avoid_amx_attention(vllm_config)
    if hardware.kind == "neuron":
        neuron_config.check(vllm_config, settings)
    log_choice(hardware)
    ep_config_of(settings)
    vllm_config.kernel_config.moe_backend = BACKEND_NAME
    for reason in _refusals(vllm_config):
        raise UnsupportedError(f"--moe-backend static-ep cannot serve this: {reason}")
    check_checkpoint(vllm_config.model_config, vllm_config.load_config)
    _keep_tokens_replicated(vllm_config.parallel_config)
    _place_experts(vllm_config, settings.placement)


def _check_cuda(settings: Settings) -> None:
    """Everything that can be known before a worker starts."""
    if settings.experts != "auto":
        raise UnsupportedError(
            f"VLLM_MOE_EP_EXPERTS={settings.experts} is for CPU; on NVIDIA leave it on auto and "
            "use VLLM_MOE_EP_CUDA_PATH."
        )
    check_deep_gemm()


@functools.cache
def log_choice(hardware: Hardware) -> None:
    """One line per process: version, layer and why."""
    logger.info(
        "static-ep: vllm-moe-ep %s, using %s: %s",
        __version__,
        require_layer(hardware),
        hardware.reason,
    )


def _refusals(vllm_config: Any) -> list[str]:
    rules = _rules(vllm_config, vllm_config.parallel_config)
    return [reason for applies, reason in rules if applies] + _model_refusals(vllm_config)


def is_draft(vllm_config: Any, model_config: Any) -> bool:
    """Whether `model_config` is the draft model of speculative decoding.

    A draft may be dense: then it simply has nothing for us to replace.
    """
    speculative = vllm_config.speculative_config
    return speculative is not None and model_config is speculative.draft_model_config


def _rules(vllm_config: Any, parallel: Any) -> list[tuple[bool, str]]:
    ranks = parallel.tensor_parallel_size * parallel.data_parallel_size
    return [
        (
            ranks > 1 and not parallel.enable_expert_parallel,
            f"{ranks} ranks (tensor parallel {parallel.tensor_parallel_size} x data parallel "
            f"{parallel.data_parallel_size}) must share the experts: add "
            "--enable-expert-parallel.",
        ),
        (
            parallel.pipeline_parallel_size > 1,
            "pipeline parallelism is not supported: set --pipeline-parallel-size 1.",
        ),
        (
            parallel.prefill_context_parallel_size > 1,
            "prefill context parallelism is not supported: set it to 1.",
        ),
        (
            parallel.enable_eplb,
            "expert load balancing moves experts between ranks, which static placement does not "
            "follow: drop --enable-eplb.",
        ),
        (
            parallel.use_ubatching,
            "micro-batches (dual batch overlap) are not supported: drop --enable-dbo.",
        ),
        (
            vllm_config.lora_config is not None,
            "LoRA adapters on expert layers are not supported: drop --enable-lora.",
        ),
    ]


def _model_refusals(vllm_config: Any) -> list[str]:
    model_config = vllm_config.model_config
    if model_config is None or is_draft(vllm_config, model_config):
        return []
    if getattr(model_config.hf_text_config, "n_routed_experts", None) is None:
        return [
            f"{', '.join(model_config.architectures)} has no DeepSeek MoE layer (its config has "
            "no n_routed_experts): choose another --moe-backend."
        ]
    return []


def _keep_tokens_replicated(parallel: Any) -> None:
    backend = parallel.all2all_backend
    if backend not in ("allgather_reducescatter", _NO_SEQUENCE_PARALLEL):
        logger.warning(
            "static-ep: ignoring --all2all-backend %s: the layer moves tokens with its own "
            "all-gather and reduce-scatter.",
            backend,
        )
    parallel.all2all_backend = _NO_SEQUENCE_PARALLEL


def _place_experts(vllm_config: Any, placement: str) -> None:
    """Spread a grouped router's experts: consecutive ones would all be of one group.

    A token's experts come from few groups, so that linear placement gives them to few ranks,
    and at small batches everybody waits for the busiest.
    """
    if placement == "auto":
        if not _spreads(vllm_config):
            return
        placement = "round_robin"
    vllm_config.parallel_config.expert_placement_strategy = placement


def _spreads(vllm_config: Any) -> bool:
    """Whether round-robin placement helps here, and vLLM can do it."""
    parallel, model_config = vllm_config.parallel_config, vllm_config.model_config
    if model_config is None or parallel.data_parallel_size > 1:
        # Under data parallelism vLLM keeps it for its own all-to-all kernels.
        return False
    hf_config = model_config.hf_text_config
    # With fewer experts than ranks it fails in vLLM.
    has_enough = getattr(hf_config, "n_routed_experts", 0) >= parallel.tensor_parallel_size
    return has_enough and (getattr(hf_config, "n_group", None) or 1) > 1
