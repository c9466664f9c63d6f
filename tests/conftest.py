"""Paths, a fresh seed per test, and the pool of gloo processes."""

import importlib.util
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

_TESTS = Path(__file__).parent
# Helper modules beside this file; and the sources, where the package is not installed.
sys.path.insert(0, str(_TESTS))
for _package, _folder in (
    ("vllm_moe_ep", _TESTS.parent),
    ("vllm_moe_ep_kernels", _TESTS.parent / "kernels"),
):
    if importlib.util.find_spec(_package) is None:
        sys.path.insert(0, str(_folder))

from process_pool import ProcessPool  # noqa: E402


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, default=None, help="repeat a run with its printed seed")


@pytest.fixture(autouse=True)
def seed(request: pytest.FixtureRequest) -> int:
    """Seeds torch and random; the number is printed, so pytest shows it with a failure."""
    value = request.config.getoption("--seed")
    if value is None:
        value = random.SystemRandom().randrange(2**31)
    print(f"repeat with --seed {value}")
    torch.manual_seed(value)
    random.seed(value)
    return value


@pytest.fixture(scope="session")
def processes() -> Iterator[ProcessPool]:
    """Four gloo processes, started once."""
    pool = ProcessPool(4)
    yield pool
    pool.close()
