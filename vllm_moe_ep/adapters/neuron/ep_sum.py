"""The sum over vllm-neuron's EP group in two steps: inside each device, then across devices."""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor

from vllm_moe_ep.collectives import TorchDistributed
from vllm_moe_ep.device_groups import make_device_groups, why_flat

Sum = Callable[[Tensor], Tensor]


def two_step_sum(ep_group: Any, device_size: int, is_enabled: bool = True) -> Sum | str:
    """The sum, or why it stays the group's own.

    To be called once per process and by every rank, outside any graph: it creates groups.
    """
    group = getattr(ep_group, "device_group", None)
    if group is None or not dist.is_initialized():
        return "the EP group has no process group"
    sizes = dist.get_world_size(group), dist.get_world_size(), device_size
    reason = why_flat(*sizes, is_enabled)
    if reason is not None:
        return reason
    devices = make_device_groups(group, device_size)
    return TorchDistributed(None, group, device_groups=devices).all_reduce
