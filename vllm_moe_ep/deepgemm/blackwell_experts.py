"""The routed experts of one rank on Blackwell (SM100). Not run on such a device yet."""

from torch import Tensor

from vllm_moe_ep.deepgemm.expert_gemms import Bf16Gemms, ExpertGemms, Fp8Fp4Gemms, QuantisedFormat
from vllm_moe_ep.deepgemm.experts import DeepGemmExperts, gated_silu
from vllm_moe_ep.deepgemm.hopper_experts import HopperWeights
from vllm_moe_ep.deepgemm.loading import DeepGemm
from vllm_moe_ep.deepgemm.weight_scales import ScaledWeight, prepare_fp8_weight
from vllm_moe_ep.stages import RoutedTokens


class BlackwellExperts:
    """The generic DeepGEMM experts behind the interface of ``HopperExperts``.

    Args:
        weights: bf16, or fp8 with fp32 scales that are powers of two, which are packed anew.

    Raises:
        UnsupportedError: fp32 scales that are no powers of two; names the remedy.
    """

    def __init__(
        self,
        bundle: DeepGemm,
        weights: HopperWeights,
        expert_map: Tensor | None = None,
        swiglu_limit: float | None = None,
    ) -> None:
        self._experts = DeepGemmExperts(_gemms(bundle, weights), gated_silu(swiglu_limit))
        self._expert_map = expert_map
        self._num_local = weights.tensors[0].shape[0]

    def __call__(self, tokens: RoutedTokens, alignment: int) -> Tensor:
        """As ``HopperExperts``; the alignment is the library's own."""
        local = RoutedTokens(
            tokens.hidden_states, self._local_ids(tokens.topk_ids), tokens.topk_weights
        )
        return self._experts(local).values.to(tokens.hidden_states.dtype)

    def _local_ids(self, topk_ids: Tensor) -> Tensor:
        if self._expert_map is None:
            return topk_ids
        is_known = (topk_ids >= 0) & (topk_ids < self._expert_map.shape[0])
        return self._expert_map[topk_ids.where(is_known, 0).long()].where(is_known, -1)


def _gemms(bundle: DeepGemm, weights: HopperWeights) -> ExpertGemms:
    if isinstance(weights.w13, ScaledWeight) and isinstance(weights.w2, ScaledWeight):
        packed = [
            prepare_fp8_weight(name, weight.values, weight.scale, (128, 128), 10)
            for name, weight in (("w13_weight", weights.w13), ("w2_weight", weights.w2))
        ]
        return Fp8Fp4Gemms(bundle, packed[0], packed[1], QuantisedFormat("fp8", "ue8m0"))
    w13, w2 = weights.tensors
    return Bf16Gemms(bundle, w13, w2)
