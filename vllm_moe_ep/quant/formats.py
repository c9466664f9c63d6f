"""One record per block-quantised format."""

from dataclasses import dataclass, replace

import torch

SCALE_FORMATS = ("float32", "ue8m0")
MAX_E4M3 = 448.0
# Accelerators with IEEE-style e4m3 read the codes above this as infinity or NaN.
MAX_E4M3_IEEE = 240.0
MAX_E2M1 = 6.0


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantFormat:
    """How numbers are stored: real = stored * scale of the block.

    Attributes:
        name: unique.
        dtype: float8_e4m3fn, or uint8 for packed FP4.
        block_size: (block_n, block_k); block_n 1 is per row (per token for activations).
        scale_fmt: "float32", or "ue8m0": byte b is 2**(b - 127), 255 is NaN.
        values_per_byte: 2 for packed FP4, the low nibble is the even element along k.
        max_value: largest number stored.
        round_trip_limit: rel-L2 of quantise-dequantise on normally distributed numbers.
        output_limit: rel-L2 of a layer's output against fp64 on the same quantised numbers.
    """

    name: str
    dtype: torch.dtype
    block_size: tuple[int, int]
    scale_fmt: str
    max_value: float
    round_trip_limit: float
    values_per_byte: int = 1
    output_limit: float = 1e-2

    @property
    def is_power_of_two(self) -> bool:
        return self.scale_fmt == "ue8m0"

    @property
    def is_fp4(self) -> bool:
        return self.values_per_byte == 2

    def with_max(self, max_value: float) -> "QuantFormat":
        """The same format for a device whose largest number is ``max_value``."""
        return replace(self, name=f"{self.name}_max{max_value:g}", max_value=max_value)


def _fp8(name: str, block_size: tuple[int, int], scale_fmt: str) -> QuantFormat:
    return QuantFormat(
        name=name,
        dtype=torch.float8_e4m3fn,
        block_size=block_size,
        scale_fmt=scale_fmt,
        max_value=MAX_E4M3,
        round_trip_limit=0.03,
    )


# Weights; and activations, whose blocks are (1, block_k).
FP8_128X128 = _fp8("fp8_128x128", (128, 128), "float32")
FP8_128X128_UE8M0 = _fp8("fp8_128x128_ue8m0", (128, 128), "ue8m0")
FP8_1X128 = _fp8("fp8_1x128", (1, 128), "float32")
FP8_1X128_UE8M0 = _fp8("fp8_1x128_ue8m0", (1, 128), "ue8m0")
FP8_1X32 = _fp8("fp8_1x32", (1, 32), "float32")
FP8_1X32_UE8M0 = _fp8("fp8_1x32_ue8m0", (1, 32), "ue8m0")
FP4_1X32 = QuantFormat(
    name="fp4_1x32",
    dtype=torch.uint8,
    block_size=(1, 32),
    scale_fmt="ue8m0",
    values_per_byte=2,
    max_value=MAX_E2M1,
    round_trip_limit=0.15,
)

FORMATS = {
    known.name: known
    for known in (
        FP8_128X128,
        FP8_128X128_UE8M0,
        FP8_1X128,
        FP8_1X128_UE8M0,
        FP8_1X32,
        FP8_1X32_UE8M0,
        FP4_1X32,
    )
}
