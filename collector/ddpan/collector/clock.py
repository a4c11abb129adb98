"""The recorder's clock: monotonic, anchored to wall time once."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from .schema import Clock as ClockMetadata

__all__ = ["Anchor", "now_ns"]

now_ns = time.monotonic_ns


@dataclass(frozen=True)
class Anchor:
    """The moment at which monotonic and wall clock were read together.

    Attributes:
        monotonic_ns: reading of the monotonic clock.
        epoch_ns: nanoseconds since the Unix epoch at that moment.
        uncertainty_ns: half the time between the two monotonic readings around the reading of the wall clock.
    """

    monotonic_ns: int
    epoch_ns: int
    uncertainty_ns: int

    @classmethod
    def take(
        cls,
        *,
        monotonic: Callable[[], int] = now_ns,
        wall: Callable[[], int] = time.time_ns,
        tries: int = 5,
    ) -> Anchor:
        """Read both clocks ``tries`` times and keep the tightest pair."""
        readings = [(monotonic(), wall(), monotonic()) for _ in range(tries)]
        before, epoch, after = min(readings, key=lambda r: r[2] - r[0])
        return cls(monotonic_ns=(before + after) // 2, epoch_ns=epoch, uncertainty_ns=(after - before + 1) // 2)

    @property
    def offset_ns(self) -> int:
        """Nanoseconds to add to a monotonic reading to get nanoseconds since the epoch."""
        return self.epoch_ns - self.monotonic_ns

    def as_metadata(self) -> ClockMetadata:
        """The anchor as the log's metadata holds it."""
        return ClockMetadata(
            anchor_monotonic_ns=self.monotonic_ns,
            anchor_epoch_ns=self.epoch_ns,
            uncertainty_ns=self.uncertainty_ns,
        )
