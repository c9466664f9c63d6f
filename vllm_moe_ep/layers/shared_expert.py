"""The shared experts of a layer, whole or as one rank's slice."""

from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_moe_ep_kernels.host.linear import linear
from vllm_moe_ep_kernels.host.swiglu import swiglu

SLICE_WIDTH = 128


@dataclass(frozen=True)
class SharedExpert:
    """All shared experts of a layer as one wide expert; every token passes through it.

    Attributes:
        w13_weight: [2 * width, hidden_size], gate rows first.
        w2_weight: [hidden_size, width].
        swiglu_limit: clamp of the activation, or None.
        is_partial: whether this is a slice, whose outputs must be summed over the replica group.
    """

    w13_weight: Tensor
    w2_weight: Tensor
    swiglu_limit: float | None = None
    is_partial: bool = False

    def __call__(self, hidden_states: Tensor) -> Tensor:
        """[num_tokens, hidden_size] -> the same shape, bf16 or fp32."""
        gate_up = linear(hidden_states, self.w13_weight)
        row_weight = torch.ones(len(gate_up), dtype=torch.float32, device=gate_up.device)
        activated = swiglu(gate_up, row_weight, self.swiglu_limit, gate_up.dtype)
        return linear(activated, self.w2_weight)


def slice_shared_expert(whole: SharedExpert, replica_size: int, replica_rank: int) -> SharedExpert:
    """This rank's slice of SLICE_WIDTH intermediate columns, or ``whole`` where slicing is off.

    Sliced when there are several replica ranks, the width is a multiple of SLICE_WIDTH and there
    are no more slices than ranks. Ranks past the last slice hold zeros of the same shape, so that
    all ranks trace one graph.
    """
    width = whole.w2_weight.shape[1]
    num_slices, rest = divmod(width, SLICE_WIDTH)
    if replica_size == 1 or rest or num_slices > replica_size:
        return whole
    gate, up = whole.w13_weight.split(width)
    # A rank past the last slice takes the first one's shape.
    start = replica_rank * SLICE_WIDTH if replica_rank < num_slices else 0
    columns = slice(start, start + SLICE_WIDTH)
    w13_weight = torch.cat([gate[columns], up[columns]])
    w2_weight = whole.w2_weight[:, columns].contiguous()
    if replica_rank >= num_slices:
        w13_weight, w2_weight = torch.zeros_like(w13_weight), torch.zeros_like(w2_weight)
    return SharedExpert(w13_weight, w2_weight, whole.swiglu_limit, is_partial=True)
