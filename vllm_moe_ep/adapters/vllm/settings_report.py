"""Say at start which settings that somebody set change nothing for this model and layout."""

from collections.abc import Callable
from dataclasses import dataclass

from vllm_moe_ep.envs import OVERRIDE_KEY, PREFIX


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerFacts:
    """What decides whether a setting acts.

    Attributes:
        platform: "cpu", "cuda" or "neuron".
        experts: the setting of that name.
        token_size: data-parallel ranks.
        replica_size: tensor-parallel ranks.
        has_shared: whether layers have shared experts.
        why_flat: why the sum over tensor-parallel ranks takes one step whatever
            `hierarchical_all_reduce` says, or None.
        is_hierarchical: the setting of that name.
        num_stock: MoE layers left on vLLM's own experts.
    """

    platform: str
    experts: str
    token_size: int
    replica_size: int
    has_shared: bool
    why_flat: str | None
    is_hierarchical: bool
    num_stock: int


def idle_settings(given: set[str], facts: LayerFacts) -> list[str]:
    """One sentence for each setting of ``given`` that acts on nothing, in the registry's order."""
    sentences = []
    for name, why_idle in _RULES.items():
        reason = why_idle(facts) if name in given else None
        if reason is not None:
            sentences.append(
                f"{PREFIX}{name.upper()} (or {OVERRIDE_KEY}.{name}) changes nothing here: {reason}."
            )
    return sentences


def _static_only(facts: LayerFacts) -> str | None:
    if facts.platform == "cuda":
        return "on NVIDIA device kernels compute the experts"
    if facts.experts in ("auto", "ragged") and facts.platform == "cpu":
        return "on CPU experts are ragged unless VLLM_MOE_EP_EXPERTS names another way"
    return None


def _gated(facts: LayerFacts) -> str | None:
    if facts.experts in ("dense", "gated", "grouped"):
        return f"VLLM_MOE_EP_EXPERTS={facts.experts} computes steps of all sizes alike"
    return _static_only(facts)


def _capacity(facts: LayerFacts) -> str | None:
    if facts.experts in ("dense", "gated"):
        return f"no expert is grouped with VLLM_MOE_EP_EXPERTS={facts.experts}"
    return _static_only(facts)


def _gathered(facts: LayerFacts) -> str | None:
    return None if facts.token_size > 1 else "without data parallelism no token is gathered"


def _shared(facts: LayerFacts) -> str | None:
    if not facts.has_shared:
        return "the model has no shared experts"
    return None if facts.replica_size > 1 else "there are no tensor-parallel ranks to split over"


def _placed(facts: LayerFacts) -> str | None:
    if facts.token_size * facts.replica_size > 1:
        return None
    return "one rank holds every expert"


def _on_cuda(facts: LayerFacts) -> str | None:
    return None if facts.platform == "cuda" else "it is for NVIDIA"


def _stock(facts: LayerFacts) -> str | None:
    return None if facts.num_stock else "every MoE layer is static-ep's"


def _sum(facts: LayerFacts) -> str | None:
    if facts.replica_size == 1:
        return "there are no tensor-parallel ranks to sum over"
    return facts.why_flat


def _devices(facts: LayerFacts) -> str | None:
    return _sum(facts) if facts.is_hierarchical else "VLLM_MOE_EP_HIERARCHICAL_ALL_REDUCE is off"


def _acts(facts: LayerFacts) -> str | None:
    return None


_RULES: dict[str, Callable[[LayerFacts], str | None]] = {
    "platform": _acts,
    "allow_stock": _stock,
    "experts": _acts,
    "gated_max_rows": _gated,
    "forced_gate": _static_only,
    "shared_slices": _shared,
    "expert_capacity": _capacity,
    "placement": _placed,
    "gather": _gathered,
    "min_capacity": _gathered,
    "cuda_path": _on_cuda,
    "cuda_pass_rows": _on_cuda,
    "hierarchical_all_reduce": _sum,
    "device_size": _devices,
}
"""Every setting of the registry, in its order."""
