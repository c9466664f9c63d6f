"""NKI, or the emulator of its subset where NKI is not installed."""

import importlib
import importlib.util
from typing import Any


def _nki() -> Any:
    """The nki package, or None."""
    if importlib.util.find_spec("nki") is None:
        return None
    nki = importlib.import_module("nki")
    # A placeholder of the same name has neither.
    return nki if hasattr(nki, "jit") and hasattr(nki, "simulate") else None


nki = _nki()
_source = "nki" if nki is not None else "vllm_moe_ep_kernels.nki_emulator"
nl: Any = importlib.import_module(f"{_source}.language")
nisa: Any = importlib.import_module(f"{_source}.isa")
