"""Trains the small model from random weights."""

import dataclasses
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from .batches import training_batches
from .optimizer import LayerOptimizer
from .progress import TrainingProgress
from .router_balance import RouterBalancer

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


@dataclasses.dataclass(frozen=True)
class TrainingPlan:
    """One training run.

    Attributes:
        num_steps: optimizer steps.
        batch_size: windows per step.
        window_length: tokens predicted per window.
        matrix_learning_rate, other_learning_rate: peaks, see `LayerOptimizer`; both rise from 0
            and then fall along a cosine to a twentieth.
        warmup_fraction: share of the steps in which they rise.
        bias_rate: how far a router bias moves in a step at peak; it falls like the others.
    """

    num_steps: int
    batch_size: int = 8
    window_length: int = 256
    matrix_learning_rate: float = 0.01
    other_learning_rate: float = 3e-3
    warmup_fraction: float = 0.05
    bias_rate: float = 0.01

    def rate_factor(self, step: int) -> float:
        """Share of the peak rates in `step`, counted from 0."""
        num_warmup_steps = max(1, round(self.num_steps * self.warmup_fraction))
        if step < num_warmup_steps:
            return (step + 1) / num_warmup_steps
        done = (step - num_warmup_steps) / max(1, self.num_steps - num_warmup_steps)
        return 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * done))


def train(
    model: "PreTrainedModel",
    token_ids: "torch.Tensor",
    plan: TrainingPlan,
    seed: int,
    show_progress: bool,
) -> float:
    """Train a freshly built `model` in place; its output projections start from zero.

    Args:
        token_ids: the text, int64 [num_tokens].

    Returns:
        The mean loss over the last twentieth of the steps, in nats per token.

    Raises:
        FloatingPointError: the loss is not finite any more.
    """
    batches = training_batches(token_ids, plan.window_length, plan.batch_size, seed)
    losses = []
    _zero_outputs(model)
    model.train()
    with (
        RouterBalancer(model) as balancer,
        TrainingProgress(plan.num_steps, enabled=show_progress) as progress,
    ):
        for loss in _steps(model, batches, plan, balancer):
            losses.append(loss)
            progress.advance(loss)
    model.eval()
    last_losses = losses[-max(1, plan.num_steps // 20) :]
    return sum(last_losses) / len(last_losses)


def _zero_outputs(model: "PreTrainedModel") -> None:
    """Every layer begins as the identity and every token as equally likely: it learns faster."""
    for name, weight in model.named_parameters():
        if any(part in name for part in ("o_proj", "down_proj", "lm_head")):
            weight.data.zero_()


def _steps(
    model: "PreTrainedModel",
    batches: Iterator["torch.Tensor"],
    plan: TrainingPlan,
    balancer: RouterBalancer,
) -> Iterator[float]:
    optimizer = LayerOptimizer(model, plan.matrix_learning_rate, plan.other_learning_rate)
    for step in range(plan.num_steps):
        loss = _window_loss(model, next(batches))
        if not loss.isfinite():
            raise FloatingPointError(
                f"The training loss is {loss.item()} in step {step + 1} of {plan.num_steps}, so "
                "the training diverged: try another seed."
            )
        loss.backward()
        factor = plan.rate_factor(step)
        optimizer.step(factor)
        balancer.update(plan.bias_rate * factor)
        yield loss.item()


def _window_loss(model: "PreTrainedModel", windows: "torch.Tensor") -> "torch.Tensor":
    """Mean next-token loss in nats, a scalar; windows: int64 [batch, window_length + 1]."""
    import torch

    # bfloat16 products shorten a step by a third; weights and optimizer state stay float32.
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(input_ids=windows[:, :-1], use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), windows[:, 1:].flatten())
