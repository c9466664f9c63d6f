"""vLLM's groups over real processes: one DeepSeek MoE layer on every rank, run as vLLM runs it."""

import json
import logging
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
from torch import Tensor

_TIMEOUT_SECONDS = 180


@dataclass(frozen=True)
class Layout:
    """Data-parallel times tensor-parallel ranks; `counts`: rows of each data-parallel rank."""

    dp: int = 1
    tp: int = 1
    counts: tuple[int, ...] = (9,)

    @property
    def num_ranks(self) -> int:
        return self.dp * self.tp


@dataclass
class RankResult:
    """What one rank saw.

    Attributes:
        output: of the layer, this rank's rows.
        counts: collectives of the layer's last step.
        log: every line that static-ep logged.
        measured: what `watch` returned.
    """

    output: Tensor
    counts: Counter[str]
    log: list[str]
    measured: Any = None


@dataclass(frozen=True)
class Job:
    """One run of all ranks.

    Attributes:
        model: config.json's contents.
        settings: as in `--additional-config '{"moe_ep": {...}}'`.
        dtype: of the model.
        watch: called on every rank with (moe layer, function that runs the step) in place of
            the plain call; what it returns comes back as `measured`.
    """

    layout: Layout
    model: dict[str, Any]
    settings: dict[str, Any] = field(default_factory=dict)
    dtype: str = "float32"
    watch: Callable[[Any, Callable[[], Tensor]], Any] | None = None


def run_all(jobs: Sequence[Job]) -> list[list[RankResult]]:
    """Results of each job by rank: data-parallel ranks outside, tensor-parallel ones inside.

    The jobs are of one layout and one model, and run on the same processes one after the other.
    """
    from vllm.utils.network_utils import get_open_port

    layout, model = jobs[0].layout, jobs[0].model
    assert all((job.layout, job.model) == (layout, model) for job in jobs)
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        (directory / "config.json").write_text(json.dumps(model))
        ports = (get_open_port(), f"{os.getpid()}-{get_open_port()}")
        context = mp.start_processes(
            _rank_main,
            (jobs, str(directory), *ports),
            nprocs=layout.num_ranks,
            join=False,
            start_method="spawn",
        )
        assert context is not None
        deadline = time.monotonic() + _TIMEOUT_SECONDS
        # False as long as some rank has not ended yet; a rank's exception is raised here.
        while not context.join(timeout=1):
            if time.monotonic() > deadline:
                for process in context.processes:
                    process.kill()
        files = [directory / f"{rank}.pt" for rank in range(layout.num_ranks)]
        by_rank = [torch.load(file, weights_only=False) for file in files]
        return [list(results) for results in zip(*by_rank, strict=True)]


def _rank_main(rank: int, jobs: Sequence[Job], directory: str, port: int, identity: str) -> None:
    os.environ["VLLM_DIST_IDENT"] = identity
    torch.set_num_threads(1)
    from vllm_moe_ep import register

    register()
    from vllm.config import set_current_vllm_config
    from vllm.distributed import (
        cleanup_dist_env_and_memory,
        init_distributed_environment,
        initialize_model_parallel,
    )

    layout = jobs[0].layout
    configs = [_vllm_config(job, directory, rank // layout.tp) for job in jobs]
    with set_current_vllm_config(configs[0]):
        address = f"tcp://127.0.0.1:{port}"
        init_distributed_environment(layout.num_ranks, rank, address, rank % layout.tp, "gloo")
        initialize_model_parallel(layout.tp)
    pairs = zip(jobs, configs, strict=True)
    results = [_run_job(job, config, rank // layout.tp) for job, config in pairs]
    torch.save(results, Path(directory) / f"{rank}.pt")
    cleanup_dist_env_and_memory()


def _run_job(job: Job, config: Any, dp_rank: int) -> RankResult:
    from vllm.config import set_current_vllm_config

    from vllm_moe_ep.adapters.vllm import groups

    groups.layer_collectives.cache_clear()
    torch.set_default_dtype(getattr(torch, job.dtype))
    with set_current_vllm_config(config), captured_log() as log:
        result = _measure(build_moe(config, job), config, job, dp_rank)
    result.log = log
    return result


def _vllm_config(job: Job, directory: str, dp_rank: int) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    args = EngineArgs(
        model=directory,
        skip_tokenizer_init=True,
        load_format="dummy",
        max_model_len=128,
        enforce_eager=True,
        moe_backend="static-ep",
        dtype=job.dtype,
        tensor_parallel_size=job.layout.tp,
        data_parallel_size=job.layout.dp,
        enable_expert_parallel=job.layout.num_ranks > 1,
        additional_config={"moe_ep": job.settings},
    )
    config = args.create_engine_config()
    config.parallel_config.data_parallel_rank = dp_rank
    config.parallel_config.distributed_executor_backend = "external_launcher"
    return config


def build_moe(config: Any, job: Job) -> Any:
    """The layer with the same random weights whatever the layout, loaded through vLLM's loaders."""
    from vllm.model_executor.models import deepseek_v2

    from vllm_moe_ep.adapters.vllm.load_report import report

    hf_config = config.model_config.hf_config
    moe = deepseek_v2.DeepseekV2MoE(
        config=hf_config, parallel_config=config.parallel_config, prefix="model.layers.1.mlp"
    )
    report(moe, config, is_draft=False)
    load(moe, weights_of(job.model))
    for module in moe.modules():
        method = getattr(module, "quant_method", None)
        if method is not None:
            method.process_weights_after_loading(module)
    return moe


def weights_of(model: dict[str, Any], seed: int = 0) -> dict[str, Tensor]:
    """Fp32 weights of the layer's gate, experts and shared experts."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float32) / shape[-1] ** 0.5

    num_experts, hidden_size = model["n_routed_experts"], model["hidden_size"]
    width = model["moe_intermediate_size"]
    shared_width = width * (model["n_shared_experts"] or 0)
    return {
        "gate": matrix(num_experts, hidden_size),
        "bias": torch.rand(num_experts, generator=generator, dtype=torch.float32) / 10,
        "w13": matrix(num_experts, 2 * width, hidden_size),
        "w2": matrix(num_experts, hidden_size, width),
        "shared_w13": matrix(2 * shared_width, hidden_size),
        "shared_w2": matrix(hidden_size, shared_width) if shared_width else matrix(1, 1),
    }


def load(moe: Any, weights: dict[str, Tensor]) -> None:
    """Through each parameter's own loader, which takes this rank's part."""
    dtype = moe.gate.weight.dtype
    moe.gate.weight.data = weights["gate"].to(dtype)
    moe.gate.e_score_correction_bias.data = weights["bias"]
    experts = moe.experts.routed_experts
    for name, matrix in (("w1", "w13"), ("w3", "w13"), ("w2", "w2")):
        parameter = experts.w2_weight if name == "w2" else experts.w13_weight
        for expert, value in enumerate(weights[matrix]):
            if name != "w2":
                value = value.chunk(2)[name == "w3"]
            experts.weight_loader(
                parameter, value.to(dtype), f"{name}_weight", shard_id=name, expert_id=expert
            )
    shared = moe.shared_experts
    if shared is None:
        return
    for shard, value in enumerate(weights["shared_w13"].chunk(2)):
        parameter = shared.gate_up_proj.weight
        parameter.weight_loader(parameter, value.to(dtype), shard)
    parameter = shared.down_proj.weight
    parameter.weight_loader(parameter, weights["shared_w2"].to(dtype))


def rows_of(layout: Layout, hidden_size: int, seed: int = 1) -> Sequence[Tensor]:
    """Fp32 rows of each data-parallel rank."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(sum(layout.counts), hidden_size, generator=generator, dtype=torch.float32)
    return rows.split(list(layout.counts))


def _measure(moe: Any, config: Any, job: Job, dp_rank: int) -> RankResult:
    from vllm.forward_context import set_forward_context

    layout = job.layout
    rows = rows_of(layout, job.model["hidden_size"])[dp_rank].to(getattr(torch, job.dtype))
    across = torch.tensor(layout.counts, dtype=torch.int32) if layout.dp > 1 else None

    def step() -> Tensor:
        with set_forward_context(None, config, num_tokens=len(rows), num_tokens_across_dp=across):
            return moe(rows.clone())

    step()
    collectives = moe.experts.routed_experts.collectives
    before = collectives.counts.copy()
    measured = None
    if job.watch is None:
        output = step()
    else:
        kept: list[Tensor] = []

        def run_step() -> Tensor:
            kept.append(step())
            return kept[-1]

        measured = job.watch(moe, run_step)
        output = kept[-1]
    return RankResult(output, collectives.counts - before, [], measured)


@contextmanager
def captured_log() -> Iterator[list[str]]:
    """Every line that static-ep logs; "once" means once within."""
    from vllm import logger as vllm_logger

    lines: list[str] = []

    class Keeper(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    for print_once in ("_print_info_once", "_print_warning_once"):
        cached = getattr(vllm_logger, print_once, None)
        if cached is not None:
            cached.cache_clear()
    keeper = Keeper()
    logger = logging.getLogger("vllm.vllm_moe_ep")
    logger.addHandler(keeper)
    try:
        yield lines
    finally:
        logger.removeHandler(keeper)
