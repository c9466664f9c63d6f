"""On a GPU: our layer's experts, each of its ways alone, and vLLM's own."""

from vllm_moe_ep.bench.inputs import DTYPES
from vllm_moe_ep.bench.way import OURS, Way, Ways
from vllm_moe_ep.config import MoEConfig
from vllm_moe_ep.deepgemm.experts_by_size import ExpertsBySize
from vllm_moe_ep.deepgemm.few_row_experts import FewRowExperts
from vllm_moe_ep.deepgemm.few_row_kernels import load_few_row_kernels
from vllm_moe_ep.deepgemm.hopper_experts import HopperExperts, HopperWeights
from vllm_moe_ep.deepgemm.library import deep_gemm
from vllm_moe_ep.deepgemm.path_table import TABLE, choose
from vllm_moe_ep.deepgemm.row_kernels import load_row_kernels
from vllm_moe_ep.envs import load_settings

FORMATS = ("fp8", "bf16")


def cuda_ways(config: MoEConfig, form: str, weights: HopperWeights, with_all: bool) -> Ways:
    """Ours under its settings' defaults, then vLLM's.

    Args:
        with_all: each of our own ways alone, too.

    Raises:
        DeepGemmUnavailableError: no usable library; says what to do.
        ImportError: vLLM for CUDA is missing.
    """
    from vllm_moe_ep.adapters.vllm import lone_layer

    deepgemm = HopperExperts(
        deep_gemm("fp8_block" if form == "fp8" else "bf16"),
        weights,
        load_row_kernels("triton_kernels"),
        max_pass_rows=load_settings().cuda_pass_rows,
    )
    device = weights.tensors[0].device
    vllm_config = lone_layer.moe_config_of(config, DTYPES[form], device)
    triton = lone_layer.triton_experts(vllm_config, weights)
    ours = ExpertsBySize(TABLE[form], config.num_experts, deepgemm, triton)
    by_name: dict[str, Way] = {OURS: ours}
    if with_all:
        by_name["ours_64"] = lambda tokens: deepgemm(tokens, 64)
        by_name["ours_128"] = lambda tokens: deepgemm(tokens, 128)
        by_name["ours_few_rows"] = FewRowExperts(
            weights, load_few_row_kernels("triton_kernels"), config.num_experts
        )
    by_name["triton"] = triton
    missing: dict[str, str] = {}
    if form == "fp8":
        try:
            by_name["vllm_dg"] = lone_layer.deep_gemm_experts(vllm_config, weights)
        except Exception as failure:
            # Whatever it is, the others can be measured without it.
            missing["vllm_dg"] = " ".join(repr(failure).split())[:300]
    stock = tuple(name for name in ("triton", "vllm_dg") if name in by_name)
    return Ways(
        by_name,
        stock,
        missing,
        lambda num_tokens: chosen(config, form, num_tokens),
        lambda: lone_layer.release_workspace(device),
    )


def chosen(config: MoEConfig, form: str, num_tokens: int) -> str:
    """The table's way at this size, as "engine" or "deepgemm_64"."""
    entry = choose(TABLE[form], num_tokens, config.top_k, config.num_experts)
    return entry.path if entry.alignment is None else f"{entry.path}_{entry.alignment}"
