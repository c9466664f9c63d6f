"""The SM90 experts on kernels that walk the documented layouts, against the fp64 oracle."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from fake_psum_kernels import fake_psum_bundle
from oracle import Fixture, make_fixture, rel_l2
from torch import Tensor

from vllm_moe_ep.deepgemm import hopper_experts
from vllm_moe_ep.deepgemm.hopper_experts import HopperExperts, HopperWeights
from vllm_moe_ep.deepgemm.row_kernels import load_row_kernels
from vllm_moe_ep.deepgemm.symbols import SET_ALIGNMENT
from vllm_moe_ep.deepgemm.weight_scales import ScaledWeight, prepare_fp8_weight
from vllm_moe_ep.errors import UnsupportedError
from vllm_moe_ep.quant.cast import dequantise, quantise
from vllm_moe_ep.quant.formats import FP8_128X128
from vllm_moe_ep.stages import RoutedTokens

# The oracle casts no activations: two casts of 2.6 % each, and a single row scatters around them.
# A wrong block of scales makes far over 0.1.
LIMITS = {"bf16": 1e-2, "fp8": 0.08}
KERNELS = load_row_kernels("reference")


def tokens_of(fixture: Fixture) -> RoutedTokens:
    return RoutedTokens(fixture.hidden_states, fixture.topk_ids, fixture.topk_weights)


def stored(name: str, weight: Tensor) -> tuple[ScaledWeight, Tensor]:
    quantised = quantise(weight.float(), FP8_128X128)
    prepared = prepare_fp8_weight(name, quantised.values, quantised.scale, (128, 128), 9)
    return prepared, dequantise(quantised)


def weights_of(fixture: Fixture, form: str) -> tuple[HopperWeights, Fixture]:
    """The weights, and the fixture whose answer they give."""
    if form == "bf16":
        return HopperWeights(fixture.w13_weight, fixture.w2_weight), fixture
    w13, w13_numbers = stored("w13", fixture.w13_weight)
    w2, w2_numbers = stored("w2", fixture.w2_weight)
    numbers = replace(fixture, w13_weight=w13_numbers, w2_weight=w2_numbers)
    return HopperWeights(w13, w2), numbers


forms = pytest.mark.parametrize("form", ["bf16", "fp8"])


@forms
@pytest.mark.parametrize("alignment", [8, 16])
@pytest.mark.parametrize("limit", [None, 0.5])
@pytest.mark.parametrize("num_tokens", [0, 1, 33])
def test_equals_the_oracle(form: str, alignment: int, limit: float | None, num_tokens: int) -> None:
    weights, answer = weights_of(make_fixture(torch.bfloat16, num_tokens=num_tokens), form)
    bundle, state = fake_psum_bundle()
    experts = HopperExperts(bundle, weights, KERNELS, swiglu_limit=limit)
    output = experts(tokens_of(answer), alignment)
    assert output.dtype == torch.bfloat16
    assert rel_l2(output, answer.routed(limit)) <= LIMITS[form]
    assert state.alignment == bundle.alignment
    assert state.used == ([alignment] * 2 if num_tokens else [])


@forms
def test_several_passes_equal_one(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weights, answer = weights_of(make_fixture(torch.bfloat16, num_tokens=33), form)
    bundle, state = fake_psum_bundle()
    blocks = []
    split = hopper_experts.split_block

    def spied(sizes: Sequence[int], device: torch.device) -> list[Tensor]:
        parts = split(sizes, device)
        # Whatever a kernel does not write is NaN, not what an earlier pass left.
        parts[0].untyped_storage().fill_(0xFF)
        blocks.append(parts[0].untyped_storage().nbytes())
        return parts

    monkeypatch.setattr(hopper_experts, "split_block", spied)
    experts = HopperExperts(bundle, weights, KERNELS, max_pass_rows=16)
    output = experts(tokens_of(answer), 8)
    whole = HopperExperts(bundle, weights, KERNELS)(tokens_of(answer), 8)
    assert rel_l2(output, answer.routed()) <= LIMITS[form]
    # Not bit for bit: a product on CPU rounds by its height.
    assert rel_l2(output, whole.double()) <= 5e-3
    assert len(state.used) == 2 * 3 + 2 and state.alignment == bundle.alignment
    largest = experts.workspace_bytes(33, answer.topk_ids.shape[1], 8)
    assert max(blocks[:3]) == largest < blocks[3]


@forms
def test_a_share_of_the_experts(form: str) -> None:
    fixture = make_fixture(torch.bfloat16)
    fixture.topk_ids[3] = torch.tensor([-1, 16, 2**30, -5])
    fixture.topk_weights[3] = torch.nan
    held = torch.tensor([11, 2, 5])
    expert_map = torch.full((16,), -1, dtype=torch.int32)
    expert_map[held] = torch.arange(3, dtype=torch.int32)
    local = replace(fixture, w13_weight=fixture.w13_weight[held], w2_weight=fixture.w2_weight[held])
    weights, answer = weights_of(local, form)
    experts = HopperExperts(fake_psum_bundle()[0], weights, KERNELS, expert_map)
    output = experts(tokens_of(fixture), 8)
    is_known = (fixture.topk_ids >= 0) & (fixture.topk_ids < 16)
    ids = expert_map[torch.where(is_known, fixture.topk_ids, 0).long()]
    ids = torch.where(is_known, ids, -1)
    assert rel_l2(output, replace(answer, topk_ids=ids).routed()) <= LIMITS[form]
    assert bool((output[(ids < 0).all(dim=1)] == 0).all())


@forms
def test_nan_stays_in_its_row(form: str) -> None:
    weights, answer = weights_of(make_fixture(torch.bfloat16), form)
    experts = HopperExperts(fake_psum_bundle()[0], weights, KERNELS)
    clean = experts(tokens_of(answer), 8)
    answer.hidden_states[7] = torch.nan
    dirty = experts(tokens_of(answer), 8)
    others = torch.arange(64) != 7
    assert bool(dirty[7].isnan().all()) and torch.equal(dirty[others], clean[others])


def test_a_library_without_other_alignments() -> None:
    bundle, _ = fake_psum_bundle()
    functions = {name: f for name, f in bundle.functions.items() if name != SET_ALIGNMENT}
    weights, answer = weights_of(make_fixture(torch.bfloat16), "bf16")
    experts = HopperExperts(replace(bundle, functions=functions), weights, KERNELS)
    assert rel_l2(experts(tokens_of(answer), bundle.alignment), answer.routed()) <= LIMITS["bf16"]
    with pytest.raises(UnsupportedError, match="aligned to 16 rows.*found 8"):
        experts(tokens_of(answer), 8)


def changed(change: Callable[[Fixture], HopperWeights]) -> HopperExperts:
    return HopperExperts(fake_psum_bundle()[0], change(make_fixture(torch.bfloat16)), KERNELS)


def test_refusals() -> None:
    with pytest.raises(UnsupportedError, match="w13 must be bfloat16 or fp8.*float32"):
        changed(lambda f: HopperWeights(f.w13_weight.float(), f.w2_weight))
    with pytest.raises(ValueError, match="both be bf16 or both fp8"):
        changed(lambda f: HopperWeights(f.w13_weight, stored("w2", f.w2_weight)[0]))
    with pytest.raises(ValueError, match=r"needs a w2 of \[16, 256, 128\], found \[15, 256, 128\]"):
        changed(lambda f: HopperWeights(f.w13_weight, f.w2_weight[1:]))
    with pytest.raises(UnsupportedError, match="moe_intermediate_size.*found 64"):
        changed(lambda f: HopperWeights(f.w13_weight[:, :128], f.w2_weight[..., :64]))
    fixture = make_fixture(torch.bfloat16)
    with pytest.raises(UnsupportedError, match="for SM90, found SM100"):
        bundle = replace(fake_psum_bundle()[0], capability=(10, 0))
        HopperExperts(bundle, weights_of(fixture, "bf16")[0], KERNELS)
    experts = HopperExperts(fake_psum_bundle()[0], weights_of(fixture, "bf16")[0], KERNELS)
    half = replace(fixture, hidden_states=fixture.hidden_states.half())
    with pytest.raises(UnsupportedError, match="found torch.float16"):
        experts(tokens_of(half), 8)
