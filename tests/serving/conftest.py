"""One server at a time: the reference answers first, then each layout. Logs in .cache/logs."""

import random
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from layouts import MAX_MODEL_LEN, ROOT, STOCK_TP1  # noqa: E402
from workload import Reference, Serve, make_workload  # noqa: E402

from vllm_moe_ep.demo.client import CompletionClient  # noqa: E402
from vllm_moe_ep.demo.demo import cached_model  # noqa: E402
from vllm_moe_ep.demo.interrupts import termination_as_interrupt  # noqa: E402
from vllm_moe_ep.demo.perplexity import score_text  # noqa: E402
from vllm_moe_ep.demo.server import (  # noqa: E402
    VllmServer,
    cpu_environment,
    stock_flags,
    vllm_program,
)
from vllm_moe_ep.make_model import MakeModelOptions, make_model  # noqa: E402

CACHE = ROOT / ".cache"


@pytest.fixture(scope="session", autouse=True)
def _stop_servers_when_terminated() -> Iterator[None]:
    with termination_as_interrupt():
        yield


@pytest.fixture(scope="session")
def model() -> Path:
    """The demo's trained model, made once and kept in .cache."""
    return cached_model(CACHE)


@pytest.fixture(scope="session")
def heldout(model: Path) -> str:
    return (model / "heldout.txt").read_text(encoding="utf-8")


@pytest.fixture(scope="session")
def quantised_model(model: Path) -> Callable[[str], Path]:
    """Quantised forms of the trained model, made once and kept in .cache."""

    def make(quantisation: str) -> Path:
        options = MakeModelOptions(
            CACHE / f"deepseek-{quantisation}",
            weight_dtype="bfloat16",
            quantisation=quantisation,
            source=model,
        )
        return make_model(options).directory

    return make


@pytest.fixture(scope="session")
def serve(model: Path) -> Serve:
    def start(
        name: str,
        flags: Sequence[str],
        num_ranks: int,
        dtype: str = "float32",
        served: Path = model,
        **variables: str,
    ) -> VllmServer:
        common = ("--dtype", dtype, "--max-model-len", str(MAX_MODEL_LEN))
        return VllmServer(
            (vllm_program(), "serve", str(served), *common, *flags),
            CACHE / "logs" / f"test-{name}.log",
            {**cpu_environment(num_ranks), **variables},
        )

    return start


@pytest.fixture(scope="session")
def reference(request: pytest.FixtureRequest, serve: Serve, heldout: str) -> Reference:
    seed = request.config.getoption("--seed")
    seed = random.SystemRandom().randrange(2**31) if seed is None else seed
    print(f"requests drawn with --seed {seed}")
    with serve("stock-tp1", (*STOCK_TP1, *stock_flags("float32")), num_ranks=1) as server:
        client = CompletionClient(server.base_url)
        token_ids = client.tokenize(heldout, add_special_tokens=False)
        workload = make_workload(token_ids, random.Random(seed))
        answers = {item: item.send(client) for item in workload.all()}
        return Reference(workload, answers, score_text(client, heldout))
