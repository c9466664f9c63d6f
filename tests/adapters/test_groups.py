"""Which collectives vLLM's groups become, without starting ranks."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_moe_ep.adapters.vllm import groups
from vllm_moe_ep.device_groups import DeviceGroups


class FakeDistributed(SimpleNamespace):
    """Sizes instead of groups; records what was asked for."""

    def __init__(self, group: Any, _: Any, device_groups: Any) -> None:
        self.token_size, self.replica_size, self.device_groups = 1, len(group or [0]), device_groups


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The device sizes for which groups were created."""
    sizes: list[int] = []

    def make(_: Any, device_size: int) -> DeviceGroups:
        sizes.append(device_size)
        return DeviceGroups(None, None)  # type: ignore[arg-type]

    def distributed(_: Any, tp: Any, device_groups: Any = None) -> FakeDistributed:
        return FakeDistributed(tp, None, device_groups)

    monkeypatch.setattr(groups, "make_device_groups", make)
    monkeypatch.setattr(groups, "TorchDistributed", distributed)
    groups.layer_collectives.cache_clear()
    yield sizes
    groups.layer_collectives.cache_clear()


def _run_on(monkeypatch: pytest.MonkeyPatch, tp_size: int, settings: dict[str, Any]) -> None:
    tp_group = SimpleNamespace(world_size=tp_size, device_group=[0] * tp_size)
    config = SimpleNamespace(additional_config={"moe_ep": settings})
    monkeypatch.setattr(groups, "get_tp_group", lambda: tp_group)
    monkeypatch.setattr(groups, "get_dp_group", lambda: SimpleNamespace(world_size=1))
    monkeypatch.setattr(groups, "get_current_vllm_config", lambda: config)
    monkeypatch.setattr(groups.dist, "get_world_size", lambda: tp_size)


@pytest.mark.parametrize(
    ("tp_size", "settings", "sizes", "said"),
    [
        (8, {}, [], "in one step: each rank has a device of its own"),
        (8, {"platform": "neuron"}, [4], "in devices of 4, then across"),
        (8, {"device_size": 2}, [2], "in devices of 2, then across"),
        (6, {"device_size": 4}, [], "6 ranks are not a multiple of the device size 4"),
        (8, {"device_size": 4, "hierarchical_all_reduce": False}, [], "switched off"),
    ],
)
def test_settings_choose_the_sum_and_the_log_says_which(
    monkeypatch: pytest.MonkeyPatch,
    made: list[int],
    tp_size: int,
    settings: dict[str, Any],
    sizes: list[int],
    said: str,
) -> None:
    _run_on(monkeypatch, tp_size, settings)
    description = groups.describe_groups()
    assert f"all-reduce over {tp_size} tensor-parallel ranks" in description
    assert said in description
    assert made == sizes
    groups.layer_collectives()
    assert made == sizes
