"""The custom op through which vLLM's traced model runs a layer's step.

The op is opaque to torch.compile: what it does depends on the step (row counts of other ranks,
which experts were hit), while the graph around it does not. It finds its layer by name in
vLLM's forward context, as vLLM's own MoE ops do.
"""

import torch
from vllm.forward_context import get_forward_context

from vllm_moe_ep.stages import LocalRouting

_library = torch.library.Library("vllm_moe_ep", "FRAGMENT")
_library.define(
    "moe_step(Tensor hidden_states, Tensor topk_weights, Tensor topk_ids, Tensor? shared,"
    " str layer_name, Tensor[]? local) -> Tensor",
    tags=(torch.Tag.needs_fixed_stride_order,),
)


def _moe_step(
    hidden_states: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    shared: torch.Tensor | None,
    layer_name: str,
    local: list[torch.Tensor] | None,
) -> torch.Tensor:
    context = get_forward_context()
    runner = context.no_compile_layers[layer_name]
    routing = None if local is None else LocalRouting(*local)
    return runner.run_layer(hidden_states, topk_weights, topk_ids, shared, routing)


def _moe_step_fake(
    hidden_states: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    shared: torch.Tensor | None,
    layer_name: str,
    local: list[torch.Tensor] | None,
) -> torch.Tensor:
    return torch.empty_like(hidden_states, memory_format=torch.contiguous_format)


_library.impl("moe_step", _moe_step, "CPU")
_library._register_fake("moe_step", _moe_step_fake)

moe_step = torch.ops.vllm_moe_ep.moe_step
"""(hidden_states [num_tokens, hidden_size], topk_weights and topk_ids [num_tokens, top_k], the
shared experts' output or None, layer_name, the parts of a `LocalRouting` or None) -> the layer's
output [num_tokens, hidden_size] in the activations' dtype, complete on every rank."""
