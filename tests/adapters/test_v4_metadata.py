"""DeepSeek-V4's attention metadata in plain torch, against loops over requests and tokens."""

import random
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from vllm_moe_ep.adapters.vllm import v4_metadata

BLOCK = 4
WINDOW = 6


@dataclass(frozen=True)
class Batch:
    """Requests in random states: `query_lens` new tokens after `prefix_lens` old ones."""

    prefix_lens: list[int]
    query_lens: list[int]
    block_table: Tensor

    @property
    def bounds(self) -> Tensor:
        sums = [sum(self.query_lens[:end]) for end in range(len(self.query_lens) + 1)]
        return ints(*sums)

    @property
    def seq_lens(self) -> Tensor:
        return ints(*(a + b for a, b in zip(self.prefix_lens, self.query_lens, strict=True)))

    @property
    def tokens(self) -> list[tuple[int, int]]:
        """(request, position) of every new token."""
        return [
            (request, self.prefix_lens[request] + number)
            for request, length in enumerate(self.query_lens)
            for number in range(length)
        ]


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def make_batch() -> Batch:
    num_requests = random.randint(1, 6)
    table = torch.randperm(num_requests * 20)[: num_requests * 16].view(num_requests, 16)
    return Batch(
        [random.choice([0, random.randint(1, 30)]) for _ in range(num_requests)],
        [random.randint(1, 30) for _ in range(num_requests)],
        table.to(torch.int32),
    )


def slot(batch: Batch, request: int, key: int) -> int:
    return int(batch.block_table[request, key // BLOCK]) * BLOCK + key % BLOCK


each_time = pytest.mark.parametrize("_", range(5))


@each_time
def test_request_of_each_token(_: int) -> None:
    batch = make_batch()
    own = [request for request, _ in batch.tokens]
    out = torch.full((len(own) + 9,), 77, dtype=torch.int32)
    found = v4_metadata.token_to_request(batch.bounds, out, len(own), len(own) + 5)
    assert found.tolist() == [*own, 0, 0, 0, 0, 0]
    assert out[len(own) + 5 :].tolist() == [77] * 4


@each_time
def test_prefill_gather_lengths(_: int) -> None:
    batch = make_batch()
    num_decodes = random.randrange(len(batch.query_lens))
    replay = [random.randint(0, prefix) for prefix in batch.prefix_lens]
    found = torch.full((len(replay) - num_decodes,), 77, dtype=torch.int32)
    v4_metadata.prefill_gather_lengths(
        found, batch.seq_lens, batch.bounds, ints(*replay), len(found), num_decodes, WINDOW
    )
    expected = [
        query + min(prefix - start, WINDOW - 1)
        for query, prefix, start in zip(batch.query_lens, batch.prefix_lens, replay, strict=True)
    ]
    assert found.tolist() == expected[num_decodes:]


@each_time
def test_window_slots(_: int) -> None:
    batch = make_batch()
    offset = random.randrange(len(batch.tokens))
    rows = batch.tokens[offset:]
    valid = torch.rand(len(batch.tokens)) < 0.8
    replay = [random.randint(0, prefix) for prefix in batch.prefix_lens]
    width = WINDOW + 2
    indices = torch.full((len(rows) + 1, 1, width), 77, dtype=torch.int32)
    lengths = torch.full((len(rows) + 1,), 77, dtype=torch.int32)
    requests = ints(*(request for request, _ in batch.tokens))
    v4_metadata.window_slots(
        indices, lengths, WINDOW, width, lengths, lengths, batch.bounds, batch.seq_lens, requests,
        valid, batch.block_table, BLOCK, ints(*replay), num_tokens=len(rows), token_offset=offset,
    )  # fmt: skip
    for row, (request, position) in enumerate(rows):
        first = max(position - WINDOW + 1, 0, replay[request])
        keys = range(first, position + 1) if valid[offset + row] else ()
        expected = [slot(batch, request, key) for key in keys]
        assert lengths[row] == len(expected)
        assert indices[row, 0].tolist() == expected + [-1] * (width - len(expected))
    assert (indices[len(rows) :] == 77).all() and lengths[-1] == 77


@each_time
def test_prefill_chunk(_: int) -> None:
    batch = make_batch()
    ratio = random.choice([1, 4])
    compressed = [int(length) // ratio for length in batch.seq_lens]
    sums = ints(*(sum(compressed[:end]) for end in range(len(compressed) + 1)))
    first = random.randrange(len(batch.tokens))
    stop = random.randint(first, len(batch.tokens))
    requests = torch.full((sum(compressed),), 77, dtype=torch.int32)
    starts, ends = (torch.full((stop - first,), 77, dtype=torch.int32) for _ in range(2))
    v4_metadata.prefill_chunk(
        batch.bounds, batch.seq_lens, sums, sums, requests, starts, ends, first, stop, 0, 1, 1,
        num_reqs=len(compressed), COMPRESS_RATIO=ratio,
    )  # fmt: skip
    own = [request for request, length in enumerate(compressed) for _ in range(length)]
    assert requests.tolist() == own
    for row, (request, position) in enumerate(batch.tokens[first:stop]):
        assert starts[row] == sums[request]
        assert ends[row] == sums[request] + (position + 1) // ratio


@each_time
def test_compressed_slots(_: int) -> None:
    batch = make_batch()
    own_slots = torch.arange(len(batch.tokens) + 3)
    own_slots[torch.rand(len(own_slots)) < 0.2] = -1
    found = torch.full((len(own_slots),), 77)
    v4_metadata.compressed_slots(
        found, own_slots, batch.bounds, batch.seq_lens, batch.block_table, BLOCK, 4, 1, 1
    )
    for token, (request, position) in enumerate(batch.tokens):
        is_written = position % 4 == 3 and own_slots[token] >= 0
        assert found[token] == (slot(batch, request, position // 4) if is_written else -1)
    assert (found[len(batch.tokens) :] == 77).all()


def test_what_has_no_version_in_plain_torch_says_so() -> None:
    nothing = torch.zeros(0, dtype=torch.int32)
    with pytest.raises(NotImplementedError, match="images"):
        v4_metadata.window_slots(
            *[nothing] * 2, 1, 1, *[nothing] * 7, 1, nothing,
            num_tokens=0, token_offset=0, has_image=True,
        )  # fmt: skip
    with pytest.raises(NotImplementedError, match="over ranks"):
        v4_metadata.compressed_slots(*[nothing] * 5, 1, 4, 2, 1)
    with pytest.raises(NotImplementedError, match="over ranks"):
        v4_metadata.prefill_chunk(*[nothing] * 7, 0, 0, 0, 2, 1, num_reqs=0, COMPRESS_RATIO=4)
