"""Wrap an attribute of vLLM once, however often it is asked for."""

from collections.abc import Callable
from typing import Any

MARK = "__vllm_moe_ep_wrapped__"


def wrap_attribute(owner: Any, name: str, make_wrapper: Callable[[Any], Any]) -> None:
    """Replace `owner.name` by `make_wrapper(original)`; a second call changes nothing.

    A staticmethod stays one. The original is kept on the wrapper as `__vllm_moe_ep_wrapped__`.
    """
    current = owner.__dict__[name]
    is_static = isinstance(current, staticmethod)
    original = current.__func__ if is_static else current
    if hasattr(original, MARK):
        return
    wrapper = make_wrapper(original)
    setattr(wrapper, MARK, original)
    setattr(owner, name, staticmethod(wrapper) if is_static else wrapper)
