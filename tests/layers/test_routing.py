import pytest
import torch

from vllm_moe_ep.layers.routing import mask_padding, normalise_topk_ids
from vllm_moe_ep.stages import RoutedTokens

NUM_EXPERTS = 100
SIGNED = [torch.int8, torch.int16, torch.int32, torch.int64]
UNSIGNED = [torch.uint8, torch.uint16, torch.uint32, torch.uint64]


@pytest.mark.parametrize("dtype", SIGNED + UNSIGNED)
def test_every_integer_dtype_keeps_its_experts(dtype: torch.dtype) -> None:
    ids = torch.randint(0, NUM_EXPERTS, (7, 4))
    normal = normalise_topk_ids(ids.to(dtype), NUM_EXPERTS)
    assert normal.dtype == torch.int32
    assert torch.equal(normal, ids.int())


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (-1, torch.int8),
        (-2, torch.int32),
        (NUM_EXPERTS, torch.int32),
        (NUM_EXPERTS + 7, torch.int64),
        (2**32 + 3, torch.int64),
        (-(2**32) + 3, torch.int64),
        (2**63 - 1, torch.int64),
        (2**32 - 1, torch.uint32),
        (2**64 - 1, torch.uint64),
    ],
)
def test_ids_without_an_expert_become_minus_one(value: int, dtype: torch.dtype) -> None:
    ids = torch.tensor([[3, value], [value, 99]], dtype=dtype)
    assert normalise_topk_ids(ids, NUM_EXPERTS).tolist() == [[3, -1], [-1, 99]]


def test_strided_ids() -> None:
    wide = torch.randint(0, NUM_EXPERTS, (5, 8))
    assert torch.equal(normalise_topk_ids(wide[:, ::2], NUM_EXPERTS), wide[:, ::2].int())
    assert torch.equal(normalise_topk_ids(wide.t(), NUM_EXPERTS), wide.t().int())


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint32, torch.uint8])
def test_mask_padding(dtype: torch.dtype) -> None:
    ids = torch.tensor([[1, 2], [3, 4], [5, 6]]).to(dtype)
    weights = torch.tensor([[0.5, torch.nan]] * 3)
    tokens = RoutedTokens(torch.randn(3, 8), ids, weights)
    masked = mask_padding(tokens, torch.tensor([True, False, True]))
    assert masked.hidden_states is tokens.hidden_states
    assert masked.topk_ids.tolist() == [[1, 2], [-1, -1], [5, 6]]
    assert masked.topk_weights[1].tolist() == [0.0, 0.0]
    assert masked.topk_weights[::2, 0].tolist() == [0.5, 0.5]
    assert ids.tolist() == [[1, 2], [3, 4], [5, 6]]
