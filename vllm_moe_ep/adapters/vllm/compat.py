"""Small differences of vLLM's objects between versions and states, in one place."""

import copy
from typing import Any


def with_moe_backend(moe_config: Any, backend: str) -> Any:
    """A copy of vLLM's `FusedMoEConfig` that asks for another backend.

    `dataclasses.replace` would run its constructor again, which pads sizes a second time.
    """
    changed = copy.copy(moe_config)
    changed.moe_backend = backend
    return changed
