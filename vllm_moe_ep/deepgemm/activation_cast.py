"""How activations are quantised for a weight format on a device."""

from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_moe_ep.errors import UnsupportedError
from vllm_moe_ep.quant.cast import quantise
from vllm_moe_ep.quant.formats import (
    FP8_1X32_UE8M0,
    FP8_1X128,
    FP8_1X128_UE8M0,
    QuantFormat,
)
from vllm_moe_ep_kernels.reference.scale_layout import pack_ue8m0


@dataclass(frozen=True, slots=True)
class ScaledRows:
    """values * scale is about the activation.

    Attributes:
        values: float8_e4m3fn [rows, k].
        scale: fp32 [rows, groups], contiguous; or UE8M0 packed, int32 [rows, ceil(groups / 4)],
            MN-major.
    """

    values: Tensor
    scale: Tensor


_FORMATS = {
    ("fp4", "ue8m0", 10): FP8_1X32_UE8M0,
    ("fp8", "ue8m0", 10): FP8_1X128_UE8M0,
    ("fp8", "ue8m0", 9): FP8_1X128,
    ("fp8", "float32", 9): FP8_1X128,
}


def activation_format(weight_format: str, weight_scale_fmt: str, major: int) -> QuantFormat:
    """What activations become for weights of a format ("fp8", "fp4", with "float32" or "ue8m0"
    scales) on SM`major`0.

    Raises:
        UnsupportedError: DeepGEMM multiplies no such weights there.
    """
    found = _FORMATS.get((weight_format, weight_scale_fmt, major))
    if found is None:
        known = ", ".join(f"{form} with {scale} scales on SM{sm}0" for form, scale, sm in _FORMATS)
        raise UnsupportedError(
            f"DeepGEMM has no kernel for {weight_format} weights with {weight_scale_fmt} scales "
            f"on SM{major}0. It takes {known}."
        )
    return found


def cast_activation(rows: Tensor, fmt: QuantFormat) -> ScaledRows:
    """bf16 rows [rows, k] in fp8, UE8M0 scales rounded up first and then packed.

    A group with NaN or infinity gets the scale NaN, and no other group changes.

    Raises:
        UnsupportedError: the rows are not bf16.
    """
    check_activation_dtype(rows)
    cast = quantise(rows, fmt)
    return ScaledRows(cast.values, _device_scale(cast.scale, fmt))


def cast_and_gather(rows: Tensor, row_index: Tensor, fmt: QuantFormat) -> ScaledRows:
    """``cast_activation(rows[row_index], fmt)``, with each row cast once.

    Args:
        row_index: int64 [gathered rows].
    """
    check_activation_dtype(rows)
    cast = quantise(rows, fmt)
    values = cast.values.view(torch.uint8)[row_index].view(cast.values.dtype)
    return ScaledRows(values, _device_scale(cast.scale[row_index], fmt))


def check_activation_dtype(rows: Tensor) -> None:
    """DeepGEMM's experts take bf16.

    Raises:
        UnsupportedError: the rows are something else.
    """
    if rows.dtype != torch.bfloat16:
        raise UnsupportedError(
            f"DeepGEMM's experts take bfloat16 activations, found {rows.dtype}: serve with "
            "--dtype bfloat16."
        )


def _device_scale(scale: Tensor, fmt: QuantFormat) -> Tensor:
    return pack_ue8m0(scale) if fmt.is_power_of_two else scale
