"""Expert weights of one rank and the two products the strategies need of them.

A weight format is one class with the interface ``ExpertLinears``; the strategies know no format.
"""

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from vllm_moe_ep.config import MoEConfig
from vllm_moe_ep.errors import UnsupportedError
from vllm_moe_ep.layers.products import product
from vllm_moe_ep.quant.formats import QuantFormat

SUPPORTED_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class ExpertLinears(Protocol):
    """The products of one rank's experts.

    Attributes:
        num_slots: local experts plus unused trailing slots.
        device: where the weights are.
        hidden_dtype: dtype that hidden_states must have.
        activation_dtype: dtype in which rows are handed to ``gate_up`` and ``down``.

    With a ``flag`` (int32 [1, 1]) a product may be skipped where it is 0: the result is zeros.
    """

    num_slots: int
    device: torch.device
    hidden_dtype: torch.dtype
    activation_dtype: torch.dtype

    def gate_up(self, slot: int, rows: Tensor, flag: Tensor | None = None) -> Tensor:
        """[rows, hidden_size] -> [rows, 2 * moe_intermediate_size], gate columns first."""
        ...

    def down(self, slot: int, rows: Tensor, flag: Tensor | None = None) -> Tensor:
        """[rows, moe_intermediate_size] -> [rows, hidden_size]."""
        ...


@runtime_checkable
class FusedExperts(Protocol):
    """Weights that an engine's grouped kernel takes, activation and weighting included.

    Only the ragged strategy can use them.

    Attributes:
        max_aliased_rows: most rows for which ``LocalRouting`` costs less than leaving out the
            pairs that are not local.
    """

    max_aliased_rows: int

    def fused(self, rows: Tensor, slots: Tensor, weights: Tensor) -> Tensor:
        """Sum over k of weights[:, k] * expert slots[:, k] of the row.

        Args:
            rows: [rows, hidden_size] in hidden_dtype.
            slots: int32 [rows, k], each in [0, num_slots): a row meets no other expert.
            weights: fp32 [rows, k].

        Returns:
            [rows, hidden_size] in hidden_dtype.
        """
        ...


@runtime_checkable
class CastingExperts(Protocol):
    """Weights whose rows are cast to a format before ``gate_up``, once per step and outside it.

    Attributes:
        activation: that format, fp8 with scales per row and block; None: no cast.
    """

    activation: QuantFormat | None


@runtime_checkable
class ActivatingExperts(Protocol):
    """Weights whose device has an activation kernel of its own."""

    def swiglu(self, gate_up: Tensor, row_weight: Tensor, swiglu_limit: float | None) -> Tensor:
        """``gate_up``'s result and fp32 [rows] -> fp32 [rows, moe_intermediate_size]."""
        ...


class FloatExperts:
    """bf16, fp16 or fp32 weights, held by reference as the engine loaded them.

    Args:
        w13_weight: [num_slots, 2 * moe_intermediate_size, hidden_size], gate rows first.
        w2_weight: [num_slots, hidden_size, moe_intermediate_size].
        config: the layer's shape.

    Raises:
        ValueError: the shapes do not fit the config or each other.
        UnsupportedError: the dtype is not one of those above, or the two differ.
    """

    def __init__(self, w13_weight: Tensor, w2_weight: Tensor, config: MoEConfig) -> None:
        width, hidden_size = config.moe_intermediate_size, config.hidden_size
        _check_shape("w13_weight", w13_weight, (2 * width, hidden_size))
        _check_shape("w2_weight", w2_weight, (hidden_size, width))
        if w13_weight.shape[0] != w2_weight.shape[0]:
            raise ValueError(
                f"w13_weight holds {w13_weight.shape[0]} experts and w2_weight "
                f"{w2_weight.shape[0]}; they must hold the same experts."
            )
        if w13_weight.dtype not in SUPPORTED_DTYPES or w2_weight.dtype != w13_weight.dtype:
            raise UnsupportedError(
                "Expert weights must both be bfloat16, float16 or float32, found "
                f"w13_weight {w13_weight.dtype} and w2_weight {w2_weight.dtype}."
            )
        self.w13_weight = w13_weight
        self.w2_weight = w2_weight
        self.num_slots: int = w13_weight.shape[0]
        self.device = w13_weight.device
        self.hidden_dtype = w13_weight.dtype
        is_fp16 = self.hidden_dtype is torch.float16
        self.activation_dtype = torch.float32 if is_fp16 else self.hidden_dtype

    def gate_up(self, slot: int, rows: Tensor, flag: Tensor | None = None) -> Tensor:
        return product(rows, self.w13_weight[slot], flag)

    def down(self, slot: int, rows: Tensor, flag: Tensor | None = None) -> Tensor:
        return product(rows, self.w2_weight[slot], flag)


def _check_shape(name: str, weight: Tensor, expert_shape: tuple[int, int]) -> None:
    if weight.dim() != 3 or tuple(weight.shape[1:]) != expert_shape:
        raise ValueError(
            f"{name} must be [num_local_experts, {expert_shape[0]}, {expert_shape[1]}], "
            f"found {list(weight.shape)}."
        )
