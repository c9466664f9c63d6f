"""Processes that compile the variants of the few-row kernels, and the layer they run on."""

import multiprocessing
import queue
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from few_row_variants import Product
from torch import Tensor

from vllm_moe_ep.bench.inputs import random_tokens, random_weights
from vllm_moe_ep.bench.shape import LayerShape
from vllm_moe_ep.deepgemm.few_row_experts import FewRowExperts
from vllm_moe_ep.deepgemm.few_row_kernels import load_few_row_kernels
from vllm_moe_ep.deepgemm.few_row_table import FewRowStep
from vllm_moe_ep.stages import RoutedTokens
from vllm_moe_ep_kernels.reference.few_rows_routing import PairRouting

SHAPE = LayerShape(num_experts=32, top_k=8, hidden_size=7168, width=2048)
DRY_SHAPE = LayerShape(num_experts=32, top_k=8, hidden_size=256, width=256)
Job = Product | tuple[int, FewRowStep]
_FIRST_REPORT_S = 90
_NEXT_REPORT_S = 15


class Layer:
    """Random experts of one format, and steps of each size.

    Args:
        is_dry: a small layer on CPU, by the plain references.
    """

    def __init__(self, form: str, is_dry: bool) -> None:
        torch.manual_seed(0)
        self.shape = DRY_SHAPE if is_dry else SHAPE
        self.device = torch.device("cpu" if is_dry else "cuda")
        self.weights = random_weights(self.shape, form, self.device)
        self.kernels = load_few_row_kernels("reference" if is_dry else "triton_kernels")
        self._experts = FewRowExperts(self.weights, self.kernels, self.shape.num_experts)
        self._tokens: dict[int, RoutedTokens] = {}

    def tokens(self, num_tokens: int) -> RoutedTokens:
        """One step with uniform routing; the same at each call."""
        if num_tokens not in self._tokens:
            torch.manual_seed(num_tokens)
            self._tokens[num_tokens] = random_tokens(
                self.shape, num_tokens, "uniform", torch.bfloat16, self.device
            )
        return self._tokens[num_tokens]

    def step(self, step: FewRowStep) -> FewRowExperts:
        """The experts by one step."""
        return FewRowExperts(
            self.weights, self.kernels, self.shape.num_experts, step_of=lambda m, k: step
        )

    def product(self, product: Product) -> Callable[[], object]:
        """One product alone; its plan is made here."""
        tokens, experts = self.tokens(product.num_tokens), self._experts
        is_fp8_out = product.is_inner_fp8 and product.name == "gate_up"
        step = FewRowStep(product.tiles, product.tiles, product.is_planned, is_inner_fp8=is_fp8_out)
        routing = PairRouting(tokens.topk_ids, None, self.shape.num_experts)
        scaled: tuple[Tensor, Tensor | None] = (tokens.hidden_states, None)
        if product.is_planned:
            routing, scaled = experts._plan(routing, tokens.hidden_states, step)
        if product.name == "gate_up":
            return lambda: experts._gate_up(scaled, routing, step)
        rows = torch.randn(routing.num_pairs, self.shape.width, device=self.device)
        inner: tuple[Tensor, Tensor | None] = (rows.bfloat16(), None)
        if product.is_inner_fp8:
            scale = torch.rand(routing.num_pairs, self.shape.width // 128, device=self.device)
            inner = (rows.to(torch.float8_e4m3fn), scale)
        out = rows.new_empty((1, routing.num_pairs, self.shape.hidden_size), dtype=torch.bfloat16)
        return lambda: self.kernels.down(*inner, *experts._w2, routing, out, tiles=product.tiles)

    def run(self, job: Job) -> None:
        """Run a job once, which compiles it."""
        if isinstance(job, Product):
            self.product(job)()
        else:
            num_tokens, step = job
            self.step(step)(self.tokens(num_tokens))
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def _work(form: str, is_dry: bool, jobs: Any, reports: Any) -> None:
    with torch.inference_mode():
        layer = Layer(form, is_dry)
        while True:
            number, job = jobs.get()
            try:
                layer.run(job)
                reports.put((number, None))
            except Exception as failure:
                text = " ".join(repr(failure).split())[:160]
                reports.put((number, text))
                if "CUDA error" in text:
                    # No later call of this process would succeed.
                    return


class Workers:
    """Processes of one format; ended with the block."""

    def __init__(self, count: int, form: str, is_dry: bool) -> None:
        context = multiprocessing.get_context("spawn")
        self._jobs, self._reports = context.Queue(), context.Queue()
        arguments = (form, is_dry, self._jobs, self._reports)
        self._processes = [
            context.Process(target=_work, args=arguments, daemon=True) for _ in range(count)
        ]

    def __enter__(self) -> "Workers":
        for process in self._processes:
            process.start()
        return self

    def __exit__(self, *details: object) -> None:
        for process in self._processes:
            process.kill()

    def compile(self, jobs: Sequence[Job], seconds: float) -> tuple[list[Job], dict[str, int]]:
        """Those that ran, and how many failed by which error; what is late is left out."""
        for entry in enumerate(jobs):
            self._jobs.put(entry)
        done: list[Job] = []
        failures: dict[str, int] = {}
        end = time.monotonic() + seconds
        while len(done) + sum(failures.values()) < len(jobs) and time.monotonic() < end:
            patience = _NEXT_REPORT_S if done else _FIRST_REPORT_S
            try:
                number, failure = self._reports.get(timeout=min(patience, seconds))
            except queue.Empty:
                # A process that crashed took its job along.
                break
            if failure is None:
                done.append(jobs[number])
            else:
                failures[failure] = failures.get(failure, 0) + 1
        self._drop_rest()
        return done, failures

    def _drop_rest(self) -> None:
        try:
            while True:
                self._jobs.get_nowait()
        except queue.Empty:
            return
