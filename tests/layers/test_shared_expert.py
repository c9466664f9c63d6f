import pytest
import torch
from oracle import assert_close, shared_expert
from torch import Tensor

from vllm_moe_ep.layers.shared_expert import SharedExpert, slice_shared_expert

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


@pytest.mark.parametrize(("width", "replica_size"), [(256, 1), (192, 4), (384, 2)])
def test_whole_where_slices_do_not_fit(width: int, replica_size: int) -> None:
    whole = SharedExpert(*_weights(width, torch.float32))
    for rank in range(replica_size):
        assert slice_shared_expert(whole, replica_size, rank) is whole
    assert not whole.is_partial
