"""Being told to stop: treated like Ctrl-C, so that servers are stopped on the way out."""

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType


@contextlib.contextmanager
def termination_as_interrupt() -> Iterator[None]:
    """Within it, SIGTERM and SIGHUP raise KeyboardInterrupt. Main thread only."""
    signals = (signal.SIGTERM, signal.SIGHUP)
    previous = {number: signal.signal(number, _interrupt) for number in signals}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
