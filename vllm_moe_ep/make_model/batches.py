"""Token streams, training windows, and the order in which they are seen."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from .architecture import BOS_TOKEN_ID, EOS_TOKEN_ID

if TYPE_CHECKING:
    import torch
    from tokenizers import Tokenizer


def encode_documents(tokenizer: "Tokenizer", texts: Sequence[str]) -> "torch.Tensor":
    """All texts in a row, each closed by the eos token: int64 [num_tokens]."""
    import torch

    token_ids: list[int] = []
    for encoding in tokenizer.encode_batch(list(texts), add_special_tokens=False):
        token_ids += encoding.ids
        token_ids.append(EOS_TOKEN_ID)
    return torch.tensor(token_ids, dtype=torch.int64)


def split_windows(token_ids: "torch.Tensor", window_length: int) -> "torch.Tensor":
    """Cut a stream into windows that start with bos: int64 [num_windows, window_length + 1].

    A prompt also starts with bos and often in the middle of things, so the model should take
    bos for the start of any piece. What is left over at the end (less than a window) is dropped.
    """
    import torch

    num_windows = len(token_ids) // window_length
    pieces = token_ids[: num_windows * window_length].view(num_windows, window_length)
    return torch.cat([torch.full((num_windows, 1), BOS_TOKEN_ID), pieces], dim=1)


def training_batches(
    token_ids: "torch.Tensor", window_length: int, batch_size: int, seed: int
) -> Iterator["torch.Tensor"]:
    """Endless batches, int64 [batch_size, window_length + 1].

    Each pass over the text cuts it at another offset and shuffles the windows.
    """
    import torch

    generator = torch.Generator().manual_seed(seed)
    while True:
        offset = int(torch.randint(window_length, (), generator=generator))
        windows = split_windows(token_ids[offset:], window_length)
        if len(windows) < batch_size:
            raise ValueError(
                f"A batch takes {batch_size} windows of {window_length} tokens, but the text has "
                f"only {len(windows)}: use a longer text."
            )
        order = torch.randperm(len(windows), generator=generator)
        for rows in order.split(batch_size):
            if len(rows) == batch_size:
                yield windows[rows]
