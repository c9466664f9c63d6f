"""Numbers held in a block-quantised format, and views of parts of them."""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

SCALE_DTYPES = (torch.float32, torch.float8_e8m0fnu, torch.uint8)
_E8M0_ONE = 127


@dataclass(frozen=True, slots=True)
class Quantised:
    """A block-quantised tensor [..., n, k]: real = stored * scale of the block.

    Attributes:
        values: float8_e4m3fn [..., n, k], or uint8 [..., n, k / 2] with two FP4 codes a byte.
        scale: [..., ceil(n / block_n), ceil(k / block_k)]: fp32, float8_e8m0fnu, or uint8 UE8M0.
        block_size: (block_n, block_k).

    Raises:
        ValueError: dtypes or shapes do not fit; says what was wanted and found.
    """

    values: Tensor
    scale: Tensor
    block_size: tuple[int, int]

    def __post_init__(self) -> None:
        if self.values.dtype not in (torch.float8_e4m3fn, torch.uint8):
            raise ValueError(
                "Quantised values must be float8_e4m3fn, or uint8 with two FP4 codes a byte; "
                f"found {self.values.dtype}."
            )
        if self.scale.dtype not in SCALE_DTYPES:
            raise ValueError(
                "Scales must be float32, float8_e8m0fnu or uint8 (UE8M0 bytes), found "
                f"{self.scale.dtype}."
            )
        block_n, block_k = self.block_size
        n, k = self.shape[-2:]
        wanted = [*self.values.shape[:-2], -(-n // block_n), -(-k // block_k)]
        if list(self.scale.shape) != wanted:
            raise ValueError(
                f"Numbers of shape {list(self.shape)} in blocks of {block_n} x {block_k} need "
                f"scales of shape {wanted}, found {list(self.scale.shape)}."
            )

    @classmethod
    def of_halves(cls, values: Tensor, scale: Tensor, block_size: tuple[int, int]) -> "Quantised":
        """Gate rows above as many up rows, where each half starts with a block of its own.

        Args:
            values: [..., 2 * width, k] numbers.
            scale: [..., 2 * ceil(width / block_n), ceil(k / block_k)].
            block_size: (block_n, block_k); shortened where width is no multiple of block_n.
        """
        width = values.shape[-2] // 2
        block_n, block_k = block_size
        if width % block_n == 0:
            return cls(values, scale, block_size)
        num_blocks = -(-width // block_n)
        gate = cls(values[..., :width, :], scale[..., :num_blocks, :], block_size)
        up = cls(values[..., width:, :], scale[..., num_blocks:, :], block_size)
        shared = math.gcd(width, block_n)
        scales = [half.refined(shared, block_k).scale for half in (gate, up)]
        return cls(values, torch.cat(scales, dim=-2), (shared, block_k))

    @property
    def values_per_byte(self) -> int:
        return 2 if self.values.dtype is torch.uint8 else 1

    @property
    def shape(self) -> torch.Size:
        """[..., n, k], in numbers."""
        *rest, last = self.values.shape
        return torch.Size([*rest, last * self.values_per_byte])

    def __getitem__(self, index: int) -> "Quantised":
        """One entry of the first dimension."""
        return replace(self, values=self.values[index], scale=self.scale[index])

    def rows(self, start: int, stop: int) -> "Quantised":
        """Rows [start, stop), which may begin and end inside a block.

        The numbers stay as they are. Where ``start`` is inside a block, the blocks get as short
        as the common divisor of both and their scales are repeated.
        """
        block_n, block_k = self.block_size
        block_n = math.gcd(start, block_n)
        fine = self.refined(block_n, block_k)
        return replace(
            fine,
            values=fine.values[..., start:stop, :],
            scale=fine.scale[..., start // block_n : -(-stop // block_n), :],
        )

    def columns(self, start: int, stop: int) -> "Quantised":
        """As ``rows``, along k.

        Raises:
            ValueError: a cut would go through a byte.
        """
        per_byte = self.values_per_byte
        if start % per_byte or stop % per_byte:
            raise ValueError(
                f"Columns {start} to {stop} cut through a byte, which holds two FP4 codes; use "
                "even numbers."
            )
        block_n, block_k = self.block_size
        block_k = math.gcd(start, block_k)
        fine = self.refined(block_n, block_k)
        return replace(
            fine,
            values=fine.values[..., start // per_byte : stop // per_byte],
            scale=fine.scale[..., start // block_k : -(-stop // block_k)],
        )

    def followed_by(self, other: "Quantised") -> "Quantised":
        """The rows of both, copied; the blocks shorten where this one's end inside a block."""
        block_n = math.gcd(self.shape[-2], self.block_size[0], other.block_size[0])
        block_k = math.gcd(self.block_size[1], other.block_size[1])
        first, second = self.refined(block_n, block_k), other.refined(block_n, block_k)
        return Quantised(
            torch.cat([first.values, second.values], dim=-2),
            torch.cat([first.scale, second.scale], dim=-2),
            (block_n, block_k),
        )

    def contiguous(self) -> "Quantised":
        """In memory of its own where this is a strided view."""
        return replace(self, values=self.values.contiguous(), scale=self.scale.contiguous())

    def zeros_like(self) -> "Quantised":
        """Zeros of the same layout, with scales of 1.0 (UE8M0 byte 127)."""
        scale = torch.ones_like(self.scale)
        if self.scale.dtype is torch.uint8:
            scale = torch.full_like(self.scale, _E8M0_ONE)
        values = torch.zeros_like(self.values.view(torch.uint8)).view(self.values.dtype)
        return replace(self, values=values, scale=scale)

    def refined(self, block_n: int, block_k: int) -> "Quantised":
        """The same numbers in smaller blocks, whose sizes divide the present ones."""
        old_n, old_k = self.block_size
        scale = self.scale
        # Repeated scales beyond the last number are cut off: the last block may be short.
        if block_n < old_n:
            scale = scale.repeat_interleave(old_n // block_n, dim=-2)
            scale = scale[..., : -(-self.shape[-2] // block_n), :]
        if block_k < old_k:
            scale = scale.repeat_interleave(old_k // block_k, dim=-1)
            scale = scale[..., : -(-self.shape[-1] // block_k)]
        return Quantised(self.values, scale, (block_n, block_k))
