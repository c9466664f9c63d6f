"""`vllm-moe-ep env`: every setting, its value in force, what is allowed and what it means."""

import argparse
import json

from vllm_moe_ep.envs import OVERRIDE_KEY, load_settings, settings_table
from vllm_moe_ep.errors import SettingsError


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


def _overrides(text: str | None) -> dict | None:
    if text is None:
        return None
    try:
        config = json.loads(text)
    except json.JSONDecodeError as error:
        raise SettingsError(f"--additional-config is not JSON: {error}.") from error
    if not isinstance(config, dict):
        raise SettingsError(f"--additional-config must be a JSON object, got {text}.")
    return config.get(OVERRIDE_KEY)
