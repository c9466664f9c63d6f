"""How well a model predicts the held-out text."""

import dataclasses
import math
from typing import TYPE_CHECKING

from .architecture import VOCAB_SIZE
from .batches import split_windows

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

_WINDOW_LENGTH = 512
_BATCH_SIZE = 8


@dataclasses.dataclass(frozen=True)
class HeldoutScore:
    """Mean loss over the held-out tokens, with at most 512 tokens of context.

    Attributes:
        nats_per_token: mean negative log-likelihood.
    """

    nats_per_token: float

    @property
    def perplexity(self) -> float:
        """exp of the mean negative log-likelihood."""
        return math.exp(self.nats_per_token)

    def bits_per_byte(self, num_tokens: int, num_bytes: int) -> float:
        """The loss spread over the bytes of the text."""
        return self.nats_per_token / math.log(2) * num_tokens / num_bytes


def score_heldout(model: "PreTrainedModel", token_ids: "torch.Tensor") -> HeldoutScore:
    """Score a text, int64 [num_tokens], in windows that each start with bos."""
    import torch

    windows = split_windows(token_ids, _WINDOW_LENGTH)
    total = 0.0
    model.eval()
    with torch.no_grad():
        for rows in windows.split(_BATCH_SIZE):
            logits = model(input_ids=rows[:, :-1], use_cache=False).logits
            total += torch.nn.functional.cross_entropy(
                logits.float().flatten(0, 1), rows[:, 1:].flatten(), reduction="sum"
            ).item()
    return HeldoutScore(total / windows[:, 1:].numel())


def score_unigram(train_ids: "torch.Tensor", heldout_ids: "torch.Tensor") -> HeldoutScore:
    """The score of the training text's token frequencies, each count raised by one."""
    counts = train_ids.bincount(minlength=VOCAB_SIZE).double() + 1
    losses = -(counts / counts.sum()).log()[heldout_ids]
    return HeldoutScore(losses.mean().item())
