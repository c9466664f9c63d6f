"""Quantised weights and their block scales in the form that a device's kernels read.

SM90 reads fp32 scales, plain and contiguous. SM100 reads powers of two (UE8M0), one per weight
row, packed four to an int32 along K. Which of the two a checkpoint holds is told by its values,
not by the `scale_fmt` of its configuration, which many leave out.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_moe_ep.errors import UnsupportedError
from vllm_moe_ep.quant.formats import MAX_E4M3
from vllm_moe_ep_kernels.reference.dequantise import decode_e8m0, expand_blocks
from vllm_moe_ep_kernels.reference.quantise import encode_fp8, power_of_two, round_up_exponent
from vllm_moe_ep_kernels.reference.scale_layout import pack_ue8m0

FP8_BLOCKS = ((128, 128), (1, 128))
FP4_GROUP_SIZE = 32
_NAN_BYTE = 255
# The largest that an e8m0 byte holds.
_LARGEST_SCALE = 2.0**127


@dataclass(frozen=True, slots=True)
class ScaledWeight:
    """values * scale is the weight.

    Attributes:
        values: [..., n, k] float8_e4m3fn; for fp4 [..., n, k / 2], two values to a byte.
        scale: "float32": [..., ceil(n / block_n), k / 128]. "ue8m0_packed": int32
            [..., n, ceil(groups / 4)], MN-major.
        scale_fmt: "float32" or "ue8m0_packed".
        block_n: weight rows per scale row in this form; 1 where packed.
    """

    values: Tensor
    scale: Tensor
    scale_fmt: str
    block_n: int


def prepare_fp8_weight(
    name: str,
    values: Tensor,
    scale: Tensor,
    block_size: tuple[int, int],
    major: int,
    requantise: bool = False,
) -> ScaledWeight:
    """Check an fp8 weight and bring its scales into the device's form. At load, not in a step.

    Args:
        name: of the weight, for errors.
        values: float8_e4m3fn [..., n, k].
        scale: [..., ceil(n / block_n), ceil(k / block_k)]: fp32, or e8m0 as float8_e8m0fnu or
            uint8. Multipliers: weight = values * scale.
        block_size: (block_n, block_k), one of FP8_BLOCKS.
        major: compute capability, 9 or 10.
        requantise: on SM100, round fp32 scales up to powers of two and encode the values anew,
            which changes the weights once more by as much as fp8 did (rel-L2 0.026 on average,
            at most 0.04); only where the user asks for it.

    Raises:
        UnsupportedError: the format does not run there; names the remedy.
        ValueError: shape or values of the scales are wrong; names the tensor.
    """
    if values.dtype != torch.float8_e4m3fn:
        raise UnsupportedError(f"{name} must be float8_e4m3fn, found {values.dtype}.")
    if tuple(block_size) not in FP8_BLOCKS:
        raise UnsupportedError(
            f"{name} has scales for blocks of {tuple(block_size)}; DeepGEMM takes 128x128 and "
            "1x128."
        )
    _check_scale_shape(name, values, scale, block_size)
    if scale.dtype == torch.float32:
        _check_float_values(name, scale)
    else:
        scale = _ue8m0_bytes(name, scale)
    if major == 9:
        return ScaledWeight(values, _as_float32(scale), "float32", block_size[0])
    if scale.dtype == torch.float32:
        exponent = round_up_exponent(scale)
        rounded = power_of_two(exponent)
        if not torch.equal(rounded, scale):
            if not requantise:
                raise UnsupportedError(_plain_scales_message(name))
            values = _rescaled(values, scale / rounded, block_size)
        scale = exponent.to(torch.uint8)
    per_row = scale.repeat_interleave(block_size[0], dim=-2)[..., : values.shape[-2], :]
    return ScaledWeight(values, pack_ue8m0(per_row), "ue8m0_packed", 1)


def prepare_fp4_weight(name: str, values: Tensor, scale: Tensor, major: int) -> ScaledWeight:
    """As `prepare_fp8_weight`, for fp4 values with one e8m0 scale per row and 32 columns.

    Args:
        values: int8 or uint8 [..., n, k / 2], two e2m1 values to a byte.
        scale: float8_e8m0fnu or uint8 [..., n, k / 32].

    Raises:
        UnsupportedError: the device is not SM100, or a dtype differs.
        ValueError: shape or values of the scales are wrong.
    """
    if major != 10:
        raise UnsupportedError(
            f"{name} is fp4, which DeepGEMM multiplies on SM100 only, not on SM{major}0: use "
            "--moe-backend marlin."
        )
    if values.dtype not in (torch.int8, torch.uint8):
        raise UnsupportedError(f"{name} must be int8 or uint8, found {values.dtype}.")
    _check_scale_shape(name, values, scale, (1, FP4_GROUP_SIZE // 2))
    return ScaledWeight(values, pack_ue8m0(_ue8m0_bytes(name, scale)), "ue8m0_packed", 1)


def _check_scale_shape(
    name: str, values: Tensor, scale: Tensor, block_size: tuple[int, int]
) -> None:
    *batch, num_rows, width = values.shape
    expected = [*batch, -(-num_rows // block_size[0]), -(-width // block_size[1])]
    if list(scale.shape) != expected:
        raise ValueError(
            f"The scale of {name} {list(values.shape)} must be {expected}, one per block, found "
            f"{list(scale.shape)}: drop padding rows and columns before."
        )
    if not scale.is_contiguous():
        raise ValueError(
            f"The scale of {name} must be contiguous, found strides {scale.stride()}: hand it "
            "over as loaded, without padding or transposing."
        )


def _check_float_values(name: str, scale: Tensor) -> None:
    # The comparison is False for NaN too.
    bad = ~((scale > 0) & (scale <= _LARGEST_SCALE))
    if bool(bad.any()):
        first = bad.nonzero()[0].tolist()
        raise ValueError(
            f"Each scale of {name} must be greater than 0 and at most 2**127; {int(bad.sum())} "
            f"are not, the first at {first}: {scale[tuple(first)].item()}. The checkpoint is "
            "damaged, or a tensor was not loaded."
        )


def _ue8m0_bytes(name: str, scale: Tensor) -> Tensor:
    if scale.dtype not in (torch.uint8, torch.float8_e8m0fnu):
        raise UnsupportedError(
            f"The scale of {name} must be float8_e8m0fnu, uint8 (e8m0 bytes), or for fp8 float32, "
            f"found {scale.dtype}."
        )
    encoded = scale.view(torch.uint8)
    if bool((encoded == _NAN_BYTE).any()):
        raise ValueError(f"The scale of {name} holds NaN (e8m0 byte 255): not a valid checkpoint.")
    return encoded


def _as_float32(scale: Tensor) -> Tensor:
    return scale if scale.dtype == torch.float32 else decode_e8m0(scale)


def _plain_scales_message(name: str) -> str:
    return (
        f"{name} has fp32 scales that are no powers of two, which SM100 cannot read; rounding "
        "them alone would change the weights. Use a checkpoint with UE8M0 scales, let the layer "
        "requantise this one, or use --moe-backend auto."
    )


def _rescaled(values: Tensor, factor: Tensor, block_size: tuple[int, int]) -> Tensor:
    """fp8 values times their block's factor of at most 1, rounded once."""
    matrices = values.reshape(-1, *values.shape[-2:])
    factors = factor.reshape(-1, *factor.shape[-2:])
    rescaled = torch.empty_like(matrices)
    # One matrix at a time: all experts in fp32 would need four times the weights' memory.
    for matrix, per_block, output in zip(matrices, factors, rescaled, strict=True):
        per_value = expand_blocks(per_block, block_size, *matrix.shape)
        output.copy_(encode_fp8(matrix.to(torch.float32) * per_value, MAX_E4M3))
    return rescaled.view(values.shape)
