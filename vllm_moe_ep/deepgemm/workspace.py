"""The memory of one pass over the experts: parts of a single block."""

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

# What allocators of GPU memory align to; more than TMA asks for.
_ALIGNMENT = 256


def block_bytes(sizes: Sequence[int]) -> int:
    """Bytes of a block with parts of `sizes` bytes."""
    return sum(map(_aligned, sizes))


def split_block(sizes: Sequence[int], device: torch.device) -> list[Tensor]:
    """Parts of one new block, uint8, each on an aligned start.

    One allocation a pass, of a size that follows from the step's rows alone, leaves less behind
    in torch's cache than one for each buffer.
    """
    block = torch.empty(block_bytes(sizes), dtype=torch.uint8, device=device)
    parts, start = [], 0
    for size in sizes:
        parts.append(block[start : start + size])
        start += _aligned(size)
    return parts


def rows_in(part: Tensor, num_rows: int, width: int, dtype: torch.dtype) -> Tensor:
    """[num_rows, width] at the start of a part."""
    return part[: num_rows * width * dtype.itemsize].view(dtype).view(num_rows, width)


def columns_in(part: Tensor, num_rows: int, width: int, stride: int) -> Tensor:
    """fp32 [num_rows, width] at the start of a part, one column after the other."""
    numbers = part[: stride * width * 4].view(torch.float32)
    return numbers.as_strided((num_rows, width), (1, stride))


def passes(num_rows: int, max_rows: int) -> Iterator[slice]:
    """As few parts of at most `max_rows` rows as there can be, of one size but for the last."""
    size = math.ceil(num_rows / math.ceil(num_rows / max_rows))
    for start in range(0, num_rows, size):
        yield slice(start, min(start + size, num_rows))


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
