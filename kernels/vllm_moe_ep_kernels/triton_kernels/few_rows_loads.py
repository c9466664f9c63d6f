"""What the few-row kernels share: finding a program's pairs, and loading its tiles."""

import triton
import triton.language as tl
from triton.language.extra import cuda

from vllm_moe_ep_kernels.triton_kernels.fp8_cast import cast_groups
from vllm_moe_ep_kernels.triton_kernels.local_ids import load_local_ids


@triton.jit
def find_group(
    ids_ptr,
    map_ptr,
    group,
    num_pairs,
    num_ids,
    HAS_MAP: tl.constexpr,
    IS_BY_EXPERT: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
):
    """The group's expert, each pair's place in the group (-1 outside), and the group's size.

    Group g is expert g, or the expert of pair g. Of several pairs with one expert the first
    one's program takes all; the others find the size 0.
    """
    pairs = tl.arange(0, BLOCK_PAIRS)
    local = load_local_ids(ids_ptr, map_ptr, pairs, num_pairs, num_ids, HAS_MAP)
    if IS_BY_EXPERT:
        expert = group
        is_hit = local == expert
        size = tl.sum(is_hit.to(tl.int32), axis=0)
    else:
        expert = tl.sum(tl.where(pairs == group, local, 0), axis=0)
        is_hit = (local == expert) & (local >= 0)
        first = tl.min(tl.where(is_hit, pairs, BLOCK_PAIRS), axis=0)
        size = tl.where(first == group, tl.sum(is_hit.to(tl.int32), axis=0), 0)
    place = tl.where(is_hit, tl.cumsum(is_hit.to(tl.int32), axis=0) - 1, -1)
    return expert, place, size


@triton.jit
def pairs_at(place, first, BLOCK_PAIRS: tl.constexpr, BLOCK_ROWS: tl.constexpr):
    """int32 [BLOCK_ROWS]: the pairs at the places from `first` on, -1 behind the last."""
    pairs = tl.arange(0, BLOCK_PAIRS)
    wanted = first + tl.arange(0, BLOCK_ROWS)
    numbers = tl.where(place[:, None] == wanted[None, :], pairs[:, None] + 1, 0)
    return tl.sum(numbers, axis=0) - 1


@triton.jit
def weight_places(
    weight, row, width, HAS_DESCRIPTOR: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """What `weight_tile` adds columns to: pointers [ROWS, COLUMNS], or the first row's number."""
    if HAS_DESCRIPTOR:
        return row
    else:
        rows = row.to(tl.int64) + tl.arange(0, ROWS)
        return weight + rows[:, None] * width + tl.arange(0, COLUMNS)[None, :]


@triton.jit
def weight_tile(weight, places, column, HAS_DESCRIPTOR: tl.constexpr):
    """[ROWS, COLUMNS] from `column` on; sizes are multiples of the tile."""
    if HAS_DESCRIPTOR:
        return weight.load([places, column])
    else:
        return tl.load(places + column)


@triton.jit
def fetch_ahead(weight, row, width, ROWS: tl.constexpr, BYTES: tl.constexpr):
    """Ask for the first bytes of weight rows to be brought to L2, and go on."""
    rows = row.to(tl.int64) + tl.arange(0, ROWS)
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
        "=r,l,r",
        [weight + rows * width, tl.full([ROWS], BYTES, tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def cast_if(rows, scale, IS_CAST: tl.constexpr):
    """The rows as they are with the loaded scale, or cast to fp8 with their own."""
    if IS_CAST:
        return cast_groups(rows.to(tl.float32))
    else:
        return rows, scale


@triton.jit
def wait_for_kernel_before(IS_OVERLAPPED: tl.constexpr):
    """Returns once everything that earlier kernels wrote is there."""
    if IS_OVERLAPPED:
        cuda.gdc_wait()


@triton.jit
def let_next_kernel_start(IS_OVERLAPPED: tl.constexpr):
    """The next kernel's programs take places that this one's leave; they wait by themselves."""
    if IS_OVERLAPPED:
        cuda.gdc_launch_dependents()
