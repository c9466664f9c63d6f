"""One body over the reference and the host kernel, against fp64."""

from collections.abc import Callable
from typing import Any

import pytest
import quant_oracle
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import rel_l2
from quantised_factory import ACTIVATIONS, WEIGHTS, random_matrix
from torch import Tensor

from vllm_moe_ep.quant.formats import FORMATS, FP8_128X128, QuantFormat
from vllm_moe_ep_kernels.host import shared_a_grouped_gemm as host
from vllm_moe_ep_kernels.reference import shared_a_grouped_gemm as reference

Gemm = Callable[..., None]
both = pytest.mark.parametrize(
    "gemm",
    [reference.shared_a_grouped_gemm, host.shared_a_grouped_gemm],
    ids=["reference", "host"],
)


def _check(gemm: Gemm, a_fmt: QuantFormat | None, b_fmt: QuantFormat, sizes: list[int]) -> None:
    m, n, k, num_groups, num_products = sizes
    b = random_matrix(b_fmt, (num_groups,), n, k)
    pair: tuple[Tensor, Tensor | None]
    if a_fmt is None:
        recipe_a, a = (1, 128), torch.randn(m, k).bfloat16()
        rows, pair = a.double(), (a, None)
    else:
        recipe_a, matrix = a_fmt.block_size, random_matrix(a_fmt, (), m, k)
        rows = quant_oracle.dequantise(matrix.values, matrix.scale, *recipe_a)
        pair = matrix.values, matrix.scale
    group = torch.randint(-1, num_groups, (num_products,), dtype=torch.int32)
    d = torch.full((num_products, m, n), torch.nan)
    gemm(pair, (b.values, b.scale), d, group, recipe_a, b_fmt.block_size)
    weights = quant_oracle.dequantise(b.values, b.scale, *b_fmt.block_size)
    for index, product in zip(group.tolist(), d, strict=True):
        expected = rows @ weights[index].T if index >= 0 else torch.zeros(m, n)
        assert rel_l2(product, expected) <= (1e-2 if a_fmt is None else 1e-5)


@both
@pytest.mark.parametrize("a_fmt", ACTIVATIONS, ids=lambda fmt: fmt.name if fmt else "bf16")
@pytest.mark.parametrize("b_fmt", WEIGHTS, ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("sizes", [[5, 256, 384, 4, 7], [1, 140, 72, 3, 3]])
def test_values(
    gemm: Gemm, a_fmt: QuantFormat | None, b_fmt: QuantFormat, sizes: list[int]
) -> None:
    _check(gemm, a_fmt, b_fmt, sizes)


@both
@settings(max_examples=15, deadline=None)
@given(
    a_fmt=st.sampled_from(ACTIVATIONS),
    b_fmt=st.sampled_from(WEIGHTS),
    m=st.integers(1, 9),
    n=st.integers(1, 200),
    half_k=st.integers(1, 150),
    num_groups=st.integers(1, 4),
    num_products=st.integers(0, 5),
    seed=st.integers(0, 2**31),
)
def test_any_size(
    gemm: Gemm,
    a_fmt: QuantFormat | None,
    b_fmt: QuantFormat,
    m: int,
    n: int,
    half_k: int,
    num_groups: int,
    num_products: int,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    _check(gemm, a_fmt, b_fmt, [m, n, 2 * half_k, num_groups, num_products])


@both
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_rows_and_results(gemm: Gemm, dtype: torch.dtype) -> None:
    rows, b = torch.randn(3, 128).to(dtype), random_matrix(FP8_128X128, (2,), 40, 128)
    d = torch.full((1, 3, 40), torch.nan, dtype=torch.bfloat16)
    group = torch.ones(1, dtype=torch.int32)
    gemm((rows, None), (b.values, b.scale), d, group, (1, 128), (128, 128))
    weight = quant_oracle.dequantise(b.values, b.scale, 128, 128)[1]
    assert rel_l2(d[0], rows.double() @ weight.T) <= 1e-2


@both
@pytest.mark.parametrize("b_fmt", WEIGHTS, ids=lambda fmt: fmt.name)
def test_groups_that_are_not_chosen_cannot_leak(gemm: Gemm, b_fmt: QuantFormat) -> None:
    a, b = torch.randn(4, 64), random_matrix(b_fmt, (3,), 32, 64)
    b.scale[[0, 2]] = 255 if b_fmt.is_power_of_two else torch.nan
    d = torch.full((3, 4, 32), torch.nan)
    group = torch.tensor([-1, 1, -1], dtype=torch.int32)
    gemm((a, None), (b.values, b.scale), d, group, (1, 128), b_fmt.block_size)
    assert torch.equal(d[[0, 2]], torch.zeros(2, 4, 32))
    weight = quant_oracle.dequantise(b.values, b.scale, *b_fmt.block_size)[1]
    assert rel_l2(d[1], a.double() @ weight.T) <= 1e-5


def test_groups_that_are_not_chosen_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    b = random_matrix(FP8_128X128, (3,), 32, 128)
    read = []
    block_linear = host.block_linear

    def recording(rows: Tensor, values: Tensor, *arguments: Any) -> Tensor:
        read.append(values.data_ptr())
        return block_linear(rows, values, *arguments)

    monkeypatch.setattr(host, "block_linear", recording)
    group = torch.tensor([2, -1], dtype=torch.int32)
    d = torch.empty(2, 4, 32)
    a = torch.randn(4, 128), None
    host.shared_a_grouped_gemm(a, (b.values, b.scale), d, group, (1, 128), (128, 128))
    assert read == [b.values[2].data_ptr()]


def test_traces_as_one_graph() -> None:
    """The group is data: one compilation serves every choice."""
    a = random_matrix(FORMATS["fp8_1x128"], (), 4, 128)
    b = random_matrix(FP8_128X128, (3,), 32, 128)

    def run(group: Tensor) -> Tensor:
        d = torch.empty(1, 4, 32)
        pairs = (a.values, a.scale), (b.values, b.scale)
        host.shared_a_grouped_gemm(*pairs, d, group, (1, 128), (128, 128))
        return d

    torch._dynamo.reset()
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for index in (-1, 0, 2):
        group = torch.tensor([index], dtype=torch.int32)
        assert torch.equal(compiled(group), run(group))
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("d", r"d must be \[2, 4, 32\], found \[2, 4, 31\]"),
        ("b", r"b must be \[3, 32, 128\], found \[3, 32, 127\]"),
        ("b_scale", r"b's scale must be \[3, 1, 1\], found \[2, 1, 1\]"),
        ("a_scale", r"a's scale must be \[4, 1\], found \[3, 1\]"),
    ],
)
def test_what_does_not_fit_is_refused(name: str, message: str) -> None:
    a = random_matrix(FORMATS["fp8_1x128"], (), 4, 128)
    b = random_matrix(FP8_128X128, (3,), 32, 128)
    tensors = {
        "a_scale": a.scale,
        "b": b.values,
        "b_scale": b.scale,
        "d": torch.empty(2, 4, 32),
    }
    short_dim = 0 if name.endswith("scale") else tensors[name].dim() - 1
    tensors[name] = tensors[name].narrow(short_dim, 0, tensors[name].shape[short_dim] - 1)
    group = torch.zeros(2, dtype=torch.int32)
    pairs = (a.values, tensors["a_scale"]), (tensors["b"], tensors["b_scale"])
    with pytest.raises(ValueError, match=message):
        host.shared_a_grouped_gemm(*pairs, tensors["d"], group, (1, 128), (128, 128))
