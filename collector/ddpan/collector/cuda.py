"""CUDA events as `ddpan.collector.device_time` wants them: recorded and queried, never waited for."""

from __future__ import annotations

import torch

__all__ = ["CudaEvents"]


class CudaEvents:
    """Timing events of the current device, used again once they were read."""

    def __init__(self) -> None:
        self._free: list[torch.cuda.Event] = []

    def ready(self) -> bool:
        """Whether events can be recorded and queried now: while a CUDA graph is captured, either would end it."""
        return not torch.cuda.is_current_stream_capturing()

    def record(self) -> torch.cuda.Event:
        """Record an event on the current stream."""
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def passed(self, event: torch.cuda.Event) -> bool:
        """Whether the device has passed the event."""
        return bool(event.query())

    def elapsed_ns(self, first: torch.cuda.Event, second: torch.cuda.Event) -> int:
        """Nanoseconds from one passed event to another, to the microsecond or so."""
        milliseconds: float = first.elapsed_time(second)
        return round(milliseconds * 1e6)

    def release(self, event: torch.cuda.Event) -> None:
        """Keep the event for another use."""
        self._free.append(event)
