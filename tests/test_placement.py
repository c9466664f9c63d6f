import pytest
import torch

from vllm_moe_ep.errors import SettingsError
from vllm_moe_ep.placement import ExpertLocation, ExpertPlacement, LocalExperts


@pytest.mark.parametrize(
    ("num_experts", "counts"),
    [
        (256, [86, 85, 85]),
        (128, [22, 22, 21, 21, 21, 21]),
        (30, [4, 4, 4, 4, 4, 4, 3, 3]),
        (64, [22, 21, 21]),
        (5, [1, 1, 1, 1, 1, 0, 0, 0]),
        (16, [4, 4, 4, 4]),
        (7, [7]),
    ],
)
def test_linear_counts_and_offsets(num_experts: int, counts: list[int]) -> None:
    placement = ExpertPlacement.linear(num_experts, len(counts))
    offset = 0
    for rank, count in enumerate(counts):
        local = placement.local(rank)
        assert local.num_local_experts == count
        assert local.global_ids == tuple(range(offset, offset + count))
        for local_id, global_id in enumerate(local.global_ids):
            assert placement.location(global_id) == ExpertLocation(rank, local_id)
            assert local.local_id_of[global_id] == local_id
        offset += count
    assert offset == num_experts


@pytest.mark.parametrize(("num_experts", "ep_size"), [(16, 4), (30, 8), (5, 8), (3, 1)])
def test_round_robin_is_modulo(num_experts: int, ep_size: int) -> None:
    placement = ExpertPlacement.round_robin(num_experts, ep_size)
    for global_id in range(num_experts):
        expected = ExpertLocation(global_id % ep_size, global_id // ep_size)
        assert placement.location(global_id) == expected
        assert placement.local(expected.ep_rank).global_ids[expected.local_id] == global_id


@pytest.mark.parametrize("as_tensor", [False, True])
def test_expert_map_round_trip(as_tensor: bool) -> None:
    expert_map = [-1, 2, -1, 0, 1, -1]
    local = LocalExperts.from_expert_map(
        torch.tensor(expert_map, dtype=torch.int32) if as_tensor else expert_map
    )
    assert local.num_experts == 6
    assert local.global_ids == (3, 4, 1)
    assert local.expert_map() == expert_map


def test_expert_map_of_a_rank_without_experts() -> None:
    local = LocalExperts.from_expert_map([-1] * 4)
    assert (local.num_experts, local.num_local_experts) == (4, 0)
    assert local == ExpertPlacement.linear(4, 5).local(4)


@pytest.mark.parametrize("expert_map", [[0, 0], [1, -1], [0, 2, -1], [-2, 0]])
def test_expert_map_refuses_gaps_and_repeats(expert_map: list[int]) -> None:
    with pytest.raises(SettingsError, match="once"):
        LocalExperts.from_expert_map(expert_map)


def test_refusals_name_the_values() -> None:
    with pytest.raises(SettingsError, match="exactly once"):
        ExpertPlacement(3, ((0, 1), (1, 2)))
    with pytest.raises(SettingsError, match="exactly once"):
        ExpertPlacement(3, ((0,), (2,)))
    with pytest.raises(SettingsError, match="0 experts and 2 ranks"):
        ExpertPlacement.linear(0, 2)
    with pytest.raises(SettingsError, match="4 experts and 0 ranks"):
        ExpertPlacement.round_robin(4, 0)
    with pytest.raises(SettingsError, match="global id 4"):
        LocalExperts(4, (4,))
    with pytest.raises(SettingsError, match="twice"):
        LocalExperts(4, (1, 1))
    placement = ExpertPlacement.linear(4, 2)
    with pytest.raises(ValueError, match="Expert -1"):
        placement.location(-1)
    with pytest.raises(ValueError, match="ep_rank 2"):
        placement.local(2)
