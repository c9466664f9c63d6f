"""Local experts by vLLM's grouped CPU kernel, which packs the weights for itself."""

from typing import Any

import torch
from torch import Tensor
from vllm._custom_ops import cpu_prepack_moe_weight
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe.oracle.unquantized import select_unquantized_moe_backend
from vllm.model_executor.utils import replace_parameter

from vllm_moe_ep.adapters.vllm.compat import with_moe_backend
from vllm_moe_ep.config import MoEConfig

logger = init_logger("vllm.vllm_moe_ep")

_DTYPES = (torch.bfloat16, torch.float32)
"""fp16 stays with our own products: they sum in fp32, where the kernel would overflow."""

_AMX, _VECTORS = "amx", "vec"

_ALIASED_WORK = 1 << 21
"""Weights read by all pairs of a step, up to which pairs of weight 0 cost less than leaving them
out does (measured: equal at 16 rows, top-4, hidden 256, width 128; a loss from 2 rows on at top-8,
1024, 512)."""


def max_aliased_rows(config: MoEConfig) -> int:
    """Rows up to which `layers.fused_experts.alias_foreign` pays."""
    pair = config.hidden_size * config.moe_intermediate_size
    return max(1, _ALIASED_WORK // (config.top_k * pair))


# The kernel multiplies by the weights itself.
_SKIP_WEIGHTED = False


def pack(layer: Any, isa: str) -> None:
    """Bring the layer's loaded weights into the kernel's order, in their place."""
    for name in ("w13_weight", "w2_weight"):
        replace_parameter(layer, name, cpu_prepack_moe_weight(getattr(layer, name), isa))


class PackedCpuExperts:
    """Expert weights in the kernel's packed order, see `pack`.

    Attributes as in `layers.expert_weights.ExpertLinears`.
    """

    def __init__(self, layer: Any, isa: str, config: MoEConfig) -> None:
        # vLLM swaps parameters when it reloads weights: look them up at each call.
        self._parameters = layer._parameters
        self._isa = isa
        # The overload itself: a small decode step feels the look-up that vLLM's wrapper makes.
        self._kernel = torch.ops._C.cpu_fused_moe.default
        self.max_aliased_rows = max_aliased_rows(config)
        self.num_slots: int = layer.w13_weight.shape[0]
        self.device = layer.w13_weight.device
        self.hidden_dtype = self.activation_dtype = layer.w13_weight.dtype

    def fused(self, rows: Tensor, slots: Tensor, weights: Tensor) -> Tensor:
        """As `layers.expert_weights.FusedExperts.fused`."""
        output = torch.empty_like(rows)
        self._kernel(
            output,
            rows,
            self._parameters["w13_weight"],
            self._parameters["w2_weight"],
            None,
            None,
            weights,
            slots,
            _SKIP_WEIGHTED,
            "silu",
            self._isa,
        )
        return output

    def gate_up(self, slot: int, rows: Tensor, flag: Tensor | None = None) -> Tensor:
        raise NotImplementedError(_WHOLE_EXPERTS_ONLY)

    def down(self, slot: int, rows: Tensor, flag: Tensor | None = None) -> Tensor:
        raise NotImplementedError(_WHOLE_EXPERTS_ONLY)


_WHOLE_EXPERTS_ONLY = "The packed CPU kernel computes whole experts: use the ragged strategy."


def kernel_isa(layer: Any, config: MoEConfig, experts: str) -> str | None:
    """The instruction set that the kernel uses for this layer; None where it does not apply.

    Args:
        layer: our `RoutedExperts` with its weights loaded.
        config: the layer's shape.
        experts: the setting of that name.
    """
    if experts not in ("auto", "ragged") or config.swiglu_limit is not None:
        return None
    if layer.w13_weight.device.type != "cpu" or layer.w13_weight.dtype not in _DTYPES:
        return None
    experts_class: Any
    _, experts_class = select_unquantized_moe_backend(with_moe_backend(layer.moe_config, "auto"))
    supports_shape = getattr(experts_class, "_supports_grouped_gemm", None)
    if supports_shape is None or not supports_shape(layer.moe_config)[0]:
        return None
    if config.moe_intermediate_size % experts_class.output_alignment:
        return None
    return _permitted(str(experts_class.isa))


def _permitted(isa: str) -> str:
    """A process that uses AMX without having asked the kernel for it is killed by SIGILL.

    In an engine some product before the experts may have asked; in a benchmark or a test none has.
    """
    if isa == _AMX and not torch.cpu._init_amx():
        logger.info_once("static-ep: this system grants no AMX; experts use plain vectors")
        return _VECTORS
    return isa
