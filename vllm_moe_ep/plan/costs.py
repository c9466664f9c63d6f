"""The cost model: what a layer, a rank and a step hold, read and send. See docs/static-ep.md.

Routing is taken as uniform: each token chooses top_k different experts, all choices alike.
Rows are those of all token ranks together.
"""

from dataclasses import dataclass

from vllm_moe_ep.device_groups import why_flat
from vllm_moe_ep.layers.gather import row_bytes
from vllm_moe_ep.layers.shared_expert import SLICE_WIDTH, why_not_sliced
from vllm_moe_ep.layers.strategy_experts import automatic_capacity
from vllm_moe_ep.plan.model import WEIGHT_BYTES, ModelShape
from vllm_moe_ep.plan.platforms import Platform

_FP32_BYTES = 4
_BF16_BYTES = 2
_INT32_BYTES = 4


@dataclass(frozen=True, slots=True)
class Spread:
    """How a model is spread.

    Attributes:
        ep_size: ranks that share the experts.
        is_replicated: whether all ranks hold the same tokens; else each has its own.
    """

    ep_size: int
    is_replicated: bool = True


def local_experts(model: ModelShape, spread: Spread) -> int:
    """Experts of the rank that holds most."""
    return -(-model.num_experts // spread.ep_size)


def share_hit(model: ModelShape, num_rows: int) -> float:
    """Expected share of experts with at least one row: 1 - (1 - top_k / experts) ** rows."""
    return 1 - (1 - model.top_k / model.num_experts) ** num_rows


def weight_bytes(model: ModelShape, spread: Spread) -> float:
    """MoE weights of one rank, all layers: its experts, and its part of the shared one."""
    return model.num_layers * (
        local_experts(model, spread) * model.expert_bytes + shared_bytes(model, spread)
    )


def shared_bytes(model: ModelShape, spread: Spread) -> float:
    """The shared expert on one rank, one layer: a slice where it is sliced, else the whole."""
    replica_size = spread.ep_size if spread.is_replicated else 1
    is_whole = why_not_sliced(model.shared_width, replica_size) is not None
    width = model.shared_width if is_whole else min(SLICE_WIDTH, model.shared_width)
    return 3 * model.hidden_size * width * WEIGHT_BYTES[model.shared_format]


def activation_bytes(model: ModelShape, num_rows: int) -> float:
    """Most that a layer's rows need at once: gate and up, input and sum, in fp32."""
    return num_rows * (2 * model.moe_intermediate_size + 2 * model.hidden_size) * _FP32_BYTES


def computed_rows(model: ModelShape, num_rows: int, strategy: str) -> int:
    """Rows that each computed expert multiplies."""
    if strategy != "grouped":
        return num_rows
    return min(num_rows, automatic_capacity(num_rows, model.top_k, model.num_experts))


def computed_experts(model: ModelShape, spread: Spread, num_rows: int, strategy: str) -> float:
    """Experts of a rank that a layer reads and computes; for gated ones the expected number."""
    return local_experts(model, spread) * (
        share_hit(model, num_rows) if strategy == "gated" else 1.0
    )


def read_bytes(model: ModelShape, spread: Spread, num_rows: int, strategy: str) -> float:
    """Weights that a rank reads in one layer of a step, shared expert included."""
    experts = computed_experts(model, spread, num_rows, strategy)
    return experts * model.expert_bytes + shared_bytes(model, spread)


def routed_flops(model: ModelShape, spread: Spread, num_rows: int, strategy: str) -> float:
    """Multiplications and additions of a rank's experts in one layer."""
    experts = computed_experts(model, spread, num_rows, strategy)
    return experts * computed_rows(model, num_rows, strategy) * 2 * model.expert_numbers


def roofline_seconds(
    model: ModelShape, spread: Spread, num_rows: int, strategy: str, platform: Platform
) -> float:
    """One layer's routed experts: the longer of reading the weights and multiplying."""
    experts = computed_experts(model, spread, num_rows, strategy)
    reading = experts * model.expert_bytes / platform.bytes_per_s
    return max(reading, routed_flops(model, spread, num_rows, strategy) / platform.flops)


def gathered_bytes(model: ModelShape, spread: Spread, num_rows: int) -> int:
    """What a rank receives in one layer's all-gather of bf16 rows, ids and weights."""
    if spread.ep_size == 1 or spread.is_replicated:
        return 0
    columns = (model.hidden_size * _BF16_BYTES, model.top_k * _INT32_BYTES)
    return num_rows * row_bytes((*columns, model.top_k * _FP32_BYTES))


def reduced_bytes(model: ModelShape, spread: Spread, num_rows: int) -> int:
    """The fp32 sum that one layer reduces."""
    return 0 if spread.ep_size == 1 else num_rows * model.hidden_size * _FP32_BYTES


def num_collectives(spread: Spread) -> int:
    """Of one layer: an all-reduce of replicated tokens, else all-gather and reduce-scatter."""
    if spread.ep_size == 1:
        return 0
    return 1 if spread.is_replicated else 2


def collective_seconds(spread: Spread, platform: Platform) -> float:
    """One of these collectives, from the platform's published figures."""
    sizes = spread.ep_size, spread.ep_size, platform.device_size
    if spread.is_replicated and why_flat(*sizes) is None:
        return platform.hierarchical_collective_s
    return platform.flat_collective_s
