"""How many rows each data-parallel rank brings to a step: the same number on all ranks."""

from typing import Any


def step_capacity(num_tokens: int, dp_metadata: Any, min_capacity: int) -> int:
    """Row capacity of this step.

    Without data parallelism nothing is gathered and the step's own rows suffice. With it, the
    capacity follows from what every rank knows: the row counts that vLLM exchanged for this step
    (dummy steps included). Powers of two keep the number of distinct shapes small.

    Args:
        num_tokens: rows of this rank.
        dp_metadata: vLLM's `DPMetadata` of the step, None without data parallelism.
        min_capacity: `VLLM_MOE_EP_MIN_CAPACITY`.
    """
    if dp_metadata is None:
        return num_tokens
    return largest_capacity(int(dp_metadata.num_tokens_across_dp_cpu.max()), min_capacity)


def largest_capacity(num_tokens: int, min_capacity: int) -> int:
    """The capacity that the busiest rank's `num_tokens` rows lead to."""
    return 1 << (max(num_tokens, min_capacity) - 1).bit_length()
