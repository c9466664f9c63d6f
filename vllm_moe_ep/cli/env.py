"""`vllm-moe-ep env`: every setting, its value in force, what is allowed and what it means."""

import argparse
from typing import Any

from vllm_moe_ep.cli.inputs import parse_json_object
from vllm_moe_ep.envs import OVERRIDE_KEY, load_settings, settings_table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this subcommand's options."""
    parser.add_argument(
        "--additional-config",
        metavar="JSON",
        help='the JSON that vllm serve would get, for example \'{"moe_ep": {"experts": "dense"}}\'',
    )


def run(args: argparse.Namespace) -> int:
    """Print the table; a bad value is an error that names it."""
    print(settings_table(load_settings(_overrides(args.additional_config))))
    return 0


def _overrides(text: str | None) -> Any:
    if text is None:
        return None
    return parse_json_object(text, "--additional-config").get(OVERRIDE_KEY)
