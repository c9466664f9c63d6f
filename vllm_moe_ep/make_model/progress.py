"""Progress of the training: a bar on a terminal, a line now and then in a log."""

import sys
import time
from types import TracebackType
from typing import Self

_SECONDS_BETWEEN_LINES = 10.0


class TrainingProgress:
    """Shows step, smoothed loss, speed and time left on stderr."""

    def __init__(self, num_steps: int, enabled: bool) -> None:
        self._num_steps = num_steps
        self._num_done = 0
        self._smoothed_loss: float | None = None
        self._start = time.monotonic()
        self._last_line = self._start
        self._bar = None
        self._prints_lines = enabled and not sys.stderr.isatty()
        if enabled and not self._prints_lines:
            from tqdm import tqdm

            self._bar = tqdm(total=num_steps, desc="training", unit="step")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.close()

    def advance(self, loss: float) -> None:
        """One more step is done, with this loss in nats per token."""
        self._num_done += 1
        previous = loss if self._smoothed_loss is None else self._smoothed_loss
        self._smoothed_loss = 0.95 * previous + 0.05 * loss
        if self._bar is not None:
            self._bar.set_postfix(loss=f"{self._smoothed_loss:.3f}", refresh=False)
            self._bar.update()
        elif self._prints_lines:
            self._print_line(time.monotonic())

    def _print_line(self, now: float) -> None:
        is_last = self._num_done == self._num_steps
        if now - self._last_line < _SECONDS_BETWEEN_LINES and not is_last:
            return
        self._last_line = now
        elapsed = now - self._start
        left = elapsed / self._num_done * (self._num_steps - self._num_done)
        print(
            f"training: step {self._num_done} of {self._num_steps}, "
            f"loss {self._smoothed_loss:.3f}, {elapsed:.0f} s, {left:.0f} s left",
            file=sys.stderr,
            flush=True,
        )
