"""One rank's slice of vllm-neuron's shared expert, in the kernels' layout.

``DeepseekV4SharedExpert`` splits the expert over a group that is smaller than the EP group, so that
each slice is held by several EP ranks. Summed over all EP ranks, each holder adds its share.
"""

from typing import Any

import torch
from torch import Tensor, nn

from vllm_moe_ep.adapters.neuron.expert_weights import finite_codes
from vllm_moe_ep.errors import UnsupportedError
from vllm_moe_ep_kernels.linears import LinearWeight
from vllm_moe_ep_kernels.nki.linears import NkiLinears

_BLOCK = (128, 128)
_ATTRIBUTES = ("shared_group_size", "swiglu_limit")
_MATRICES = ("w1", "w3", "w2")


class SharedSlice(nn.Module):
    """Weights as buffers that follow the model's device; computes this rank's share of the sum.

    Args:
        linears: the kernels.
        w13, w2: prepared by them.
        swiglu_limit: clamp of the activation, 0 for none.
        num_holders: EP ranks that hold this slice.
    """

    def __init__(
        self,
        linears: NkiLinears,
        w13: LinearWeight,
        w2: LinearWeight,
        swiglu_limit: float,
        num_holders: int,
    ) -> None:
        super().__init__()
        self.linears, self.swiglu_limit, self.num_holders = linears, swiglu_limit, num_holders
        self.num_inexact = w13.num_inexact + w2.num_inexact
        self._weights = {"w13": w13, "w2": w2}
        for name, weight in self._weights.items():
            self.register_buffer(f"{name}_codes", weight.codes, persistent=False)
            self.register_buffer(f"{name}_scales", weight.scales, persistent=False)

    def overwrite(self, other: "SharedSlice") -> None:
        """Take the numbers of another in place: compiled graphs hold these buffers."""
        for name, buffer in self.named_buffers():
            buffer.copy_(other.get_buffer(name))
        self.num_inexact = other.num_inexact

    def forward(self, rows: Tensor) -> Tensor:
        """fp32 [rows, hidden_size], to be summed over all EP ranks."""
        gate_up = self.linears.linear_raw(rows, self._weight("w13"))
        share = gate_up.new_full((gate_up.shape[0],), 1 / self.num_holders)
        activated = self.linears.swiglu(gate_up, share, max(self.swiglu_limit, 0.0) or None)
        return self.linears.linear_raw(activated, self._weight("w2"))

    def _weight(self, name: str) -> LinearWeight:
        shape = self._weights[name]
        return LinearWeight(
            self.get_buffer(f"{name}_codes"),
            self.get_buffer(f"{name}_scales"),
            shape.num_experts,
            shape.n,
            shape.k,
            shape.block_size,
            shape.is_fp4,
            shape.is_interleaved,
        )


def why_not_sliced(shared: Any, ep_degree: int, num_cores: int = 2) -> str | None:
    """Why the shared expert stays vllm-neuron's own, or None."""
    parameters = [f"{name}_{part}" for name in _MATRICES for part in ("weight", "scale")]
    missing = [name for name in (*parameters, *_ATTRIBUTES) if not hasattr(shared, name)]
    if missing:
        return f"it has no {' and no '.join(missing)}: another version of vllm-neuron?"
    if ep_degree % shared.shared_group_size:
        return f"its {shared.shared_group_size} slices do not divide {ep_degree} EP ranks"
    (width, hidden_size), linears = shared.w1_weight.shape, NkiLinears(num_cores)
    for n, k in ((2 * width, hidden_size), (hidden_size, width)):
        if width % _BLOCK[0] or not linears.has_kernel(n, k, _BLOCK, False):
            return f"there is no kernel for a slice of {n} x {k}"
    return None


def prepared_slice(shared: Any, ep_degree: int, num_cores: int = 2) -> SharedSlice:
    """Lay out loaded weights, on the device that they are on.

    Raises:
        UnsupportedError: a weight or scale holds no finite number.
    """
    linears = NkiLinears(num_cores)
    codes = [finite_codes(getattr(shared, f"{name}_weight")) for name in _MATRICES]
    scales = [getattr(shared, f"{name}_scale").detach().cpu().float() for name in _MATRICES]
    try:
        w13 = linears.prepare(
            torch.cat(codes[:2])[None],
            torch.cat(scales[:2])[None],
            _BLOCK,
            is_gate_up=True,
            name="the shared expert's w1_weight followed by w3_weight",
        )
        w2 = linears.prepare(codes[2][None], scales[2][None], _BLOCK, name="the shared w2_weight")
    except ValueError as error:
        raise UnsupportedError(str(error)) from error
    holders = ep_degree // shared.shared_group_size
    part = SharedSlice(linears, w13, w2, float(shared.swiglu_limit), holders)
    return part.to(shared.w1_weight.device)
