"""Wrap an attribute of vLLM once, however often it is asked for."""

from collections.abc import Callable
from typing import Any

MARK = "__vllm_moe_ep_wrapped__"


def wrap_attribute(owner: Any, name: str, make_wrapper: Callable[[Any], Any]) -> None:
    """Replace `owner.name` by `make_wrapper(original)`; a second call changes nothing.

    A staticmethod stays one, and so does a classmethod, whose wrapper gets the class as its first
    argument. The original is kept on the wrapper as `__vllm_moe_ep_wrapped__`.
    """
    current = owner.__dict__[name]
    binding = type(current) if isinstance(current, staticmethod | classmethod) else None
    original = current if binding is None else current.__func__
    if hasattr(original, MARK):
        return
    wrapper = make_wrapper(original)
    setattr(wrapper, MARK, original)
    setattr(owner, name, wrapper if binding is None else binding(wrapper))
