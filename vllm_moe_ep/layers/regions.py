"""Places where a step may be split into regions that a backend compiles one by one."""

from collections.abc import Callable

BEFORE_EXPERTS = "before experts"
BEFORE_COMBINE = "before combine"
AFTER_COMBINE = "after combine"

# Called with one of the names above, in this order, once each per step on every rank.
Boundary = Callable[[str], None]


def no_split(name: str) -> None:
    """The step stays one region."""
