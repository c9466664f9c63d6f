"""Scales as DeepGEMM's kernels load them: MN-major, on 16-byte boundaries, UE8M0 packed by four."""

from torch import Tensor

_BYTES_PER_WORD = 4
_TMA_BYTES = 16


def mn_major(scale: Tensor) -> Tensor:
    """The same values with stride 1 along MN, each column on a 16-byte boundary, as TMA loads it.

    Args:
        scale: [..., mn, k], any dtype of 1, 2 or 4 bytes.

    Returns:
        [..., mn, k] whose stride along k is mn rounded up to 16 bytes; the gap holds zeros.
    """
    *batch, num_rows, num_columns = scale.shape
    per_boundary = _TMA_BYTES // scale.element_size()
    aligned = -(-num_rows // per_boundary) * per_boundary
    columns = scale.new_zeros(*batch, num_columns, aligned)
    columns[..., :num_rows] = scale.transpose(-1, -2)
    return columns.transpose(-1, -2)[..., :num_rows, :]


def pack_ue8m0(scale: Tensor) -> Tensor:
    """Four bytes along K to one int32, the first in its lowest bits, then `mn_major`.

    Args:
        scale: uint8 [..., mn, groups]; groups is filled up to a multiple of 4 with zero bytes.

    Returns:
        int32 [..., mn, ceil(groups / 4)].
    """
    *batch, num_rows, num_groups = scale.shape
    num_words = -(-num_groups // _BYTES_PER_WORD)
    padded = scale.new_zeros(*batch, num_rows, num_words * _BYTES_PER_WORD)
    padded[..., :num_groups] = scale
    parts = padded.view(*batch, num_rows, num_words, _BYTES_PER_WORD).int()
    words = parts[..., 0] | parts[..., 1] << 8 | parts[..., 2] << 16 | parts[..., 3] << 24
    return mn_major(words)
