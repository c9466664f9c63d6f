"""Block-quantised formats from their definitions, in fp64. Imports nothing of the project."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


def _e4m3(code: int) -> float:
    sign, exponent, mantissa = -1.0 if code & 0x80 else 1.0, (code >> 3) & 0xF, code & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return sign * (8 + mantissa) * 2.0 ** (exponent - 10)


def _e2m1(code: int) -> float:
    sign, exponent, mantissa = -1.0 if code & 8 else 1.0, (code >> 1) & 3, code & 1
    return sign * (mantissa / 2 if exponent == 0 else (2 + mantissa) * 2.0 ** (exponent - 2))


def _e8m0(code: int) -> float:
    return math.nan if code == 255 else 2.0 ** (code - 127)


E4M3 = torch.tensor([_e4m3(code) for code in range(256)], dtype=torch.float64)
E2M1 = torch.tensor([_e2m1(code) for code in range(16)], dtype=torch.float64)
E8M0 = torch.tensor([_e8m0(code) for code in range(256)], dtype=torch.float64)


@dataclass(frozen=True)
class Blocks:
    """How a tensor is quantised."""

    block_n: int
    block_k: int
    max_value: float
    is_power_of_two: bool
    is_fp4: bool


def numbers_of(values: Tensor) -> Tensor:
    """fp64 numbers behind fp8 or packed FP4 values, without scales."""
    if values.dtype is not torch.uint8:
        return E4M3[values.view(torch.uint8).long()]
    numbers = torch.empty(*values.shape[:-1], 2 * values.shape[-1], dtype=torch.float64)
    numbers[..., 0::2] = E2M1[values.long() % 16]
    numbers[..., 1::2] = E2M1[values.long() // 16]
    return numbers


def dequantise(values: Tensor, scale: Tensor, block_n: int, block_k: int) -> Tensor:
    """fp64 [..., n, k], exact."""
    if scale.dtype is not torch.float32:
        scale = E8M0[scale.view(torch.uint8).long()]
    numbers = numbers_of(values)
    rows = torch.arange(numbers.shape[-2]) // block_n
    columns = torch.arange(numbers.shape[-1]) // block_k
    return numbers * scale.double()[..., rows, :][..., columns]


def block_scale(block: Tensor, blocks: Blocks) -> float:
    """Scale of one block of finite numbers, as fp64."""
    quotient = block.double().abs().max().item() / blocks.max_value
    if blocks.is_power_of_two:
        mantissa, exponent = math.frexp(quotient)
        return 2.0 ** max(-126, exponent - 1 if mantissa == 0.5 else exponent)
    return max(2.0**-126, torch.tensor(quotient, dtype=torch.float64).float().item())


def nearest(numbers: Tensor, max_value: float, is_fp4: bool) -> Tensor:
    """fp64 [n, k]: the nearest number of the format, ties to the even code."""
    table = E2M1[:8] if is_fp4 else E4M3[:127]
    table = table[table <= max_value]
    distance = (numbers.abs().unsqueeze(-1) - table).abs()
    is_nearest = distance == distance.min(dim=-1, keepdim=True).values
    # Of two nearest codes exactly one is even: prefer it.
    preference = is_nearest * (1 + (torch.arange(len(table)) % 2 == 0).int())
    return torch.copysign(table[preference.argmax(dim=-1)], numbers)


def quantise_dequantise(values: Tensor, blocks: Blocks) -> Tensor:
    """fp64 [n, k] numbers that the format keeps of [n, k] finite ones."""
    values = values.double()
    kept = torch.empty_like(values)
    for row in range(0, values.shape[0], blocks.block_n):
        for column in range(0, values.shape[1], blocks.block_k):
            span = slice(row, row + blocks.block_n), slice(column, column + blocks.block_k)
            scale = block_scale(values[span], blocks)
            # The quotient is an fp32 number before it is rounded to the format.
            quotient = (values[span] / scale).float().double()
            kept[span] = scale * nearest(quotient, blocks.max_value, blocks.is_fp4)
    return kept
