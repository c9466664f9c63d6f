"""The settings registry: defaults, environment, overrides, and every kind of bad value."""

import pytest

from vllm_moe_ep.envs import VARIABLES, load_settings, settings_table
from vllm_moe_ep.errors import SettingsError


def test_defaults_when_nothing_is_set() -> None:
    settings = load_settings(environ={})
    assert settings.experts == "auto"
    assert settings.allow_stock is False
    assert settings.min_capacity == 16


def test_environment_is_parsed_by_type() -> None:
    settings = load_settings(
        environ={
            "VLLM_MOE_EP_ALLOW_STOCK": "yes",
            "VLLM_MOE_EP_MIN_CAPACITY": " 8 ",
            "VLLM_MOE_EP_EXPERTS": "Dense",
            "UNRELATED": "x",
        }
    )
    assert (settings.allow_stock, settings.min_capacity, settings.experts) == (True, 8, "dense")


def test_overrides_win_over_the_environment() -> None:
    settings = load_settings({"min_capacity": 4}, environ={"VLLM_MOE_EP_MIN_CAPACITY": "8"})
    assert settings.min_capacity == 4


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("VLLM_MOE_EP_MIN_CAPACITY", "abc"),
        ("VLLM_MOE_EP_MIN_CAPACITY", "-1"),
        ("VLLM_MOE_EP_MIN_CAPACITY", "0"),
        ("VLLM_MOE_EP_MIN_CAPACITY", "nan"),
        ("VLLM_MOE_EP_MIN_CAPACITY", "1.5"),
        ("VLLM_MOE_EP_MIN_CAPACITY", ""),
        ("VLLM_MOE_EP_ALLOW_STOCK", "maybe"),
        ("VLLM_MOE_EP_EXPERTS", "fast"),
        ("VLLM_MOE_EP_PLATFORM", "tpu"),
    ],
)
def test_bad_environment_value_names_the_variable_and_what_is_allowed(
    name: str, value: str
) -> None:
    variable = next(v for v in VARIABLES if v.env_name == name)
    with pytest.raises(SettingsError) as caught:
        load_settings(environ={name: value})
    assert name in str(caught.value)
    assert variable.allowed in str(caught.value)


def test_unknown_environment_variable_suggests_the_near_one() -> None:
    with pytest.raises(SettingsError, match="did you mean VLLM_MOE_EP_EXPERTS"):
        load_settings(environ={"VLLM_MOE_EP_EXPERT": "dense"})


@pytest.mark.parametrize("name", ["NOPE", "X", "", "CUDA", "MODE"])
def test_no_name_is_suggested_that_is_not_alike(name: str) -> None:
    with pytest.raises(SettingsError) as caught:
        load_settings(environ={f"VLLM_MOE_EP_{name}": "1"})
    assert "did you mean" not in str(caught.value)
    assert f"VLLM_MOE_EP_{name} is unknown: Known are VLLM_MOE_EP_PLATFORM" in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ({"expert": "dense"}, "moe_ep.expert"),
        ({"min_capacity": True}, "moe_ep.min_capacity"),
        ({"min_capacity": 1.5}, "moe_ep.min_capacity"),
        ({"experts": 3}, "moe_ep.experts"),
        ({"allow_stock": 2}, "moe_ep.allow_stock"),
        ({"min_capacity": 2**31}, "an integer from 1 to 2147483647"),
        ({"min_capacity": [16]}, "min_capacity=list is not allowed"),
        ([1], "moe_ep"),
    ],
)
def test_bad_override_names_the_key(overrides: object, named: str) -> None:
    with pytest.raises(SettingsError, match=named):
        load_settings(overrides, environ={})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ({"experts": "ragged", "platform": "neuron"}, "VLLM_MOE_EP_PLATFORM=neuron"),
        ({"experts": "dense", "forced_gate": "1"}, "FORCED_GATE=1 .*EXPERTS=dense: use gated"),
    ],
)
def test_contradictions_name_both_settings(overrides: dict[str, object], named: str) -> None:
    with pytest.raises(SettingsError, match=named):
        load_settings(overrides, environ={})


def test_table_lists_every_variable_and_marks_changed_values() -> None:
    table = settings_table(load_settings({"min_capacity": 4}, environ={}))
    assert all(variable.env_name in table for variable in VARIABLES)
    assert "VLLM_MOE_EP_MIN_CAPACITY = 4 (default 16)" in table
