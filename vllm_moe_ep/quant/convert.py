"""Weights of a checkpoint, converted once for devices whose fp8 numbers end at 240."""

from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_moe_ep.errors import UnsupportedError
from vllm_moe_ep.quant.formats import MAX_E4M3, MAX_E4M3_IEEE
from vllm_moe_ep.quant.weight import Quantised
from vllm_moe_ep_kernels.reference.quantise import encode_fp8

_LARGEST_E8M0 = 254


@dataclass(frozen=True, slots=True)
class Converted:
    """Converted weights.

    Attributes:
        weight: the weights.
        num_inexact: how many numbers changed; NaN counts as equal to NaN.
    """

    weight: Quantised
    num_inexact: int


def fit_to_max(weight: Quantised, max_value: float, name: str, halve: bool = False) -> Converted:
    """fp8 weights whose codes stay within ``max_value`` (448 or 240).

    448 changes nothing. For 240, fp32 scales are multiplied by 448 / 240 and the numbers rounded
    to the smaller range. UE8M0 scales, and fp32 ones with ``halve``, are doubled instead: exact
    but for odd subnormal codes. FP4 weights fit anyway.

    Raises:
        UnsupportedError: another max_value, or a UE8M0 scale that cannot be doubled.
    """
    if max_value not in (MAX_E4M3, MAX_E4M3_IEEE):
        raise UnsupportedError(
            f"{name}: fp8 weights can be fitted to a largest number of {MAX_E4M3:g} or "
            f"{MAX_E4M3_IEEE:g}, found {max_value:g}."
        )
    if max_value == MAX_E4M3 or weight.values_per_byte == 2:
        return Converted(weight, 0)
    numbers = weight.values.to(torch.float32)
    if halve or weight.scale.dtype is not torch.float32:
        wanted, scale = numbers / 2, _doubled(weight.scale, name)
    else:
        wanted, scale = numbers * (max_value / MAX_E4M3), weight.scale * (MAX_E4M3 / max_value)
    values = encode_fp8(wanted, max_value)
    is_same = (values.to(torch.float32) == wanted) | wanted.isnan()
    return Converted(Quantised(values, scale, weight.block_size), int((~is_same).sum()))


def _doubled(scale: Tensor, name: str) -> Tensor:
    if scale.dtype is torch.float32:
        return scale * 2
    codes = scale.view(torch.uint8)
    if (codes == _LARGEST_E8M0).any():
        raise UnsupportedError(
            f"{name}: a UE8M0 scale of 2**127 cannot be doubled for a largest number of 240."
        )
    # 255, NaN, stays itself.
    return (codes + (codes < _LARGEST_E8M0).to(torch.uint8)).view(scale.dtype)
