"""The shared experts of a layer behind a device's own linear kernels."""

from torch import Tensor

from vllm_moe_ep.errors import UnsupportedError
from vllm_moe_ep.layers.products import Matrix
from vllm_moe_ep.layers.shared_expert import SharedExpert
from vllm_moe_ep.quant.weight import Quantised
from vllm_moe_ep_kernels.linears import Linears, LinearWeight


class KernelSharedExpert:
    """A quantised ``SharedExpert``, whole or a slice, computed by a ``Linears``.

    The kernels cast rows in their own way: the shared expert's ``activation`` does not apply.

    Args:
        linears: the device's kernels.
        part: its weights, which are copied into the kernels' layout.

    Attributes:
        is_partial: whether outputs must be summed over the replica group, as in ``SharedExpert``.
        num_inexact: numbers that preparing the weights changed.

    Raises:
        UnsupportedError: the weights are not quantised, or there is no kernel for their size.
        ValueError: a scale is no number that the kernels can use.
    """

    def __init__(self, linears: Linears, part: SharedExpert) -> None:
        self.linears = linears
        self.is_partial = part.is_partial
        self.swiglu_limit = part.swiglu_limit
        self.w13 = _prepared(linears, part.w13_weight, True, "the shared expert's w13_weight")
        self.w2 = _prepared(linears, part.w2_weight, False, "the shared expert's w2_weight")
        self.num_inexact = self.w13.num_inexact + self.w2.num_inexact

    def __call__(self, hidden_states: Tensor) -> Tensor:
        """[num_tokens, hidden_size] -> fp32 of the same shape."""
        gate_up = self.linears.linear_raw(hidden_states, self.w13)
        row_weight = gate_up.new_ones(gate_up.shape[0])
        activated = self.linears.swiglu(gate_up, row_weight, self.swiglu_limit)
        return self.linears.linear_raw(activated, self.w2)


def _prepared(linears: Linears, matrix: Matrix, is_gate_up: bool, name: str) -> LinearWeight:
    if not isinstance(matrix, Quantised):
        raise UnsupportedError(
            f"The kernels take quantised weights, but {name} is {matrix.dtype}; compute it by "
            "the host path."
        )
    n, k = matrix.shape[-2:]
    is_fp4 = matrix.values.element_size() == 1 and not matrix.values.is_floating_point()
    if not linears.has_kernel(n, k, matrix.block_size, is_fp4):
        block_n, block_k = matrix.block_size
        raise UnsupportedError(
            f"No kernel for {name} of {n} x {k} in blocks of {block_n} x {block_k}; compute it by "
            "the host path."
        )
    values, scale = matrix.values[None], matrix.scale[None]
    return linears.prepare(values, scale, matrix.block_size, is_gate_up, name)
