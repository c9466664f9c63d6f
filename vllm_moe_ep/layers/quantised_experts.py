"""Expert weights in block-quantised formats, dequantised a tile at a time as they are used."""

import torch
from torch import Tensor

from vllm_moe_ep.config import MoEConfig
from vllm_moe_ep.errors import UnsupportedError
from vllm_moe_ep.layers.expert_weights import SUPPORTED_DTYPES
from vllm_moe_ep.layers.products import block_product
from vllm_moe_ep.quant.cast import quantise_dequantise
from vllm_moe_ep.quant.formats import FORMATS, FP4_1X32, QuantFormat
from vllm_moe_ep.quant.weight import Quantised

_FP8_BLOCK_SIZES = sorted(
    {known.block_size for known in FORMATS.values() if known.dtype is torch.float8_e4m3fn}
)


class QuantisedExperts:
    """The products of ``ExpertLinears`` for quantised weights.

    Weights and scales are held by reference; but the scales of w13 are copied where
    moe_intermediate_size is not a multiple of block_n.

    With ``activation`` None rows stay as they are, and a tile of the weights is dequantised to
    their dtype: bf16 for bf16 hidden states, else fp32. With a format, rows are cast to it before
    each product, block by block along the row, and everything is summed in fp32. ``gate_up`` gets
    its rows already cast (see ``CastingExperts``), ``down`` casts its own.

    Args:
        w13_weight: [num_slots, 2 * moe_intermediate_size, hidden_size] numbers, gate rows first.
        w13_scale: their scales; gate and up each start with a block of their own.
        w2_weight: [num_slots, hidden_size, moe_intermediate_size] numbers.
        w2_scale: their scales.
        config: the layer's shape.
        block_size: (block_n, block_k) of the weights.
        activation: an fp8 format with a scale per row and block, or None.
        hidden_dtype: dtype of the hidden states.

    Raises:
        ValueError: shapes do not fit the config or each other.
        UnsupportedError: the activation format or hidden_dtype is not one of those.
    """

    def __init__(
        self,
        w13_weight: Tensor,
        w13_scale: Tensor,
        w2_weight: Tensor,
        w2_scale: Tensor,
        config: MoEConfig,
        block_size: tuple[int, int],
        activation: QuantFormat | None,
        hidden_dtype: torch.dtype,
    ) -> None:
        _check_activation(activation, hidden_dtype)
        _check_shapes(w13_weight, w2_weight, config)
        self.w13 = Quantised.of_halves(w13_weight, w13_scale, block_size)
        self.w2 = Quantised(w2_weight, w2_scale, block_size)
        self.activation = activation
        self.num_slots: int = w2_weight.shape[0]
        self.device = w2_weight.device
        self.hidden_dtype = hidden_dtype
        # fp32 between the products too: rounded to bf16 first, some numbers would be cast to the
        # neighbouring fp8 code.
        is_bf16 = activation is None and hidden_dtype is torch.bfloat16
        self.activation_dtype = torch.bfloat16 if is_bf16 else torch.float32

    def gate_up(self, slot: int, rows: Tensor, flag: Tensor | None = None) -> Tensor:
        return self._product(self.w13, slot, rows, flag)

    def down(self, slot: int, rows: Tensor, flag: Tensor | None = None) -> Tensor:
        cast = rows if self.activation is None else quantise_dequantise(rows, self.activation)
        return self._product(self.w2, slot, cast, flag)

    def _product(self, matrix: Quantised, slot: int, rows: Tensor, flag: Tensor | None) -> Tensor:
        values, scale = matrix.values[slot], matrix.scale[slot]
        return block_product(rows, values, scale, matrix.block_size, flag)


class BlockFp8Experts(QuantisedExperts):
    """fp8 e4m3 weights with a scale per block.

    Args:
        w13_weight: float8_e4m3fn [num_slots, 2 * moe_intermediate_size, hidden_size], gate first.
        w13_scale: [num_slots, 2 * ceil(moe_intermediate_size / block_n), ceil(hidden_size /
            block_k)] multipliers, fp32, float8_e8m0fnu or uint8 UE8M0; gate and up each start
            with a block of their own.
        w2_weight: float8_e4m3fn [num_slots, hidden_size, moe_intermediate_size].
        w2_scale: [num_slots, ceil(hidden_size / block_n), ceil(moe_intermediate_size / block_k)].
        config: the layer's shape.
        block_size: (block_n, block_k): 128 x 128, 1 x 128 or 1 x 32.
        activation, hidden_dtype: see ``QuantisedExperts``.

    Raises:
        ValueError: shapes do not fit the config or each other.
        UnsupportedError: a dtype, block size or activation format is not supported.
    """

    def __init__(
        self,
        w13_weight: Tensor,
        w13_scale: Tensor,
        w2_weight: Tensor,
        w2_scale: Tensor,
        config: MoEConfig,
        block_size: tuple[int, int] = (128, 128),
        activation: QuantFormat | None = None,
        hidden_dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        _check_dtype("fp8", torch.float8_e4m3fn, w13_weight, w2_weight)
        if block_size not in _FP8_BLOCK_SIZES:
            raise UnsupportedError(
                f"fp8 weights may have blocks of {_list(_FP8_BLOCK_SIZES)}, found "
                f"{_list([block_size])}."
            )
        weights = w13_weight, w13_scale, w2_weight, w2_scale
        super().__init__(*weights, config, block_size, activation, hidden_dtype)


class Fp4Experts(QuantisedExperts):
    """FP4 e2m1 weights, two a byte with the even element in the low nibble, 1 x 32 UE8M0 scales.

    Args:
        w13_weight: uint8 [num_slots, 2 * moe_intermediate_size, hidden_size / 2], gate first.
        w13_scale: uint8 (or float8_e8m0fnu) [num_slots, 2 * moe_intermediate_size, ceil(
            hidden_size / 32)].
        w2_weight: uint8 [num_slots, hidden_size, moe_intermediate_size / 2].
        w2_scale: [num_slots, hidden_size, ceil(moe_intermediate_size / 32)].
        config: the layer's shape.
        activation, hidden_dtype: see ``QuantisedExperts``.

    Raises:
        ValueError: shapes do not fit the config or each other.
        UnsupportedError: a dtype or activation format is not supported.
    """

    def __init__(
        self,
        w13_weight: Tensor,
        w13_scale: Tensor,
        w2_weight: Tensor,
        w2_scale: Tensor,
        config: MoEConfig,
        activation: QuantFormat | None = None,
        hidden_dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        _check_dtype("packed FP4", torch.uint8, w13_weight, w2_weight)
        for name, scale in (("w13_scale", w13_scale), ("w2_scale", w2_scale)):
            if scale.dtype not in (torch.uint8, torch.float8_e8m0fnu):
                raise UnsupportedError(
                    f"FP4 weights have UE8M0 scales, uint8 or float8_e8m0fnu; {name} is "
                    f"{scale.dtype}."
                )
        weights = w13_weight, w13_scale, w2_weight, w2_scale
        super().__init__(*weights, config, FP4_1X32.block_size, activation, hidden_dtype)


def _check_activation(activation: QuantFormat | None, hidden_dtype: torch.dtype) -> None:
    if hidden_dtype not in SUPPORTED_DTYPES:
        raise UnsupportedError(
            f"hidden_dtype must be bfloat16, float16 or float32, found {hidden_dtype}."
        )
    if activation is None:
        return
    if activation.dtype is not torch.float8_e4m3fn or activation.block_size[0] != 1:
        raise UnsupportedError(
            "Activations can be cast to fp8 with a scale per token and 32 or 128 channels, found "
            f"the format {activation.name}."
        )


def _check_dtype(kind: str, dtype: torch.dtype, w13_weight: Tensor, w2_weight: Tensor) -> None:
    if w13_weight.dtype is not dtype or w2_weight.dtype is not dtype:
        raise UnsupportedError(
            f"{kind} expert weights must both be {dtype}, found w13_weight {w13_weight.dtype} and "
            f"w2_weight {w2_weight.dtype}."
        )


def _check_shapes(w13_weight: Tensor, w2_weight: Tensor, config: MoEConfig) -> None:
    width, hidden_size = config.moe_intermediate_size, config.hidden_size
    per_byte = 2 if w2_weight.dtype is torch.uint8 else 1
    for name, weight, n, k in (
        ("w13_weight", w13_weight, 2 * width, hidden_size),
        ("w2_weight", w2_weight, hidden_size, width),
    ):
        if k % per_byte:
            raise ValueError(f"{name} holds {k} columns, two a byte: their number must be even.")
        if weight.dim() != 3 or list(weight.shape[1:]) != [n, k // per_byte]:
            raise ValueError(
                f"{name} must be [num_local_experts, {n}, {k // per_byte}], found "
                f"{list(weight.shape)}."
            )
    if w13_weight.shape[0] != w2_weight.shape[0]:
        raise ValueError(
            f"w13_weight holds {w13_weight.shape[0]} experts and w2_weight {w2_weight.shape[0]}; "
            "they must hold the same experts."
        )


def _list(block_sizes: list[tuple[int, int]]) -> str:
    return ", ".join(f"{block_n}x{block_k}" for block_n, block_k in block_sizes)
