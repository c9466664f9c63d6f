"""Which kernels one step calls: none of the narrow interface is by-passed."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import quant_oracle
import torch
from kernel_runner import ACTIVATION
from layer_factory import config_of, strategy_layer
from oracle import rel_l2
from quantised_factory import (
    cast_of,
    exact_halves,
    make_quantised,
    random_halves,
    random_matrix,
)
from torch import Tensor

from vllm_moe_ep.collectives import SingleProcess
from vllm_moe_ep.config import EPConfig
from vllm_moe_ep.errors import UnsupportedError
from vllm_moe_ep.layers.kernel_experts import KernelExperts
from vllm_moe_ep.layers.kernel_shared_expert import KernelSharedExpert
from vllm_moe_ep.layers.shared_expert import SharedExpert, slice_shared_expert
from vllm_moe_ep.placement import LocalExperts
from vllm_moe_ep.quant.formats import FORMATS
from vllm_moe_ep.quant.weight import Quantised
from vllm_moe_ep_kernels.host.linears import HostLinears
from vllm_moe_ep_kernels.linears import Linears
from vllm_moe_ep_kernels.nki import ops
from vllm_moe_ep_kernels.nki.linears import NkiLinears

HIDDEN, WIDTH, NUM_EXPERTS, NUM_ROWS, LIMIT = 256, 256, 4, 5, 0.8
FP8 = FORMATS["fp8_128x128"]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """How often each kernel is run."""
    counts: Counter[str] = Counter()
    launch = ops.launch

    def spy(kernel: Any, *arguments: Any) -> Tensor:
        counts[kernel.__name__] += 1
        return launch(kernel, *arguments)

    monkeypatch.setattr(ops, "launch", spy)
    yield counts


def shared_expert() -> tuple[SharedExpert, Tensor, Tensor]:
    """One of the width of two slices, and its exact numbers in fp64."""
    w13 = random_halves(FP8, (), WIDTH, HIDDEN)
    w2 = random_matrix(FP8, (), HIDDEN, WIDTH)
    whole = SharedExpert(
        Quantised.of_halves(w13.values, w13.scale, FP8.block_size),
        Quantised(w2.values, w2.scale, FP8.block_size),
        swiglu_limit=LIMIT,
    )
    exact_w2 = quant_oracle.dequantise(w2.values, w2.scale, *FP8.block_size)
    return whole, exact_halves(w13, FP8, WIDTH), exact_w2


def expected_shared(rows: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    cast = cast_of(ACTIVATION)
    assert cast is not None
    gate, up = (cast(rows.double()) @ w13.T).chunk(2, dim=1)
    gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
    activated = (torch.nn.functional.silu(gate) * up).float()
    return cast(activated.double()) @ w2.T


@pytest.mark.parametrize("strategy", ["dense", "gated"])
@pytest.mark.parametrize("shared_kind", ["whole", "slices"])
def test_one_step(launched: Counter[str], strategy: str, shared_kind: str) -> None:
    fixture = make_quantised(FP8, NUM_ROWS, torch.bfloat16, HIDDEN, WIDTH, NUM_EXPERTS)
    floats, nki = fixture.floats, NkiLinears()
    weights = fixture.w13.values, fixture.w13.scale, fixture.w2.values, fixture.w2.scale
    config = config_of(fixture.floats)
    experts = KernelExperts(nki, *weights, config, FP8.block_size)
    layer = strategy_layer(
        config,
        LocalExperts(NUM_EXPERTS, tuple(range(NUM_EXPERTS))),
        experts,
        SingleProcess(),
        EPConfig(host_mode=False, experts=strategy),
    )
    whole, w13, w2 = shared_expert()
    # Of the slices, the sum of all ranks' is the whole; the third rank holds zeros.
    parts = [whole]
    if shared_kind == "slices":
        parts = [slice_shared_expert(whole, 3, rank) for rank in range(3)]
    kernels = [KernelSharedExpert(nki, part) for part in parts]
    assert all(kernel.is_partial == (shared_kind == "slices") for kernel in kernels)
    step = layer.step(
        floats.hidden_states,
        floats.topk_ids,
        floats.topk_weights,
        capacity=NUM_ROWS,
        shared=lambda rows: sum(kernel(rows) for kernel in kernels),
    )
    expected = floats.routed(cast=cast_of(ACTIVATION))
    expected = expected + expected_shared(floats.hidden_states, w13, w2)
    assert rel_l2(step.hidden_states, expected) <= FP8.output_limit
    of_experts = "gated_block_linear" if strategy == "gated" else "block_linear"
    wanted = Counter({of_experts: 2 * NUM_EXPERTS, "swiglu": NUM_EXPERTS})
    wanted += Counter({"block_linear": 2 * len(parts), "swiglu": len(parts)})
    assert launched == wanted


@pytest.mark.parametrize("linears", [HostLinears(240.0), NkiLinears()], ids=["host", "nki"])
def test_a_shared_expert_without_a_kernel_is_refused(linears: Linears) -> None:
    floats = SharedExpert(torch.zeros(512, 256), torch.zeros(256, 256))
    with pytest.raises(UnsupportedError, match="shared expert's w13_weight is torch.float32"):
        KernelSharedExpert(linears, floats)
    if isinstance(linears, NkiLinears):
        matrix = random_matrix(FP8, (), 2 * WIDTH, 192)
        small = Quantised(matrix.values, matrix.scale, FP8.block_size)
        with pytest.raises(UnsupportedError, match="w13_weight of 512 x 192 in blocks of 128"):
            KernelSharedExpert(linears, SharedExpert(small, small))
