"""DeepSeek-V4's attention metadata in plain torch, where vLLM has Triton kernels alone.

The functions take vLLM's arguments and write what its kernels of vllm/v1/attention (0.32.0) are
documented to write. All index tensors are int32 but for slots, which are int64. Without decode
context parallelism, which the CPU has not.
"""

import torch
from torch import Tensor

_PAD = -1


def token_to_request(
    query_start_loc: Tensor, out: Tensor, num_mapped_tokens: int, num_tokens: int
) -> Tensor:
    """Request of each of the first `num_tokens` tokens; 0 from `num_mapped_tokens` on.

    Args:
        query_start_loc: int32 [num_requests + 1], the first token of each request.
        out: int32, written and returned up to `num_tokens`.
    """
    tokens = torch.arange(num_tokens, dtype=torch.int32, device=out.device)
    requests = torch.searchsorted(query_start_loc[1:].contiguous(), tokens, right=True)
    requests = requests.clamp(max=query_start_loc.shape[0] - 2)
    out[:num_tokens] = torch.where(tokens < num_mapped_tokens, requests, 0)
    return out[:num_tokens]


def prefill_gather_lengths(
    prefill_gather_lens: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    replay_start: Tensor,
    num_prefills: int,
    num_decodes: int,
    window_size: int,
) -> None:
    """Keys that each prefilled request's window needs: its query and what the window sees before.

    Args:
        prefill_gather_lens: int32 [num_prefills], written.
        seq_lens, replay_start: int32, one entry per request, decodes first.
    """
    own = slice(num_decodes, num_decodes + num_prefills)
    query_lens = query_start_loc.diff()[own]
    visible = (seq_lens[own] - query_lens - replay_start[own]).clamp(min=0)
    prefill_gather_lens.copy_(query_lens + visible.clamp(max=window_size - 1))


def window_slots(
    swa_indices: Tensor,
    swa_lens: Tensor,
    window_size: int,
    index_width: int,
    left_visible: Tensor,
    right_visible: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    token_to_req_indices: Tensor,
    is_valid_token: Tensor,
    block_table: Tensor,
    block_size: int,
    replay_start: Tensor,
    *,
    num_tokens: int,
    token_offset: int,
    has_image: bool = False,
) -> None:
    """Cache slots of the sliding window of `num_tokens` tokens from `token_offset` on.

    Args:
        swa_indices: int32 [.., .., index_width], the first `num_tokens` rows are written: slots
            from the window's oldest key on, then -1.
        swa_lens: int32, the first `num_tokens` are written: keys in the window.

    Raises:
        NotImplementedError: the tokens belong to an image.
    """
    if has_image:
        raise NotImplementedError("Windows over images have no version in plain torch.")
    tokens = torch.arange(token_offset, token_offset + num_tokens, device=swa_lens.device)
    requests = token_to_req_indices[tokens].long()
    prefix_lens = (seq_lens[: query_start_loc.shape[0] - 1] - query_start_loc.diff())[requests]
    last = prefix_lens + tokens - query_start_loc[requests]
    first = torch.maximum((last - window_size + 1).clamp(min=0), replay_start[requests])
    lengths = torch.where(is_valid_token[tokens], last + 1 - first, 0)
    offsets = torch.arange(index_width, device=swa_lens.device)
    positions = first[:, None] + offsets
    blocks = (positions // block_size).clamp(max=block_table.shape[1] - 1)
    slots = block_table[requests[:, None], blocks] * block_size + positions % block_size
    rows = torch.where(offsets < lengths[:, None], slots, _PAD)
    swa_indices.view(swa_indices.shape[0], -1)[:num_tokens, :index_width] = rows
    swa_lens[:num_tokens] = lengths


def prefill_chunk(
    query_start_loc: Tensor,
    uncompressed_seq_lens: Tensor,
    cu_compressed_seq_lens: Tensor,
    row_start_cu_compressed_seq_lens: Tensor,
    token_to_seq: Tensor,
    cu_compressed_seq_len_ks: Tensor,
    cu_compressed_seq_len_ke: Tensor,
    query_slice_start: int,
    query_slice_stop: int,
    DCP_RANK: int,
    DCP_WORLD: int,
    DCP_INTERLEAVE: int,
    *,
    num_reqs: int,
    COMPRESS_RATIO: int,
) -> None:
    """Rows of compressed keys that each query token may see, of one chunk of requests.

    Args:
        cu_compressed_seq_lens: int32 [num_reqs + 1], running sum of compressed lengths.
        token_to_seq: int32 [total compressed length], written: the request of each key.
        cu_compressed_seq_len_ks, cu_compressed_seq_len_ke: int32 [query_slice_stop -
            query_slice_start], written: first key of each token and one past its last.

    Raises:
        NotImplementedError: keys are spread over ranks.
    """
    if DCP_WORLD > 1:
        raise NotImplementedError("Keys spread over ranks have no version in plain torch.")
    starts, query_lens = query_start_loc[:num_reqs], query_start_loc[: num_reqs + 1].diff()
    tokens = torch.arange(query_slice_start, query_slice_stop, device=query_start_loc.device)
    ends = (starts + query_lens).contiguous()
    requests = torch.searchsorted(ends, tokens.to(ends.dtype), right=True)
    positions = (uncompressed_seq_lens[:num_reqs] - query_lens - starts)[requests] + tokens
    first = row_start_cu_compressed_seq_lens[requests]
    cu_compressed_seq_len_ks.copy_(first)
    cu_compressed_seq_len_ke.copy_(first + (positions + 1) // COMPRESS_RATIO)
    lengths = cu_compressed_seq_lens[: num_reqs + 1].diff()
    numbers = torch.arange(num_reqs, dtype=token_to_seq.dtype, device=token_to_seq.device)
    begin, end = int(cu_compressed_seq_lens[0]), int(cu_compressed_seq_lens[num_reqs])
    token_to_seq[begin:end] = numbers.repeat_interleave(lengths)


def compressed_slots(
    compressed_slot_mapping: Tensor,
    slot_mapping: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    block_size: int,
    compress_ratio: int,
    dcp_world_size: int,
    cp_interleave: int,
) -> None:
    """Where the last token of each `compress_ratio` writes their common key; -1 for the others.

    Args:
        compressed_slot_mapping: int64 [num_tokens], written for the tokens of all requests.
        slot_mapping: int64 [num_tokens], the tokens' own slots; -1 stays -1.
        block_size: compressed keys per block.

    Raises:
        NotImplementedError: keys are spread over ranks.
    """
    if dcp_world_size > 1:
        raise NotImplementedError("Keys spread over ranks have no version in plain torch.")
    num_requests = block_table.shape[0]
    bounds = query_start_loc[: num_requests + 1]
    numbers = torch.arange(num_requests, device=bounds.device)
    requests = numbers.repeat_interleave(bounds.diff())
    first, stop = int(bounds[0]), int(bounds[-1])
    tokens = torch.arange(first, stop, device=bounds.device)
    positions = (seq_lens[:num_requests] - bounds[1:])[requests] + tokens
    keys = positions // compress_ratio
    is_last = ((positions + 1) % compress_ratio == 0) & (slot_mapping[first:stop] != _PAD)
    blocks = (keys // block_size).clamp(0, block_table.shape[1] - 1)
    slots = block_table[requests, blocks].long() * block_size + keys % block_size
    compressed_slot_mapping[first:stop] = torch.where(is_last, slots, _PAD)
