"""Which collectives vLLM's groups become, without starting ranks."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_moe_ep.adapters.vllm import groups
from vllm_moe_ep.device_groups import DeviceGroups


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    """What the collectives were made of."""
    arguments: list[dict[str, Any]] = []

    def make(_: Any, device_size: int) -> DeviceGroups:
        return DeviceGroups(device_size, device_size)  # type: ignore[arg-type]

    def distributed(token_group: Any, replica_group: Any, **others: Any) -> Any:
        arguments.append({"token_group": token_group, "replica_group": replica_group, **others})
        return SimpleNamespace()

    monkeypatch.setattr(groups, "make_device_groups", make)
    monkeypatch.setattr(groups, "TorchDistributed", distributed)
    groups.layer_collectives.cache_clear()
    yield arguments
    groups.layer_collectives.cache_clear()


def _run_on(monkeypatch: pytest.MonkeyPatch, tp_size: int, settings: dict[str, Any]) -> None:
    communicator = SimpleNamespace(all_reduce="vLLM's own")
    tp_group = SimpleNamespace(
        world_size=tp_size, device_group="tp", device_communicator=communicator
    )
    config = SimpleNamespace(additional_config={"moe_ep": settings})
    monkeypatch.setattr(groups, "get_tp_group", lambda: tp_group)
    monkeypatch.setattr(groups, "get_dp_group", lambda: SimpleNamespace(world_size=1))
    monkeypatch.setattr(groups, "get_current_vllm_config", lambda: config)
    monkeypatch.setattr(groups.dist, "get_world_size", lambda: tp_size)


@pytest.mark.parametrize(
    ("tp_size", "settings", "device_size", "why_flat"),
    [
        (8, {}, None, "each rank has a device of its own"),
        (8, {"platform": "neuron"}, 4, None),
        (8, {"device_size": 2}, 2, None),
        (6, {"device_size": 4}, None, "6 ranks are not a multiple of the device size 4"),
        (8, {"device_size": 4, "hierarchical_all_reduce": False}, None, "switched off"),
    ],
)
def test_settings_choose_the_sum(
    monkeypatch: pytest.MonkeyPatch,
    made: list[dict[str, Any]],
    tp_size: int,
    settings: dict[str, Any],
    device_size: int | None,
    why_flat: str | None,
) -> None:
    _run_on(monkeypatch, tp_size, settings)
    assert groups.layer_collectives() is groups.layer_collectives()
    (arguments,) = made
    expected = device_size and DeviceGroups(device_size, device_size)  # type: ignore[arg-type]
    assert arguments["device_groups"] == expected
    assert (arguments["token_group"], arguments["replica_group"]) == (None, "tp")
    assert arguments["replica_sum"] == "vLLM's own"
    reason = groups.why_sum_is_flat(settings.get("hierarchical_all_reduce", True))
    assert reason is None if why_flat is None else why_flat in str(reason)


def test_a_model_that_sums_by_itself_gets_no_replica_group(
    monkeypatch: pytest.MonkeyPatch, made: list[dict[str, Any]]
) -> None:
    _run_on(monkeypatch, 2, {})
    groups.layer_collectives(with_sum=False)
    (arguments,) = made
    assert arguments["replica_group"] is arguments["replica_sum"] is None
