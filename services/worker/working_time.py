"""Time that is spent working: what passes while experts are waited for is left out."""

from __future__ import annotations

import time


class WorkingTime:
    """A clock that can be stopped."""

    def __init__(self) -> None:
        self._waited = 0.0
        self._stopped: float | None = None

    @property
    def seconds(self) -> float:
        """Since some moment."""
        return (time.perf_counter() if self._stopped is None else self._stopped) - self._waited

    def stop(self) -> None:
        """A wait begins, unless there is one."""
        if self._stopped is None:
            self._stopped = time.perf_counter()

    def go(self) -> float:
        """There is no wait any more. The seconds of the one that ends, 0.0 if there was none."""
        if self._stopped is None:
            return 0.0
        wait, self._stopped = time.perf_counter() - self._stopped, None
        self._waited += wait
        return wait
