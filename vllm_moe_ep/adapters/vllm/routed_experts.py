"""The experts module that DeepSeek's MoE layers get when static-ep is chosen.

It holds the expert weights as vLLM loads them, and the layer that is built over them. The layer's
step, shared experts and sums included, is called by `runner.StaticEPRunner`.
"""

from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.forward_context import ForwardContext
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase

from vllm_moe_ep.adapters.vllm import cuda_method, engine_config, stock_guard
from vllm_moe_ep.adapters.vllm.capacity import largest_capacity, step_capacity
from vllm_moe_ep.adapters.vllm.checked_experts import CheckedRoutedExperts
from vllm_moe_ep.adapters.vllm.expert_format import expert_format
from vllm_moe_ep.adapters.vllm.groups import layer_collectives
from vllm_moe_ep.adapters.vllm.quant_method import StaticEPMethod
from vllm_moe_ep.adapters.vllm.quantised_method import method_for
from vllm_moe_ep.collectives import TorchDistributed
from vllm_moe_ep.config import MoEConfig
from vllm_moe_ep.layers.ep_layer import EPLayer, SharedExperts
from vllm_moe_ep.layers.expert_shard import ExpertShard
from vllm_moe_ep.layers.fused_experts import alias_foreign
from vllm_moe_ep.layers.strategy_experts import StrategyExperts
from vllm_moe_ep.placement import LocalExperts
from vllm_moe_ep.stages import LocalRouting


class StaticEPRoutedExperts(CheckedRoutedExperts):
    """vLLM's `RoutedExperts` (weights and their loading) computed by the static EP layer.

    Attributes:
        refusal: why this layer stays on vLLM's own experts; None when it is ours.
        has_shared: whether the layer has shared experts.
        shared_is_partial: whether each tensor-parallel rank computes a part of them.
        ep_layer: the layer, built once the weights are loaded.
        packed_shard: the experts of vLLM's grouped CPU kernel, where it takes whole steps of few
            rows.
    """

    quant_method: FusedMoEMethodBase
    _expert_map: torch.Tensor | None

    def __init__(self, *args: Any, refusal: str | None, **kwargs: Any) -> None:
        # Both are read by _get_quant_method, which the base constructor calls.
        self.refusal = refusal
        self.settings = engine_config.settings_of(get_current_vllm_config())
        super().__init__(*args, **kwargs)
        vllm_config = get_current_vllm_config()
        self.capture_sizes = vllm_config.compilation_config.cudagraph_capture_sizes or []
        self.has_dummy_weights = vllm_config.load_config.load_format == "dummy"
        scheduler_config = vllm_config.scheduler_config
        self.max_num_tokens = largest_capacity(
            scheduler_config.max_num_batched_tokens, self.settings.min_capacity
        )
        self.has_shared = self.shared_is_partial = False
        self.ep_layer: EPLayer | None = None
        self.packed_shard: ExpertShard | None = None
        self._held: list[torch.Tensor | None] = []

    def _get_quant_method(
        self, prefix: str, quant_config: Any, moe_config: Any
    ) -> FusedMoEMethodBase:
        if cuda_method.is_chosen(self.settings):
            self.refusal = self.refusal or cuda_method.format_refusal(
                quant_config, self.params_dtype, prefix
            )
            if self.refusal is None:
                return cuda_method.make_method(quant_config, moe_config, prefix)
        else:
            found = expert_format(quant_config, prefix, self.params_dtype)
            self.refusal = self.refusal or found.refusal
            if self.refusal is None:
                return method_for(found, moe_config, quant_config)
        stock_guard.allow_stock(prefix, self.refusal, moe_config)
        return super()._get_quant_method(prefix, quant_config, moe_config)

    @property
    def placement(self) -> LocalExperts:
        """This rank's experts, as vLLM placed them."""
        if self._expert_map is None:
            return LocalExperts(self.global_num_experts, tuple(range(self.global_num_experts)))
        return LocalExperts.from_expert_map(self._expert_map.tolist())

    @property
    def groups_summary(self) -> str:
        """How experts and tokens are spread over ranks, for the log."""
        parts = [f"{self.local_num_experts} of {self.global_num_experts} experts on this rank"]
        if self.has_shared and self.moe_config.tp_size > 1:
            how = "split over" if self.shared_is_partial else "whole on each of"
            parts.append(f"shared experts {how} {self.moe_config.tp_size} ranks")
        return ", ".join([*parts, self.collectives.summary])

    @property
    def collectives(self) -> TorchDistributed:
        """What this layer's ranks exchange in a step."""
        return layer_collectives(with_sum=not self.moe_config.skip_final_all_reduce)

    @property
    def moe_shape(self) -> MoEConfig:
        """The layer's shape, as the layer itself takes it."""
        return MoEConfig(
            num_experts=self.global_num_experts,
            top_k=self.top_k,
            hidden_size=self.hidden_size,
            moe_intermediate_size=self.intermediate_size_per_partition,
            max_num_tokens=self.max_num_tokens,
            swiglu_limit=self.swiglu_limit,
        )

    def build_layer(self) -> None:
        """Build the layer over the loaded weights, which it holds by reference."""
        assert isinstance(self.quant_method, StaticEPMethod)
        self.require_loaded()
        config = self.moe_shape
        if cuda_method.is_chosen(self.settings):
            # Only here: it needs Triton and vLLM's kernels for GPUs.
            from vllm_moe_ep.adapters.vllm import cuda_experts

            self.ep_layer = cuda_experts.build_layer(self, config)
            return
        ep_config = engine_config.ep_config_of(self.settings)
        linears = self.quant_method.expert_weights(self, config)
        experts = StrategyExperts(config, self.placement, linears, ep_config)
        self.ep_layer = EPLayer(config, experts, self.collectives, ep_config)
        if experts.shard.fused is not None and self.collectives.token_size == 1:
            self.packed_shard = experts.shard
        self._held = self._parameters_in_use()

    def _parameters_in_use(self) -> list[torch.Tensor | None]:
        assert isinstance(self.quant_method, StaticEPMethod)
        return [self._parameters[name] for name in self.quant_method.parameter_names]

    def _follow_parameters(self) -> None:
        """Build anew over other parameters: vLLM swaps them after it has reloaded the weights.

        It loads into temporary parameters, has them processed, which builds the layer, copies
        the outcome into the first ones and puts those back.
        """
        if not self._held:
            return
        in_use = self._parameters_in_use()
        if any(now is not held for now, held in zip(in_use, self._held, strict=True)):
            self.build_layer()

    def local_routing(
        self, topk_ids: torch.Tensor, topk_weights: torch.Tensor
    ) -> list[torch.Tensor] | None:
        """The parts of a `LocalRouting`, where vLLM's grouped kernel takes small steps by it.

        Traced, these few operations on ids cost far less than inside the opaque op.
        """
        if self.packed_shard is None:
            return None
        local = alias_foreign(topk_ids, topk_weights, self.packed_shard)
        return [local.slots, local.weights, local.has_local]

    def compute(
        self,
        hidden_states: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        context: ForwardContext,
        shared: SharedExperts | None = None,
        local: LocalRouting | None = None,
    ) -> torch.Tensor:
        """Output of one step; shapes and dtypes as in `custom_op.moe_step`."""
        if self.ep_layer is None:
            raise RuntimeError(f"{self.layer_name} was called before its weights were loaded.")
        self._follow_parameters()
        num_tokens = hidden_states.shape[0]
        return self.ep_layer.forward(
            hidden_states,
            topk_ids,
            topk_weights,
            capacity=step_capacity(num_tokens, context.dp_metadata, self.settings.min_capacity),
            valid=_valid_rows(context, num_tokens),
            shared=shared,
            shared_is_partial=self.shared_is_partial,
            local=local,
        )


def _valid_rows(context: ForwardContext, num_tokens: int) -> torch.Tensor | None:
    """bool [num_tokens], False in padding and in dummy steps; None when every row is real.

    Only data parallelism fills whole steps with padding. Without it the look at the mask costs
    more than the few padded rows, whose output vLLM drops. On a GPU the mask is not looked at:
    its values must not travel to the host.
    """
    is_padding = context.is_padding
    if (
        context.dp_metadata is None
        or is_padding is None
        or is_padding.shape[0] != num_tokens
        or (is_padding.device.type == "cpu" and not is_padding.any())
    ):
        return None
    return ~is_padding
