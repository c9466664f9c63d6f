"""Make our environment variables known to vLLM, which warns about any other `VLLM_*` name."""

import os
from typing import Any

from vllm_moe_ep.envs import VARIABLES


def declare_variables(vllm_envs: Any) -> None:
    """Add those of our variables that are set to vLLM's table.

    They then count in the key of vLLM's compile cache too. Unset ones are left out, so that the
    key of every other engine stays as it was.
    """
    for variable in VARIABLES:
        if variable.env_name in os.environ:
            vllm_envs.environment_variables.setdefault(
                variable.env_name, _reader(variable.env_name)
            )


def _reader(name: str) -> Any:
    return lambda: os.environ.get(name)
