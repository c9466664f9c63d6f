"""Groups for an all-reduce in two steps: inside each device, then across devices.

Ranks that share a device (cores of one chip) reach each other much faster than ranks elsewhere,
and each collective over many devices has a fixed latency that grows with their number.
"""

from dataclasses import dataclass

import torch.distributed as dist

# Trainium2, whose cores are joined in pairs (LNC=2): four of these to a device.
DEVICE_SIZES = {"neuron": 4}


@dataclass(frozen=True, slots=True)
class DeviceGroups:
    """This rank's two groups.

    Attributes:
        within: the ranks of its device.
        across: the ranks with its core index, one per device.
    """

    within: dist.ProcessGroup
    across: dist.ProcessGroup


def why_flat(
    group_size: int, world_size: int, device_size: int, is_enabled: bool = True
) -> str | None:
    """Why an all-reduce over ``group_size`` ranks stays one collective; None if it is split.

    The same on every rank, as all of its arguments are.

    Args:
        group_size: ranks that hold a part of the sum.
        world_size: ranks of the job.
        device_size: ranks that share a device.
        is_enabled: the setting.
    """
    if not is_enabled:
        return "the hierarchical all-reduce is switched off"
    if device_size == 1:
        return "each rank has a device of its own"
    if group_size != world_size:
        return f"the sum is over {group_size} of {world_size} ranks, and not over all"
    if group_size <= device_size:
        return f"{group_size} ranks share one device of {device_size}"
    if group_size % device_size:
        return f"{group_size} ranks are not a multiple of the device size {device_size}"
    return None


def device_members(num_ranks: int, device_size: int) -> list[list[int]]:
    """Rank numbers of all groups, in the order in which every rank creates them.

    First the ranks of each device, then those of each core index over all devices.
    """
    within = [list(range(first, first + device_size)) for first in range(0, num_ranks, device_size)]
    across = [list(range(core, num_ranks, device_size)) for core in range(device_size)]
    return within + across


def make_device_groups(group: dist.ProcessGroup, device_size: int) -> DeviceGroups:
    """Create all device groups of ``group``, which holds every rank of the job.

    To be called once per process and by every rank, outside any graph: creating a group is itself
    a collective. ``why_flat`` must have found no objection.
    """
    ranks = dist.get_process_group_ranks(group)
    own_rank = dist.get_rank()
    backend = dist.get_backend(group)
    own = []
    for members in device_members(len(ranks), device_size):
        global_ranks = [ranks[member] for member in members]
        created = dist.new_group(global_ranks, backend=backend)
        if own_rank in global_ranks:
            own.append(created)
    within, across = own
    return DeviceGroups(within, across)


def device_size_of(platform: str, setting: int) -> int:
    """Ranks that share a device: the setting, or with 0 what the platform has."""
    return setting or DEVICE_SIZES.get(platform, 1)
