"""The shared experts of a layer, whole or as one rank's slice."""

import logging
import math
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from vllm_moe_ep.collectives import Collectives
from vllm_moe_ep.layers.products import Matrix, product
from vllm_moe_ep.layers.row_parts import row_parts, rows_at_once
from vllm_moe_ep.quant.cast import quantise_dequantise
from vllm_moe_ep.quant.formats import QuantFormat
from vllm_moe_ep.quant.weight import Quantised
from vllm_moe_ep_kernels.host.swiglu import swiglu

SLICE_WIDTH = 128

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SharedExpert:
    """All shared experts of a layer as one wide expert; every token passes through it.

    Attributes:
        w13_weight: [2 * width, hidden_size], gate rows first; float or quantised.
        w2_weight: [hidden_size, width], likewise.
        swiglu_limit: clamp of the activation, or None.
        is_partial: whether this is a slice, whose outputs must be summed over the replica group.
        activation: with quantised weights, the format that rows are cast to before each product;
            None: rows stay as they are.
    """

    w13_weight: Matrix
    w2_weight: Matrix
    swiglu_limit: float | None = None
    is_partial: bool = False
    activation: QuantFormat | None = None

    def __post_init__(self) -> None:
        if self.activation is not None and isinstance(self.w13_weight, Tensor):
            raise ValueError(
                f"Rows are cast to {self.activation.name} for quantised weights only, but the "
                f"shared expert's are {self.w13_weight.dtype}; give no activation format."
            )

    @property
    def width(self) -> int:
        return self.w13_weight.shape[0] // 2

    def __call__(self, hidden_states: Tensor) -> Tensor:
        """[num_tokens, hidden_size] -> the same shape, bf16 or fp32."""
        parts = row_parts(len(hidden_states), rows_at_once(self.width))
        outputs = [self._compute(hidden_states[part]) for part in parts[:1] or [slice(0)]]
        if len(parts) <= 1:
            return outputs[0]
        total = outputs[0].new_empty(hidden_states.shape)
        total[parts[0]] = outputs.pop()
        for part in parts[1:]:
            total[part] = self._compute(hidden_states[part])
        return total

    def _compute(self, hidden_states: Tensor) -> Tensor:
        gate_up = product(self._cast(hidden_states), self.w13_weight)
        row_weight = torch.ones(len(gate_up), dtype=torch.float32, device=gate_up.device)
        activated = swiglu(gate_up, row_weight, self.swiglu_limit, gate_up.dtype)
        return product(self._cast(activated), self.w2_weight)

    def _cast(self, rows: Tensor) -> Tensor:
        if self.activation is not None:
            return quantise_dequantise(rows, self.activation)
        is_fp16 = rows.dtype is torch.float16
        return rows.to(torch.float32) if is_fp16 else rows


def why_not_sliced(width: int, replica_size: int, is_enabled: bool = True) -> str | None:
    """Why a shared expert of this width stays whole on each of ``replica_size`` ranks, or None."""
    if not is_enabled:
        return "slices of the shared expert are switched off"
    if replica_size == 1:
        return "the tokens are not replicated, so there is one rank and nothing to share out"
    num_slices, rest = divmod(width, SLICE_WIDTH)
    if rest:
        return f"its width {width} is not a multiple of {SLICE_WIDTH}"
    if num_slices > replica_size:
        return (
            f"its width {width} makes {num_slices} slices of {SLICE_WIDTH} columns, more than the "
            f"{replica_size} ranks"
        )
    return None


@cache
def _log_whole_shared_expert(reason: str) -> None:
    logger.info("Each rank computes the whole shared expert: %s.", reason)


def prepare_shared(
    whole: SharedExpert, collectives: Collectives, is_enabled: bool = True
) -> SharedExpert:
    """This rank's part of the layer's shared experts, to be made once when weights are loaded.

    A slice where ``why_not_sliced`` has no objection, and else ``whole``: the log says why.
    ``refresh_slice`` brings later weights into it.
    """
    reason = why_not_sliced(whole.width, collectives.replica_size, is_enabled)
    if reason is not None:
        _log_whole_shared_expert(reason)
        return whole
    return slice_shared_expert(whole, collectives.replica_size, collectives.replica_rank)


def slice_shared_expert(
    whole: SharedExpert, replica_size: int, replica_rank: int, is_enabled: bool = True
) -> SharedExpert:
    """This rank's slice of SLICE_WIDTH intermediate columns, or ``whole``: see ``why_not_sliced``.

    Ranks past the last slice hold zeros of the same shape, with scales of 1 where quantised, so
    that all ranks trace one graph. A slice may start inside a scale block. Its weights are copies:
    see ``refresh_slice``.
    """
    if why_not_sliced(whole.width, replica_size, is_enabled) is not None:
        return whole
    is_empty = replica_rank * SLICE_WIDTH >= whole.width
    # A rank past the last slice takes the first one's shape.
    w13_weight, w2_weight = _cut(whole, 0 if is_empty else replica_rank * SLICE_WIDTH)
    if is_empty:
        w13_weight, w2_weight = _zeros_like(w13_weight), _zeros_like(w2_weight)
    return replace(whole, w13_weight=w13_weight, w2_weight=w2_weight, is_partial=True)


def refresh_slice(
    part: SharedExpert, whole: SharedExpert, replica_size: int, replica_rank: int
) -> None:
    """Bring the present weights of ``whole`` into its slice, in place: graphs hold the tensors.

    Does nothing where ``part`` is no slice, since that holds the weights themselves.
    """
    if not part.is_partial:
        return
    fresh = slice_shared_expert(whole, replica_size, replica_rank)
    _overwrite(part.w13_weight, fresh.w13_weight)
    _overwrite(part.w2_weight, fresh.w2_weight)


def _overwrite(old: Matrix, new: Matrix) -> None:
    if isinstance(old, Quantised) and isinstance(new, Quantised):
        old.values.copy_(new.values)
        old.scale.copy_(new.scale)
    elif isinstance(old, Tensor) and isinstance(new, Tensor):
        old.copy_(new)
    else:
        raise ValueError(
            f"A slice of {_kind(old)} weights cannot take {_kind(new)} ones: prepare it anew."
        )


def _kind(matrix: Matrix) -> str:
    return "float" if isinstance(matrix, Tensor) else "quantised"


def _cut(whole: SharedExpert, start: int) -> tuple[Matrix, Matrix]:
    """The slice's gate and up rows, and its columns of down."""
    stop, width = start + SLICE_WIDTH, whole.width
    w13, w2 = whole.w13_weight, whole.w2_weight
    if isinstance(w13, Tensor):
        gate, up = w13[start:stop], w13[width + start : width + stop]
        w13_part: Matrix = torch.cat([gate, up])
    else:
        w13_part = w13.rows(start, stop).followed_by(w13.rows(width + start, width + stop))
    if isinstance(w2, Tensor):
        return w13_part, w2[:, start:stop].contiguous()
    # A block starts with every slice, so that all ranks have scales of one shape. Joining gate
    # and up did as much.
    block_n, block_k = w2.block_size
    w2 = w2.refined(block_n, math.gcd(SLICE_WIDTH, block_k))
    return w13_part, w2.columns(start, stop).contiguous()


def _zeros_like(matrix: Matrix) -> Matrix:
    return torch.zeros_like(matrix) if isinstance(matrix, Tensor) else matrix.zeros_like()
