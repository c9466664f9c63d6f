"""Sums and the overflow flag over ranks."""

import torch
import torch.nn.functional as F
from torch import Tensor

from vllm_moe_ep.collectives import Collectives
from vllm_moe_ep.stages import ExpertOutput


def combine_overflow(overflow: Tensor, collectives: Collectives) -> Tensor:
    """1 on every rank where any rank's expert overflowed."""
    return collectives.all_reduce_max(overflow)


def reduce_with_flag(output: ExpertOutput, collectives: Collectives) -> ExpertOutput:
    """Sum over the replica group; the overflow flag becomes equal on every rank.

    Where the tokens are replicated over all ranks, the flag travels as one more row of the sum: a
    collective of its own would cost a full latency.
    """
    if output.overflow is None:
        return ExpertOutput(collectives.all_reduce(output.values))
    if collectives.token_size > 1:
        overflow = combine_overflow(output.overflow, collectives)
        return ExpertOutput(collectives.all_reduce(output.values), overflow)
    hidden_size = output.values.shape[1]
    flag_row = F.pad(output.overflow.to(torch.float32)[None], (0, hidden_size - 1))
    if output.with_spare_row is None:
        flagged = torch.cat([output.values, flag_row])
    else:
        flagged = output.with_spare_row
        flagged[-1:].copy_(flag_row)
    summed = collectives.all_reduce(flagged)
    overflow = (summed[-1, :1] > 0).to(torch.int32)
    return ExpertOutput(summed[:-1], overflow)
