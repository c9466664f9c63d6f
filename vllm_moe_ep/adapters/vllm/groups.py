"""vLLM's groups of ranks as the layer's collectives.

Tokens differ over data-parallel ranks (the token group) and are replicated over tensor-parallel
ranks (the replica group); the experts are split over all of them.
"""

from functools import cache
from typing import Any

import torch.distributed as dist
from vllm.config import get_current_vllm_config
from vllm.distributed import get_dp_group, get_tp_group

from vllm_moe_ep.adapters.vllm.engine_config import settings_of
from vllm_moe_ep.collectives import TorchDistributed
from vllm_moe_ep.device_groups import DeviceGroups, device_size_of, make_device_groups, why_flat
from vllm_moe_ep.hardware import probe


@cache
def layer_collectives() -> TorchDistributed:
    """The collectives that all layers of this process share; every rank's first call makes them."""
    dp_group, tp_group = get_dp_group(), get_tp_group()
    return TorchDistributed(
        dp_group.device_group if dp_group.world_size > 1 else None,
        tp_group.device_group if tp_group.world_size > 1 else None,
        device_groups=_device_groups(tp_group),
    )


def _device_groups(tp_group: Any) -> DeviceGroups | None:
    if _why_flat(tp_group) is not None:
        return None
    return make_device_groups(tp_group.device_group, _device_size())


def _why_flat(tp_group: Any) -> str | None:
    settings = settings_of(get_current_vllm_config())
    sizes = tp_group.world_size, dist.get_world_size(), _device_size()
    return why_flat(*sizes, settings.hierarchical_all_reduce)


def _device_size() -> int:
    settings = settings_of(get_current_vllm_config())
    return device_size_of(probe(settings.platform).kind, settings.device_size)


def describe_groups() -> str:
    """The collectives of one step, in words."""
    ours, tp_group = layer_collectives(), get_tp_group()
    steps = []
    if ours.token_size > 1:
        combine = "reduce-scatter" if ours.use_reduce_scatter else "all-reduce and narrow"
        steps.append(f"all-gather and {combine} over {ours.token_size} data-parallel ranks")
    if ours.replica_size > 1:
        reason = _why_flat(tp_group)
        how = f"in one step: {reason}" if reason else f"in devices of {_device_size()}, then across"
        steps.append(f"all-reduce over {ours.replica_size} tensor-parallel ranks ({how})")
    return "; ".join(steps) or "no collectives"
