"""The plugin on Trainium: what it does while vllm-neuron's runner loads a model, by a stand-in."""

import importlib
import logging
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from oracle import Fixture, make_fixture, rel_l2
from quantised_factory import cast_of
from vllm_neuron_stand_in import PACKAGES, affinities_of, exact_shared, exact_weights

from tests.adapters.conftest import DEEPSEEK_V3, MakeConfig
from tests.adapters.quantised_models import V4
from vllm_moe_ep import hardware
from vllm_moe_ep.adapters.vllm import hooks, neuron_config, plugin
from vllm_moe_ep.envs import load_settings
from vllm_moe_ep.errors import UnsupportedError
from vllm_moe_ep.quant.formats import FORMATS

OURS = {"moe_backend": "static-ep"}
MODEL = {**V4, "moe_intermediate_size": 256, "n_routed_experts": 8, "swiglu_limit": 0.8}
ACTIVATION = FORMATS["fp8_1x32_ue8m0"].with_max(240.0)
EXPERTS = "vllm_neuron.model.deepseek_v4.moe"


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fresh modules, hooked as at the start of a process, and the probe told of a device."""
    hardware.probe.cache_clear()
    torch._dynamo.reset()
    _forget()
    monkeypatch.syspath_prepend(str(PACKAGES))
    monkeypatch.setenv("VLLM_MOE_EP_PLATFORM", "neuron")
    hooks.install(plugin.NEURON_HOOKS)
    yield
    _forget()


def _forget() -> None:
    for name in [name for name in sys.modules if name.split(".")[0] in ("vllm_neuron", "nki")]:
        del sys.modules[name]


def make_runner(config: Any) -> Any:
    runner = importlib.import_module("vllm_neuron.vllm.worker.neuron_model_runner")
    return runner.NeuronModelRunner(config)


def routed_output(runner: Any, fixture: Fixture) -> torch.Tensor:
    """[layers, rows, hidden] of the compiled model, in one graph."""
    return runner.model(fixture.hidden_states, affinities_of(fixture, 8), fixture.topk_ids)


def _fixture() -> Fixture:
    """Rows whose experts are the first four of eight, those of the stand-in's rank."""
    return make_fixture(torch.bfloat16, 3, 256, 256, 4, 2)


def expected_output(runner: Any, index: int, fixture: Fixture) -> torch.Tensor:
    """Of one rank of two, whose sum is left out: each holds all of the shared expert."""
    ffn, cast = runner.model.layers[index].ffn, cast_of(ACTIVATION)
    parts = fixture.hidden_states, fixture.topk_ids, fixture.topk_weights
    routed = Fixture(*parts, *exact_weights(ffn.experts)).routed(0.8, cast)
    return routed + exact_shared([ffn.shared_expert], fixture.hidden_states, 0.8, cast) / 2


def test_a_model_is_served_by_the_kernels_without_a_call(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    runner = make_runner(make_config(MODEL, **OURS))
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    caplog.set_level(logging.INFO)
    runner.load_model()
    layer = "DeepSeek MoE layers with the static-shape EP layer (NKI kernels)"
    assert f"replaced 2 of 2 {layer}" in caplog.text
    fixture = _fixture()
    outputs = routed_output(runner, fixture)
    for index, actual in enumerate(outputs):
        assert rel_l2(actual, expected_output(runner, index, fixture)) <= 1e-2
    assert not torch.equal(outputs[0], outputs[1])


def test_weights_that_are_loaded_again_reach_the_kernels(make_config: MakeConfig) -> None:
    """After load_model, into a model that is compiled by then."""
    runner = make_runner(make_config(MODEL, **OURS))
    runner.load_model()
    fixture = _fixture()
    before = routed_output(runner, fixture)
    buffers = dict(runner.model.named_buffers())
    runner.model.load_weights("other checkpoint", torch.device("cpu"), None)
    after = routed_output(runner, fixture)
    assert {name: id(buffer) for name, buffer in runner.model.named_buffers()} == {
        name: id(buffer) for name, buffer in buffers.items()
    }
    for index, actual in enumerate(after):
        assert rel_l2(actual, expected_output(runner, index, fixture)) <= 1e-2
        assert rel_l2(actual, before[index]) > 0.5


@pytest.mark.parametrize("allow_stock", ["0", "1"])
def test_weights_that_cannot_be_taken_later_are_refused(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, allow_stock: str
) -> None:
    """Even where stock layers are allowed: the compiled graph has our kernels."""
    monkeypatch.setenv("VLLM_MOE_EP_ALLOW_STOCK", allow_stock)
    runner = make_runner(make_config(MODEL, **OURS))
    runner.load_model()
    _spoil_second_layer(monkeypatch, "loaded")
    refused = "again failed for layer layers.1.ffn.experts: .*codes above 240.*anew"
    with pytest.raises(UnsupportedError, match=refused):
        runner.model.load_weights("broken checkpoint", torch.device("cpu"), None)


def test_nothing_changes_while_another_backend_is_chosen(make_config: MakeConfig) -> None:
    runner = make_runner(make_config(MODEL))
    runner.load_model()
    assert (routed_output(runner, _fixture()) == 10).all()
    experts = importlib.import_module(EXPERTS).DeepseekV4RoutedExperts
    assert experts.forward.__module__ == EXPERTS


def _spoil_second_layer(monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    """Its parameters have no kernel's size, or its loaded weights no finite number."""
    experts = importlib.import_module(EXPERTS).DeepseekV4RoutedExperts
    name = "__init__" if when == "built" else "set_random_weights"
    original = getattr(experts, name)

    def spoiled(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if self.layer_idx != 1:
            return
        if when == "built":
            del self.w2_scale
        else:
            self.w2_weight.data.view(torch.uint8)[0, 0, 0] = 0x7A

    monkeypatch.setattr(experts, name, spoiled)


@pytest.mark.parametrize(
    ("when", "reason"), [("built", "no w2_scale"), ("loaded", "codes above 240")]
)
def test_a_layer_that_cannot_be_taken_is_named(
    make_config: MakeConfig,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    when: str,
    reason: str,
) -> None:
    _spoil_second_layer(monkeypatch, when)
    refused = f"cannot take layer layers.1.ffn.experts: .*{reason}.*VLLM_MOE_EP_ALLOW_STOCK=1"
    with pytest.raises(UnsupportedError, match=refused):
        make_runner(make_config(MODEL, **OURS)).load_model()
    if when == "built":
        return  # the stand-in cannot load such a layer
    monkeypatch.setenv("VLLM_MOE_EP_ALLOW_STOCK", "1")
    runner = make_runner(make_config(MODEL, **OURS))
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    caplog.set_level(logging.INFO)
    runner.load_model()
    assert "replaced 1 of 2" in caplog.text
    assert f"as allowed: layers.1.ffn.experts: a weight holds fp8 {reason}" in caplog.text
    first, second = routed_output(runner, _fixture())
    assert (second == 10).all() and not (first == 10).any()


def test_another_interface_is_refused(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    experts = importlib.import_module(EXPERTS).DeepseekV4RoutedExperts
    monkeypatch.setattr(experts, "forward", lambda self, hidden_states: hidden_states)
    refused = "cannot take layer layers.0.ffn.experts, layers.1.ffn.experts: .*forward takes"
    with pytest.raises(UnsupportedError, match=refused):
        make_runner(make_config(MODEL, **OURS)).load_model()


def test_a_model_that_was_loaded_elsewhere_is_refused(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by VLLM_NEURON_CPU_COMPILE, which loads no weights."""
    module = importlib.import_module("vllm_neuron.model.deepseek_v4.model")
    monkeypatch.setattr(module.DeepseekV4ForCausalLM, "load_weights", lambda *_: None)
    with pytest.raises(UnsupportedError, match="replaced no layer"):
        runner = make_runner(make_config(MODEL, **OURS))
        monkeypatch.setattr(torch.nn.Module, "to", lambda self, device: self)
        runner.load_model()


def test_a_runner_on_a_host_that_was_probed_as_cpu_is_refused(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_MOE_EP_PLATFORM", "cpu")
    with pytest.raises(UnsupportedError, match="set VLLM_MOE_EP_PLATFORM=neuron"):
        make_runner(make_config(MODEL, **OURS)).load_model()


def test_other_models_and_settings_are_refused_at_start(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UnsupportedError, match="found DeepseekV3ForCausalLM"):
        make_config(DEEPSEEK_V3, **OURS)
    with pytest.raises(UnsupportedError, match="VLLM_MOE_EP_EXPERTS=dense is for CPU"):
        make_config(MODEL, **OURS, additional_config={"moe_ep": {"experts": "dense"}})
    hf_config = SimpleNamespace(expert_dtype="fp8")
    model_config = SimpleNamespace(architectures=[neuron_config.ARCHITECTURE], hf_config=hf_config)
    config = SimpleNamespace(model_config=model_config, speculative_config=None)
    with pytest.raises(UnsupportedError, match="routed experts in FP4 alone.*found expert_dtype f"):
        neuron_config.check(config, load_settings({}, environ={}))
    hf_config.expert_dtype = "fp4"
    config = SimpleNamespace(model_config=model_config, speculative_config=object())
    with pytest.raises(UnsupportedError, match="drop --speculative-config"):
        neuron_config.check(config, load_settings({}, environ={}))
    monkeypatch.setenv("VLLM_MOE_EP_ALLOW_STOCK", "1")
    make_config(DEEPSEEK_V3, **OURS)
