"""Copy each token's row to the rows of its pairs, as it is or cast to fp8."""

from torch import Tensor

from vllm_moe_ep_kernels.reference.quantise import quantise

MAX_E4M3 = 448.0
GROUP_SIZE = 128


def scatter_rows(hidden_states: Tensor, row_of_pair: Tensor, out: Tensor) -> None:
    """out[row_of_pair[t, k]] = hidden_states[t]; -1 copies nothing, other rows stay untouched.

    Args:
        hidden_states: [num_tokens, width].
        row_of_pair: int32 [num_tokens, top_k].
        out: [rows, width], same dtype.
    """
    tokens, rows = _routed(row_of_pair)
    out[rows] = hidden_states[tokens]


def scatter_rows_fp8(
    hidden_states: Tensor, row_of_pair: Tensor, out: Tensor, scale: Tensor
) -> None:
    """The same with each group of 128 columns over its own scale, rounded to fp8.

    Args:
        hidden_states: bf16 [num_tokens, width], width a multiple of 128.
        row_of_pair: int32 [num_tokens, top_k].
        out: float8_e4m3fn [rows, width].
        scale: fp32 [rows, width / 128], any strides.
    """
    tokens, rows = _routed(row_of_pair)
    values, scales = quantise(hidden_states, (1, GROUP_SIZE), MAX_E4M3, False, False)
    out[rows] = values[tokens]
    scale[rows] = scales[tokens]


def _routed(row_of_pair: Tensor) -> tuple[Tensor, Tensor]:
    """Token and row of each pair that has one."""
    tokens, slots = (row_of_pair >= 0).nonzero(as_tuple=True)
    return tokens, row_of_pair[tokens, slots].long()
