"""vllm-moe-ep: expert-parallel MoE layers for DeepSeek-style models, as a vLLM plugin.

Importing this package has no side effect and needs the standard library only. vLLM calls
`register` in each of its processes, through the entry point group `vllm.general_plugins`.
"""

__version__ = "0.1.0"

BACKEND_NAME = "static_ep"
"""The value of vLLM's `moe_backend` that chooses this package (dashes and case are folded)."""

PLUGIN_NAME = "static_ep"
"""The entry point's name, as `VLLM_PLUGINS` spells it."""


def register() -> None:
    """Make `--moe-backend static-ep` known to this vLLM process. Safe to call repeatedly."""
    from vllm_moe_ep.adapters.vllm.plugin import install

    install()
