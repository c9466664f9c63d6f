"""Wrap an attribute of vLLM once, however often it is asked for."""

import inspect
from collections.abc import Callable
from typing import Any

MARK = "__vllm_moe_ep_wrapped__"
MakeWrapper = Callable[[Callable[..., Any]], Callable[..., Any]]


class MissingAttributeError(Exception):
    """vLLM has no such attribute, or not where it was expected."""


class ChangedSignatureError(Exception):
    """A function of vLLM has no parameter of a name that its wrapper reads."""


def wrap_attribute(
    owner: Any, name: str, make_wrapper: MakeWrapper, parameters: tuple[str, ...] = ()
) -> None:
    """Replace `owner.name` by `make_wrapper(original)`; a second call changes nothing.

    A staticmethod stays one, and so does a classmethod, whose wrapper gets the class as its first
    argument. The original is kept on the wrapper as `__vllm_moe_ep_wrapped__`.

    Raises:
        MissingAttributeError: `owner` itself defines no such attribute.
        ChangedSignatureError: the original does not have all of `parameters`.
    """
    if name not in vars(owner):
        raise MissingAttributeError("it is not there")
    current = vars(owner)[name]
    binding = type(current) if isinstance(current, staticmethod | classmethod) else None
    original = current if binding is None else current.__func__
    if hasattr(original, MARK):
        return
    _check_parameters(original, parameters)
    wrapper = make_wrapper(original)
    setattr(wrapper, MARK, original)
    setattr(owner, name, wrapper if binding is None else binding(wrapper))


def _check_parameters(function: Callable[..., Any], expected: tuple[str, ...]) -> None:
    found = inspect.signature(function).parameters if expected else {}
    missing = [name for name in expected if name not in found]
    if missing:
        raise ChangedSignatureError(
            f"it has no parameter {', '.join(missing)}, only {', '.join(found)}"
        )


def argument(original: Callable[..., Any], name: str, args: Any, kwargs: Any) -> Any:
    """What a call `original(*args, **kwargs)` passes as `name`; None if it passes no such thing."""
    try:
        bound = inspect.signature(original).bind(*args, **kwargs)
    except TypeError:
        return None  # the call itself reports what is wrong with it
    return bound.arguments.get(name)
