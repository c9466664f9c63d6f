"""Rows of a step a part at a time, so that what is computed of them takes little memory."""

import torch

# Below this, reading an expert's weights for each part would cost more than the products.
FEWEST_ROWS = 64


def rows_at_once(moe_intermediate_size: int) -> int:
    """Rows of a part. With a quarter as many rows as an expert is wide, what a part computes takes
    less memory than the expert itself, and its products outweigh the reading of the weights."""
    return max(FEWEST_ROWS, moe_intermediate_size // 4)


def row_parts(num_rows: int, max_rows: int) -> list[slice]:
    """At most max_rows rows each, in order; all rows at once in a traced graph, where the number
    of parts would be part of it and the compiler plans the memory."""
    if torch.compiler.is_compiling():
        return [slice(None)]
    return [slice(start, start + max_rows) for start in range(0, num_rows, max_rows)]
