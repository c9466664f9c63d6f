"""vLLM's groups of ranks as the layer's collectives.

Tokens differ over data-parallel ranks (the token group) and are replicated over tensor-parallel
ranks (the replica group); the experts are split over all of them.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch.distributed as dist
from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.distributed import get_dp_group, get_tp_group

from vllm_moe_ep.adapters.vllm.engine_config import settings_of
from vllm_moe_ep.collectives import TorchDistributed
from vllm_moe_ep.device_groups import DeviceGroups, device_size_of, make_device_groups, why_flat
from vllm_moe_ep.hardware import probe


@cache
def layer_collectives(with_sum: bool = True) -> TorchDistributed:
    """The collectives that all layers of this process share; every rank's first call makes them.

    Args:
        with_sum: False for a layer whose model sums over the tensor-parallel ranks itself.
    """
    dp_group, tp_group = get_dp_group(), get_tp_group()
    is_summed = with_sum and tp_group.world_size > 1
    return TorchDistributed(
        dp_group.device_group if dp_group.world_size > 1 else None,
        tp_group.device_group if is_summed else None,
        device_groups=_device_groups(tp_group) if is_summed else None,
        replica_sum=_engine_sum(tp_group) if is_summed else None,
    )


def _engine_sum(tp_group: Any) -> Callable[[Tensor], Tensor]:
    """vLLM's own all-reduce: through shared memory on CPU, custom kernels on CUDA."""
    all_reduce: Callable[[Tensor], Tensor] = tp_group.device_communicator.all_reduce
    return all_reduce


def _device_groups(tp_group: Any) -> DeviceGroups | None:
    is_enabled = settings_of(get_current_vllm_config()).hierarchical_all_reduce
    if why_sum_is_flat(is_enabled) is not None:
        return None
    return make_device_groups(tp_group.device_group, _device_size())


def why_sum_is_flat(is_enabled: bool = True) -> str | None:
    """Why the sum over tensor-parallel ranks is one collective; None where it takes two steps.

    Args:
        is_enabled: the setting `hierarchical_all_reduce`, or True to ask about all else.
    """
    sizes = get_tp_group().world_size, dist.get_world_size(), _device_size()
    return why_flat(*sizes, is_enabled)


def _device_size() -> int:
    settings = settings_of(get_current_vllm_config())
    return device_size_of(probe(settings.platform).kind, settings.device_size)
