"""`static_ep` is a value of `moe_backend` on every route; other values behave as before."""

import argparse

import pytest
from vllm.config import KernelConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

from vllm_moe_ep import register
from vllm_moe_ep.adapters.vllm import backend_name


@pytest.fixture
def parser() -> argparse.ArgumentParser:
    return AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())


@pytest.mark.parametrize("text", ["static-ep", "static_ep", "STATIC-EP", "Static_EP"])
def test_every_spelling_is_taken(parser: argparse.ArgumentParser, text: str) -> None:
    assert KernelConfig(moe_backend=text).moe_backend == "static_ep"
    assert parser.parse_args(["--moe-backend", text]).moe_backend == "static_ep"
    by_json = parser.parse_args([f"--kernel-config.moe_backend={text}"])
    assert by_json.kernel_config.moe_backend == "static_ep"


@pytest.mark.parametrize("text", ["auto", "triton", "deep-gemm"])
def test_other_values_are_unchanged(parser: argparse.ArgumentParser, text: str) -> None:
    expected = text.replace("-", "_")
    assert KernelConfig(moe_backend=text).moe_backend == expected
    assert parser.parse_args(["--moe-backend", text]).moe_backend == expected


def test_typo_exits_2_with_near_matches(
    parser: argparse.ArgumentParser, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        parser.parse_args(["--moe-backend", "staticep"])
    assert caught.value.code == 2
    assert "did you mean static_ep?" in capsys.readouterr().err


def test_unknown_value_is_still_refused_by_the_config() -> None:
    with pytest.raises(ValueError, match="moe_backend"):
        KernelConfig(moe_backend="staticep")


def test_registering_again_changes_nothing() -> None:
    before = backend_name.known_backends()
    for _ in range(3):
        register()
    assert backend_name.known_backends() == before
    assert before.count("static_ep") == 1
