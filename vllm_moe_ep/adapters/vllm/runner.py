"""The runner that DeepSeek's MoE layers get when static-ep is chosen: the whole step is ours.

Gate and router stay vLLM's, and so do the shared experts, whose weights vLLM loads, quantises and
reloads. Their outputs go into our layer, which moves the tokens, computes the routed experts, and
adds everything up in one sum over the tensor-parallel ranks.
"""

from collections import Counter
from typing import Any

import torch
from torch import Tensor
from vllm.forward_context import get_forward_context
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.model_executor.layers.fused_moe.runner.shared_experts import SharedExpertsOrder
from vllm.platforms import current_platform

from vllm_moe_ep.adapters.vllm.custom_op import moe_step
from vllm_moe_ep.adapters.vllm.routed_experts import StaticEPRoutedExperts
from vllm_moe_ep.stages import LocalRouting

logger = init_logger("vllm.vllm_moe_ep")


class StaticEPRunner(MoERunner):
    """vLLM's runner, of which construction, gate, router and shared experts remain.

    A layer that static-ep left on vLLM's own experts (see `stock_guard`) runs as in the base class.
    """

    routed_experts: StaticEPRoutedExperts

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.is_ours = self.routed_experts.refusal is None
        shared = self._shared_experts
        self.routed_experts.shared_is_partial = shared is not None and _is_partial(shared._layer)
        self.routed_experts.has_shared = shared is not None
        # vLLM's models halve the range of fp16 activations: it then divides the shared experts'
        # output, and the decoder layers make up for it.
        self._divides_shared = (
            shared is not None and self.routed_experts.params_dtype is torch.float16
        )
        self._was_counted = False

    def forward(
        self,
        hidden_states: Tensor,
        router_logits: Tensor,
        input_ids: Tensor | None = None,
        shared_experts_input: Tensor | None = None,
    ) -> Tensor:
        """[num_tokens, hidden_size] -> the layer's output, complete on every rank."""
        if not self.is_ours:
            return super().forward(hidden_states, router_logits, input_ids, shared_experts_input)
        if current_platform.is_cpu():
            return self._forward_impl(hidden_states, router_logits, None, input_ids)
        name = self._encode_layer_name()
        return torch.ops.vllm.moe_forward(hidden_states, router_logits, None, input_ids, name, 0)

    def _forward_impl(
        self,
        hidden_states: Tensor,
        router_logits: Tensor,
        shared_experts_input: Tensor | None,
        input_ids: Tensor | None = None,
    ) -> Any:
        """Gate, router and shared experts, then our step. Traced on CPU; elsewhere vLLM's opaque
        op calls it, so that the shared experts may run on a stream of their own."""
        if not self.is_ours:
            return super()._forward_impl(
                hidden_states, router_logits, shared_experts_input, input_ids
            )
        # In the order of the base class: on a stream of their own the shared experts start first.
        is_overlapped = self._start_shared_on_stream(hidden_states)
        assert self.gate is not None, "a layer without a gate is refused"
        router_logits, _ = self.gate(hidden_states)
        if self._shared_experts is not None and not is_overlapped:
            self._shared_experts(hidden_states, SharedExpertsOrder.NO_OVERLAP)
        topk_weights, topk_ids = self.router.select_experts(
            hidden_states=hidden_states,
            router_logits=router_logits,
            topk_indices_dtype=self._quant_method.topk_indices_dtype,
            input_ids=input_ids,
        )
        if self.routed_scaling_factor != 1.0 and not self._divides_shared:
            topk_weights = topk_weights * self.routed_scaling_factor
        if current_platform.is_cpu():
            local = self.routed_experts.local_routing(topk_ids, topk_weights)
            shared = self._shared_output(is_overlapped=False)
            return moe_step(hidden_states, topk_weights, topk_ids, shared, self.layer_name, local)
        shared = None
        if self._shared_experts is not None:

            def shared(_: Tensor) -> Tensor:
                return self._shared_output(is_overlapped)

        return self.run_layer(hidden_states, topk_weights, topk_ids, shared, None)

    def _start_shared_on_stream(self, hidden_states: Tensor) -> bool:
        """Whether the shared experts were started on a stream of their own."""
        shared = self._shared_experts
        return shared is not None and shared.maybe_forward_async(hidden_states)

    def _shared_output(self, is_overlapped: bool) -> Any:
        if self._shared_experts is None:
            return None
        if is_overlapped:
            self._shared_experts.wait()
        output = self._shared_experts.output
        return output * (1.0 / self.routed_scaling_factor) if self._divides_shared else output

    def run_layer(
        self,
        hidden_states: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        shared: Any,
        local: LocalRouting | None,
    ) -> Tensor:
        """The step of our layer; shapes and dtypes as in `custom_op.moe_step`."""
        context = get_forward_context()
        experts = self.routed_experts
        if self._was_counted:
            return experts.compute(hidden_states, topk_weights, topk_ids, context, shared, local)
        before = experts.collectives.counts.copy()
        output = experts.compute(hidden_states, topk_weights, topk_ids, context, shared, local)
        self._was_counted = True
        entered: Counter[str] = experts.collectives.counts - before
        logger.info_once(
            "static-ep: collectives of a layer's first step, counted: %s",
            ", ".join(f"{count} {name}" for name, count in sorted(entered.items())) or "none",
        )
        return output


def _is_partial(shared: Any) -> bool:
    """Whether a rank holds some of the shared experts' columns: their outputs must be summed."""
    return bool(shared.down_proj.tp_size > 1)
