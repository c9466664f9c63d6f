"""The custom op through which vLLM's traced model calls the layer.

The op is opaque to torch.compile: what it does depends on the step (row counts of other ranks,
which experts were hit), while the graph around it does not. It finds its layer by name in
vLLM's forward context, as vLLM's own MoE ops do.
"""

import torch
from vllm.forward_context import get_forward_context

_library = torch.library.Library("vllm_moe_ep", "FRAGMENT")
_library.define(
    "routed_experts(Tensor hidden_states, Tensor topk_weights, Tensor topk_ids, str layer_name,"
    " Tensor? local_weights=None, Tensor? local_slots=None) -> Tensor",
    tags=(torch.Tag.needs_fixed_stride_order,),
)


def _routed_experts(
    hidden_states: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    layer_name: str,
    local_weights: torch.Tensor | None = None,
    local_slots: torch.Tensor | None = None,
) -> torch.Tensor:
    context = get_forward_context()
    layer = context.no_compile_layers[layer_name].routed_experts
    if local_slots is not None and hidden_states.shape[0] <= layer.max_aliased_rows:
        return layer.packed_shard.fused.fused(hidden_states, local_slots, local_weights)
    return layer.compute(hidden_states, topk_weights, topk_ids, context)


def _routed_experts_fake(
    hidden_states: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    layer_name: str,
    local_weights: torch.Tensor | None = None,
    local_slots: torch.Tensor | None = None,
) -> torch.Tensor:
    return torch.empty_like(hidden_states, memory_format=torch.contiguous_format)


for _key in ("CPU", "CUDA"):
    _library.impl("routed_experts", _routed_experts, _key)
_library._register_fake("routed_experts", _routed_experts_fake)

routed_experts = torch.ops.vllm_moe_ep.routed_experts
"""(hidden_states [num_tokens, hidden_size], topk_weights and topk_ids [num_tokens, top_k],
layer_name) -> [num_tokens, hidden_size] in the activations' dtype: this rank's routed sum, not
yet added up over tensor-parallel ranks.

With the slots and weights of `layers.fused_experts.LocalRouting` a step of few rows goes straight
to the grouped kernel; rows without a local expert then hold garbage."""
