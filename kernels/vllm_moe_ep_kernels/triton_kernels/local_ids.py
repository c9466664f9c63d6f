"""Each pair's local expert, inside a kernel."""

import triton
import triton.language as tl


@triton.jit
def load_local_ids(ids_ptr, map_ptr, pairs, num_pairs, num_ids, HAS_MAP: tl.constexpr):
    """int32 local expert of each pair, -1 for none. The range is checked in the ids' dtype."""
    ids = tl.load(ids_ptr + pairs, mask=pairs < num_pairs, other=-1)
    is_known = (ids >= 0) & (ids < num_ids)
    local = tl.where(is_known, ids, 0).to(tl.int32)
    if HAS_MAP:
        local = tl.load(map_ptr + local, mask=is_known, other=-1)
    return tl.where(is_known, local, -1)
