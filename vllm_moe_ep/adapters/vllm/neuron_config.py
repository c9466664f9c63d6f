"""What can be refused on Trainium before a worker starts."""

from typing import Any

from vllm_moe_ep.envs import Settings
from vllm_moe_ep.errors import UnsupportedError

ARCHITECTURE = "DeepseekV4ForCausalLM"
_REMEDY = (
    "Choose another --moe-backend, or set VLLM_MOE_EP_ALLOW_STOCK=1 to leave such layers on "
    "vllm-neuron's own."
)


def check(vllm_config: Any, settings: Settings) -> None:
    """Refuse what the adapter of vllm-neuron does not replace.

    Raises:
        UnsupportedError: the model is not one whose experts it knows, a draft model is served
            too, or a setting for the CPU was given.
    """
    if settings.experts != "auto":
        raise UnsupportedError(
            f"VLLM_MOE_EP_EXPERTS={settings.experts} is for CPU; on Trainium experts are gated: "
            "leave it on auto."
        )
    if settings.allow_stock or vllm_config.model_config is None:
        return
    architectures = vllm_config.model_config.architectures
    if ARCHITECTURE not in architectures:
        raise UnsupportedError(
            f"--moe-backend static-ep takes vllm-neuron's {ARCHITECTURE} alone, found "
            f"{', '.join(architectures)}. {_REMEDY}"
        )
    hf_config = getattr(vllm_config.model_config, "hf_config", None)
    expert_dtype = getattr(hf_config, "expert_dtype", "fp4")
    if expert_dtype != "fp4":
        raise UnsupportedError(
            f"vllm-neuron loads {ARCHITECTURE} with routed experts in FP4 alone (its "
            f"weight_loaders.py wants packed weights), found expert_dtype {expert_dtype}: serve a "
            f"checkpoint with FP4 experts. {_REMEDY}"
        )
    if vllm_config.speculative_config is not None:
        raise UnsupportedError(
            "--moe-backend static-ep does not take the experts of a draft model on Trainium: drop "
            f"--speculative-config. {_REMEDY}"
        )


def refuse(layer: str, reason: str) -> UnsupportedError:
    """The error for one layer that stays on vllm-neuron's own experts."""
    return UnsupportedError(
        f"--moe-backend static-ep cannot take layer {layer}: {reason}. {_REMEDY}"
    )
