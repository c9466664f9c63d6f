"""Random quantised experts, made of random codes and scales, and their fp64 numbers."""

from dataclasses import dataclass

import quant_oracle
import torch
from layer_factory import config_of, local_of
from oracle import Cast, Fixture, make_fixture
from torch import Tensor

from vllm_moe_ep.layers.expert_shard import ExpertShard
from vllm_moe_ep.layers.quantised_experts import BlockFp8Experts, Fp4Experts, QuantisedExperts
from vllm_moe_ep.placement import LocalExperts
from vllm_moe_ep.quant.formats import FORMATS, QuantFormat


@dataclass(frozen=True)
class RawMatrix:
    """Stored values and scales of [..., n, k] numbers."""

    values: Tensor
    scale: Tensor


@dataclass(frozen=True)
class QuantisedFixture:
    """A fixture whose float weights are the exact numbers of the quantised ones."""

    floats: Fixture
    w13: RawMatrix
    w2: RawMatrix
    fmt: QuantFormat


def random_matrix(fmt: QuantFormat, lead: tuple[int, ...], n: int, k: int) -> RawMatrix:
    """Numbers of deviation about 1 / sqrt(k), with scales that differ from block to block."""
    block_n, block_k = fmt.block_size
    blocks = (*lead, -(-n // block_n), -(-k // block_k))
    if fmt.is_fp4:
        values = torch.randint(0, 256, (*lead, n, k // 2), dtype=torch.uint8)
        deviation = 3.0
    else:
        values = (100 * torch.randn(*lead, n, k)).clamp(-448, 448).to(torch.float8_e4m3fn)
        deviation = 100.0
    scale = torch.exp2(2 * torch.rand(blocks) - 1) / (deviation * k**0.5)
    if fmt.is_power_of_two:
        scale = (torch.log2(scale).round() + 127).to(torch.uint8)
    return RawMatrix(values, scale)


def random_halves(fmt: QuantFormat, lead: tuple[int, ...], width: int, k: int) -> RawMatrix:
    """Gate above up, each with blocks of its own."""
    halves = [random_matrix(fmt, lead, width, k) for _ in range(2)]
    return RawMatrix(
        torch.cat([half.values for half in halves], dim=-2),
        torch.cat([half.scale for half in halves], dim=-2),
    )


def exact_halves(w13: RawMatrix, fmt: QuantFormat, width: int) -> Tensor:
    """fp64 [..., 2 * width, k]."""
    num_blocks = w13.scale.shape[-2] // 2
    gate = (w13.values[..., :width, :], w13.scale[..., :num_blocks, :])
    up = (w13.values[..., width:, :], w13.scale[..., num_blocks:, :])
    halves = [quant_oracle.dequantise(*half, *fmt.block_size) for half in (gate, up)]
    return torch.cat(halves, dim=-2)


def make_quantised(
    fmt: QuantFormat,
    num_tokens: int = 64,
    dtype: torch.dtype = torch.bfloat16,
    hidden_size: int = 256,
    moe_intermediate_size: int = 128,
    num_experts: int = 16,
) -> QuantisedFixture:
    width = moe_intermediate_size
    floats = make_fixture(dtype, num_tokens, hidden_size, width, num_experts)
    w13 = random_halves(fmt, (num_experts,), width, hidden_size)
    w2 = random_matrix(fmt, (num_experts,), hidden_size, width)
    exact_w2 = quant_oracle.dequantise(w2.values, w2.scale, *fmt.block_size)
    exact = Fixture(
        floats.hidden_states,
        floats.topk_ids,
        floats.topk_weights,
        exact_halves(w13, fmt, width),
        exact_w2,
    )
    return QuantisedFixture(exact, w13, w2, fmt)


def experts_of(
    fixture: QuantisedFixture, slots: list[int], activation: QuantFormat | None = None
) -> QuantisedExperts:
    config, dtype = config_of(fixture.floats), fixture.floats.dtype
    w13, w2 = fixture.w13, fixture.w2
    parts = (w13.values[slots], w13.scale[slots], w2.values[slots], w2.scale[slots], config)
    if fixture.fmt.is_fp4:
        return Fp4Experts(*parts, activation=activation, hidden_dtype=dtype)
    return BlockFp8Experts(
        *parts, block_size=fixture.fmt.block_size, activation=activation, hidden_dtype=dtype
    )


def quantised_shard(
    fixture: QuantisedFixture,
    ep_size: int = 1,
    ep_rank: int = 0,
    limit: float | None = None,
    activation: QuantFormat | None = None,
) -> ExpertShard:
    local: LocalExperts = local_of(fixture.floats, ep_size, ep_rank)
    return ExpertShard(local, experts_of(fixture, list(local.global_ids), activation), limit)


def cast_of(activation: QuantFormat | None) -> Cast | None:
    """The oracle's own cast of activations to a format."""
    if activation is None:
        return None
    blocks = quant_oracle.Blocks(
        *activation.block_size, activation.max_value, activation.is_power_of_two, False
    )
    return lambda row: quant_oracle.quantise_dequantise(row, blocks)


WEIGHTS = [FORMATS[name] for name in ("fp8_128x128", "fp8_128x128_ue8m0", "fp8_1x32_ue8m0")]
WEIGHTS += [FORMATS["fp8_1x32"], FORMATS["fp4_1x32"]]
ACTIVATIONS: list[QuantFormat | None] = [None]
ACTIVATIONS += [FORMATS[name] for name in ("fp8_1x128", "fp8_1x128_ue8m0", "fp8_1x32_ue8m0")]
ACTIVATIONS += [FORMATS["fp8_1x128_ue8m0"].with_max(240.0)]
