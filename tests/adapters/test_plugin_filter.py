"""A filter that leaves the plugin out is named, in a process of its own, on each route."""

import os
import subprocess
import sys

import pytest

from vllm_moe_ep.adapters.vllm.plugin_filter import filter_message

PARSE = """
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser
args = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args()
print("parsed", args.moe_backend)
"""


@pytest.mark.parametrize("allowed", ["", "other", "static-ep"])
def test_filtered_out(allowed: str) -> None:
    message = filter_message({"VLLM_PLUGINS": allowed})
    assert message is not None
    assert "VLLM_PLUGINS" in message


@pytest.mark.parametrize("environ", [{}, {"VLLM_PLUGINS": "other,static_ep"}])
def test_not_filtered(environ: dict[str, str]) -> None:
    assert filter_message(environ) is None


def run_parser(plugins: str, backend: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PARSE, "--moe-backend", backend],
        env={**os.environ, "VLLM_PLUGINS": plugins},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_command_line_names_the_filter_and_exits_2() -> None:
    done = run_parser("other", "static-ep")
    assert done.returncode == 2
    assert "VLLM_PLUGINS='other' leaves its plugin out" in done.stderr


def test_other_backends_work_under_the_filter() -> None:
    done = run_parser("other", "triton")
    assert done.returncode == 0, done.stderr
    assert "parsed triton" in done.stdout


def test_listed_plugin_works() -> None:
    done = run_parser("other,static_ep", "STATIC-EP")
    assert done.returncode == 0, done.stderr
    assert "parsed static_ep" in done.stdout
