"""The files in configs/ are read by vLLM's own parser and mean what their names say."""

import re
from argparse import Namespace
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))


def parse(config: Path) -> Namespace:
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from vllm_moe_ep import register

    register()
    parser = FlexibleArgumentParser()
    ServeSubcommand().subparser_init(parser.add_subparsers())
    parsed: Namespace = parser.parse_args(["serve", "some/model", "--config", str(config)])
    return parsed


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_config(config: Path) -> None:
    args = parse(config)
    assert args.model_tag == "some/model"
    assert args.moe_backend == "static_ep"
    assert args.enable_expert_parallel
    sizes = dict(re.findall(r"(dp|tp)(\d+)", config.stem))
    assert args.data_parallel_size == int(sizes.get("dp", 1))
    assert args.tensor_parallel_size == int(sizes.get("tp", 1))


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_command_in_the_comment_names_this_file_and_binds_every_rank(config: Path) -> None:
    (binding, name), = re.findall(
        r"^# VLLM_CPU_OMP_THREADS_BIND='([^']*)' vllm serve MODEL --config configs/(\S+)$",
        config.read_text(),
        re.MULTILINE,
    )  # fmt: skip
    assert name == config.name
    args = parse(config)
    num_ranks = args.data_parallel_size * args.tensor_parallel_size
    assert len(binding.split("|")) == num_ranks


def test_there_are_configs() -> None:
    assert len(CONFIGS) >= 3
