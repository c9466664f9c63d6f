"""DeepSeek-V4 on CPU without a Triton that has a CPU backend, as PyPI's has none.

The attention kernels themselves are C++; only small metadata kernels are written in Triton. On
other platforms nothing is hooked.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch

from vllm_moe_ep.adapters.vllm import cures, v4_metadata
from vllm_moe_ep.adapters.vllm.wrapping import MARK, MakeWrapper


def _function_or(plain: Callable[..., Any]) -> MakeWrapper:
    def make_wrapper(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            return (plain if cures.is_active(CURE) else original)(*args, **kwargs)

        return call

    return make_wrapper


def _method_or(plain: Callable[..., Any]) -> MakeWrapper:
    def make_wrapper(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
            if cures.is_active(CURE):
                return plain(*args, **kwargs)
            return original(self, *args, **kwargs)

        return __call__

    return make_wrapper


with_plain_mapping = _function_or(v4_metadata.token_to_request)
with_plain_lengths = _method_or(v4_metadata.prefill_gather_lengths)
with_plain_window = _method_or(v4_metadata.window_slots)
with_plain_chunk = _method_or(v4_metadata.prefill_chunk)
with_plain_slots = _method_or(v4_metadata.compressed_slots)


def is_needed() -> bool:
    """Whether vLLM found no Triton that it can use."""
    from vllm.triton_utils import HAS_TRITON

    return not HAS_TRITON


def _failure() -> str | None:
    return _changed_signature() or _wrong_number()


def _replaced() -> dict[Any, Callable[..., Any]]:
    from vllm.v1.attention.backends.mla import compressor_utils, indexer, sparse_swa
    from vllm.v1.attention.ops import metadata

    return {
        metadata.compute_token_to_req_indices: v4_metadata.token_to_request,
        sparse_swa.ComputePrefillMetadataKernel.__call__: v4_metadata.prefill_gather_lengths,
        sparse_swa.ComputeSWAIndicesAndLensKernel.__call__: v4_metadata.window_slots,
        indexer.BuildPrefillChunkMetadataKernel.__call__: v4_metadata.prefill_chunk,
        compressor_utils.CompressedSlotMappingKernel.__call__: v4_metadata.compressed_slots,
    }


def _changed_signature() -> str | None:
    for hooked, plain in _replaced().items():
        original = getattr(hooked, MARK)
        names = [name for name in inspect.signature(original).parameters if name != "self"]
        if names != list(inspect.signature(plain).parameters):
            return f"vLLM's {original.__qualname__} now takes {', '.join(names)}"
    return None


def _wrong_number() -> str | None:
    """Two requests of 3 and 2 tokens, which are at positions 5 to 7 and 0 to 1."""
    bounds, seq_lens = _ints(0, 3, 5), _ints(8, 2)
    requests = v4_metadata.token_to_request(bounds, torch.full((5,), 9), 5, 5)
    lengths = torch.full((2,), 9, dtype=torch.int32)
    v4_metadata.prefill_gather_lengths(lengths, seq_lens, bounds, _ints(0, 0), 2, 0, 4)
    table = torch.tensor([[7, 3], [5, 0]], dtype=torch.int32)
    compressed = torch.full((5,), 9)
    own_slots = torch.arange(5)
    v4_metadata.compressed_slots(compressed, own_slots, bounds, seq_lens, table, 2, 2, 1, 1)
    found = (requests.tolist(), lengths.tolist(), compressed.tolist())
    wanted = ([0, 0, 0, 1, 1], [6, 2], [6, -1, 7, -1, 10])
    return None if found == wanted else f"its metadata is {found} instead of {wanted}"


def _ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


CURE = cures.Cure(
    name="DeepSeek-V4 metadata",
    gap="vLLM's attention metadata for DeepSeek-V4 needs a Triton with a CPU backend",
    remedy="Serve another model, or install a Triton that has a CPU backend.",
    failure=_failure,
)
