from dataclasses import replace

import pytest
import quant_oracle
import torch
from oracle import assert_close, rel_l2, shared_expert
from quantised_factory import (
    ACTIVATIONS,
    WEIGHTS,
    RawMatrix,
    cast_of,
    exact_halves,
    random_halves,
    random_matrix,
)
from torch import Tensor

from vllm_moe_ep.layers.shared_expert import (
    SharedExpert,
    refresh_slice,
    slice_shared_expert,
    why_not_sliced,
)
from vllm_moe_ep.quant.formats import FORMATS, FP8_128X128, QuantFormat
from vllm_moe_ep.quant.weight import Quantised

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def _weights(width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    w13, w2 = torch.randn(2 * width, 64) / 8, torch.randn(64, width) / width**0.5
    return w13.to(dtype), w2.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", [0, 1, 9])
def test_whole(dtype: torch.dtype, num_tokens: int) -> None:
    w13, w2 = _weights(256, dtype)
    hidden_states = torch.randn(num_tokens, 64).to(dtype)
    actual = SharedExpert(w13, w2)(hidden_states)
    assert_close(actual, shared_expert(hidden_states, w13, w2), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("width", "replica_size"), [(128, 2), (256, 2), (384, 4), (512, 4)])
def test_slices_add_up_to_the_whole(dtype: torch.dtype, width: int, replica_size: int) -> None:
    w13, w2 = _weights(width, dtype)
    hidden_states = torch.randn(9, 64).to(dtype)
    whole = SharedExpert(w13, w2)
    slices = [slice_shared_expert(whole, replica_size, rank) for rank in range(replica_size)]
    assert all(part.is_partial for part in slices)
    assert {part.w13_weight.shape for part in slices} == {(256, 64)}
    outputs = [part(hidden_states).float() for part in slices]
    assert_close(sum(outputs, torch.zeros(9, 64)), shared_expert(hidden_states, w13, w2), dtype)
    for output in outputs[width // 128 :]:
        assert torch.equal(output, torch.zeros(9, 64))


@pytest.mark.parametrize(
    ("width", "replica_size", "is_enabled", "reason"),
    [
        (256, 1, True, "there is one rank"),
        (192, 4, True, "width 192 is not a multiple of 128"),
        (384, 2, True, "makes 3 slices of 128 columns, more than the 2 ranks"),
        (256, 4, False, "switched off"),
    ],
)
def test_whole_where_slices_do_not_apply(
    width: int, replica_size: int, is_enabled: bool, reason: str
) -> None:
    assert reason in (why_not_sliced(width, replica_size, is_enabled) or "")
    whole = SharedExpert(*_weights(width, torch.float32))
    for rank in range(replica_size):
        assert slice_shared_expert(whole, replica_size, rank, is_enabled) is whole
    assert not whole.is_partial


def test_where_slices_apply() -> None:
    assert why_not_sliced(256, 2) is None
    assert why_not_sliced(128, 64) is None


def _quantised(
    fmt: QuantFormat, width: int, activation: QuantFormat | None = None
) -> tuple[SharedExpert, Tensor, Tensor]:
    """A shared expert, and its exact w13 and w2 in fp64."""
    w13: RawMatrix = random_halves(fmt, (), width, 64)
    w2 = random_matrix(fmt, (), 64, width)
    whole = SharedExpert(
        Quantised.of_halves(w13.values, w13.scale, fmt.block_size),
        Quantised(w2.values, w2.scale, fmt.block_size),
        activation=activation,
    )
    exact_w2 = quant_oracle.dequantise(w2.values, w2.scale, *fmt.block_size)
    return whole, exact_halves(w13, fmt, width), exact_w2


# Slices of 128 columns start inside every other of these blocks, or inside most.
LARGE_BLOCKS = [
    replace(FP8_128X128, name="fp8_256x256", block_size=(256, 256)),
    replace(FORMATS["fp8_128x128_ue8m0"], name="fp8_192x192_ue8m0", block_size=(192, 192)),
    replace(FORMATS["fp4_1x32"], name="fp4_1x96", block_size=(1, 96)),
]
each_format = pytest.mark.parametrize("fmt", WEIGHTS + LARGE_BLOCKS, ids=lambda fmt: fmt.name)


@each_format
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=lambda fmt: fmt.name if fmt else "none")
@pytest.mark.parametrize("dtype", DTYPES)
def test_quantised_whole(
    fmt: QuantFormat, activation: QuantFormat | None, dtype: torch.dtype
) -> None:
    """A width at which up starts inside a block of gate's grid."""
    whole, w13, w2 = _quantised(fmt, 160, activation)
    hidden_states = torch.randn(5, 64).to(dtype)
    expected = shared_expert(hidden_states, w13, w2, cast_of(activation))
    assert rel_l2(whole(hidden_states), expected) <= fmt.output_limit


@each_format
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=lambda fmt: fmt.name if fmt else "none")
@pytest.mark.parametrize(("width", "replica_size"), [(128, 2), (384, 3), (512, 6)])
def test_quantised_slices_add_up_to_the_whole(
    fmt: QuantFormat, activation: QuantFormat | None, width: int, replica_size: int
) -> None:
    whole, w13, w2 = _quantised(fmt, width, activation)
    hidden_states = torch.randn(5, 64).bfloat16()
    slices = [slice_shared_expert(whole, replica_size, rank) for rank in range(replica_size)]
    outputs = [part(hidden_states).float() for part in slices]
    expected = shared_expert(hidden_states, w13, w2, cast_of(activation))
    assert rel_l2(sum(outputs, torch.zeros(5, 64)), expected) <= fmt.output_limit
    for output in outputs[width // 128 :]:
        assert torch.equal(output, torch.zeros(5, 64))


@each_format
def test_all_ranks_hold_quantised_slices_of_one_shape(fmt: QuantFormat) -> None:
    whole, _, _ = _quantised(fmt, 384)
    layouts = set()
    for rank in range(5):
        part = slice_shared_expert(whole, 5, rank)
        for matrix in (part.w13_weight, part.w2_weight):
            assert isinstance(matrix, Quantised)
            assert matrix.values.is_contiguous() and matrix.scale.is_contiguous()
            if rank >= 3:
                one = 127 if fmt.is_power_of_two else 1.0
                assert torch.equal(matrix.scale, torch.full_like(matrix.scale, one))
            shapes = matrix.values.shape, matrix.scale.shape, matrix.block_size
            layouts.add((matrix is part.w13_weight, shapes))
    assert len(layouts) == 2


def test_a_cast_without_quantised_weights_is_refused() -> None:
    with pytest.raises(ValueError, match=r"shared expert's are torch\.bfloat16"):
        SharedExpert(*_weights(128, torch.bfloat16), activation=FORMATS["fp8_1x128"])


def test_new_weights_reach_the_slices_in_place() -> None:
    w13, w2 = _weights(256, torch.bfloat16)
    whole = SharedExpert(w13, w2)
    parts = [slice_shared_expert(whole, 3, rank) for rank in range(3)]
    held = [(part.w13_weight, part.w2_weight) for part in parts]
    hidden_states = torch.randn(5, 64).bfloat16()
    w13.copy_(torch.randn_like(w13) / 8)
    w2.copy_(torch.randn_like(w2) / 16)
    for rank, part in enumerate(parts):
        refresh_slice(part, whole, 3, rank)
        assert part.w13_weight is held[rank][0] and part.w2_weight is held[rank][1]
    outputs = [part(hidden_states).float() for part in parts]
    expected = shared_expert(hidden_states, w13, w2)
    assert_close(sum(outputs, torch.zeros(5, 64)), expected, torch.bfloat16)
    assert torch.equal(outputs[2], torch.zeros(5, 64))


@each_format
def test_new_quantised_weights_reach_the_slices_in_place(fmt: QuantFormat) -> None:
    old, _, _ = _quantised(fmt, 256)
    new, w13, w2 = _quantised(fmt, 256)
    hidden_states = torch.randn(5, 64).bfloat16()
    outputs = []
    for rank in range(3):
        part = slice_shared_expert(old, 3, rank)
        held = part.w13_weight.values.data_ptr()
        refresh_slice(part, new, 3, rank)
        assert part.w13_weight.values.data_ptr() == held
        outputs.append(part(hidden_states).float())
    expected = shared_expert(hidden_states, w13, w2)
    assert rel_l2(sum(outputs, torch.zeros(5, 64)), expected) <= fmt.output_limit


def test_a_whole_shared_expert_needs_no_refresh_and_formats_must_agree() -> None:
    whole = SharedExpert(*_weights(256, torch.bfloat16))
    before = whole.w13_weight.clone()
    refresh_slice(whole, SharedExpert(*_weights(256, torch.bfloat16)), 2, 0)
    assert torch.equal(whole.w13_weight, before)
    part = slice_shared_expert(whole, 2, 0)
    with pytest.raises(ValueError, match="float weights cannot take quantised ones"):
        refresh_slice(part, _quantised(FP8_128X128, 256)[0], 2, 0)


def test_four_slices_equal_the_whole_to_the_last_digits() -> None:
    w13, w2 = _weights(512, torch.float32)
    hidden_states = torch.randn(32, 64)
    whole = SharedExpert(w13, w2)
    parts = [slice_shared_expert(whole, 4, rank)(hidden_states) for rank in range(4)]
    expected = shared_expert(hidden_states, w13, w2)
    assert rel_l2(sum(parts, torch.zeros(32, 64)), expected) <= 1e-6
