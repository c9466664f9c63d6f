"""The Triton row kernels on CPU, by Triton's interpreter in a process of its own.

The interpreter must be asked for before triton is imported, which vLLM does in other tests.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parent
FILES = (
    "plan_rows",
    "scatter_rows",
    "swiglu_rows",
    "combine_rows",
    "few_rows_plan",
    "few_rows_gate_up",
    "few_rows_down",
    "few_rows_combine",
)
# The experts that the few-row kernels are for.
EXPERTS = str(FOLDER.parent / "deepgemm" / "test_few_row_experts.py")


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels run on the GPU itself")
def test_kernels_equal_their_references() -> None:
    files = [str(FOLDER / f"test_{name}.py") for name in FILES] + [EXPERTS]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    ran = subprocess.run(
        [*command, "-k", "triton_kernels"],
        env=environment,
        cwd=FOLDER.parent.parent,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stdout[-4000:]
    assert " passed" in ran.stdout and "skipped" not in ran.stdout, ran.stdout[-2000:]
