"""vLLM's groups of ranks as the layer's collectives.

Tokens differ over data-parallel ranks (the token group) and are replicated over tensor-parallel
ranks (the replica group); the experts are split over all of them.
"""

from functools import cache

from vllm.distributed import get_dp_group, get_tp_group

from vllm_moe_ep.collectives import Collectives, TorchDistributed


@cache
def layer_collectives() -> Collectives:
    """The collectives that all layers of this process share."""
    dp_group, tp_group = get_dp_group(), get_tp_group()
    return TorchDistributed(
        dp_group.device_group if dp_group.world_size > 1 else None,
        tp_group.device_group if tp_group.world_size > 1 else None,
    )


def describe_groups() -> str:
    """The collectives of one step, in words."""
    dp_size, tp_size = get_dp_group().world_size, get_tp_group().world_size
    steps = []
    if dp_size > 1:
        has_scatter = getattr(layer_collectives(), "use_reduce_scatter", True)
        combine = "reduce-scatter" if has_scatter else "all-reduce and narrow"
        steps.append(f"all-gather and {combine} over {dp_size} data-parallel ranks")
    if tp_size > 1:
        steps.append(f"all-reduce over {tp_size} tensor-parallel ranks")
    return "; ".join(steps) or "no collectives"
