"""The parts of the training against plain re-computations."""

import math
import random
from collections import Counter
from itertools import islice

import pytest
import torch

from vllm_moe_ep.make_model.architecture import model_config
from vllm_moe_ep.make_model.batches import split_windows, training_batches
from vllm_moe_ep.make_model.checkpoint import build_model
from vllm_moe_ep.make_model.evaluation import score_unigram
from vllm_moe_ep.make_model.optimizer import LayerOptimizer, orthogonalize
from vllm_moe_ep.make_model.router_balance import RouterBalancer
from vllm_moe_ep.make_model.training import TrainingPlan, train


@pytest.mark.parametrize("shape", [(3, 48, 96), (2, 96, 48), (1, 64, 64)])
def test_orthogonalize_keeps_directions_and_evens_their_lengths(
    shape: tuple[int, int, int],
) -> None:
    matrices = torch.randn(shape)
    left, _, right = torch.linalg.svd(matrices, full_matrices=False)
    inner = left.mT @ orthogonalize(matrices) @ right.mT
    lengths = inner.diagonal(dim1=-2, dim2=-1)
    # The smallest singular values of a random matrix are still on their way to 1.
    assert lengths.median().item() == pytest.approx(0.95, abs=0.25)
    assert lengths.max().item() < 1.35
    assert (inner - torch.diag_embed(lengths)).abs().max().item() < 0.1


def test_orthogonalize_of_nothing_is_nothing() -> None:
    assert orthogonalize(torch.zeros(2, 8, 16)).eq(0).all()


def test_windows_hold_the_stream_after_bos() -> None:
    token_ids = torch.arange(10, 10 + 23)
    expected = [[0, *range(10 + 5 * row, 15 + 5 * row)] for row in range(4)]
    assert split_windows(token_ids, 5).tolist() == expected


def test_one_pass_sees_no_window_twice_and_a_seed_repeats_it(seed: int) -> None:
    token_ids = torch.arange(3, 3 + 16 * 9)
    first, again = (
        torch.cat(list(islice(training_batches(token_ids, 8, 4, seed), 4))) for _ in range(2)
    )
    assert torch.equal(first, again)
    seen = first[:, 1:].flatten().tolist()
    assert max(Counter(seen).values()) == 1


def test_a_text_shorter_than_a_batch_is_refused() -> None:
    with pytest.raises(ValueError, match="takes 4 windows of 8 tokens.*only 2"):
        next(training_batches(torch.arange(24), 8, 4, 0))


def test_rates_rise_and_fall() -> None:
    plan = TrainingPlan(100)
    factors = [plan.rate_factor(step) for step in range(100)]
    assert factors[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert factors[5:] == sorted(factors[5:], reverse=True)
    assert 0.05 <= factors[-1] < 0.06
    assert TrainingPlan(1).rate_factor(0) == 1.0


def test_unigram_score_against_counting() -> None:
    train_ids = [random.randrange(50) for _ in range(1000)]
    heldout_ids = [random.randrange(60) for _ in range(100)]
    counts = Counter(train_ids)
    losses = [-math.log((counts[i] + 1) / (1000 + 2048)) for i in heldout_ids]
    score = score_unigram(torch.tensor(train_ids), torch.tensor(heldout_ids))
    assert score.nats_per_token == pytest.approx(sum(losses) / 100)
    assert score.bits_per_byte(100, 300) == pytest.approx(sum(losses) / 100 / math.log(2) / 3)


def test_biases_move_against_the_load(seed: int) -> None:
    model = build_model(model_config("float32"), seed)
    router = model.model.layers[1].mlp.gate
    with RouterBalancer(model) as balancer, torch.no_grad():
        topk_ids = router(torch.randn(50, 256))[2]
        balancer.update(0.5)
        loads = Counter(topk_ids.flatten().tolist())
        mean = 50 * 4 / 16
        expected = [0.5 * ((mean > loads[e]) - (mean < loads[e])) for e in range(16)]
        assert router.e_score_correction_bias.tolist() == expected
        balancer.update(0.5)
        assert router.e_score_correction_bias.tolist() == expected


def test_every_weight_is_stepped_once(seed: int) -> None:
    model = build_model(model_config("float32"), seed)
    optimizer = LayerOptimizer(model, 0.01, 0.001)
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    for weight in model.parameters():
        weight.grad = torch.randn_like(weight)
    optimizer.step(1.0)
    for name, weight in model.named_parameters():
        assert weight.grad is None, name
        change = weight.detach() - before[name]
        is_matrix = "layers" in name and "norm" not in name and "gate.weight" not in name
        if is_matrix:
            rows, columns = change.shape[-2:]
            rows //= 2 if name.endswith("gate_up_proj") else 1
            norms = torch.linalg.matrix_norm(change.reshape(-1, rows, columns), 2)
            limit = 0.01 * max(1.0, rows / columns) ** 0.5
            assert norms.max() < 1.35 * limit and norms.min() > 0.6 * limit, name
        else:
            assert change.abs().max().item() == pytest.approx(0.001, rel=0.01), name


def test_training_learns_a_repeating_text(seed: int) -> None:
    model = build_model(model_config("float32"), seed)
    token_ids = torch.arange(100, 132).repeat(20)
    plan = TrainingPlan(12, batch_size=4, window_length=32)
    assert train(model, token_ids, plan, seed, show_progress=False) < math.log(32) / 2
    assert all(layer.mlp.gate.e_score_correction_bias.any() for layer in model.model.layers[1:])
