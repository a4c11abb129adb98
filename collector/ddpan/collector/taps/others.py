"""Collectives that are no buckets of DDP: what each tap has seen of them is recorded here in the same way."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
import torch.distributed as dist

from ..clock import now_ns
from ..collectives import POINT_TO_POINT_CODES
from ..segments import COLLECTIVE, Slot
from .patching import Patches
from .payload import payload_bytes

if TYPE_CHECKING:
    from ..recording import Recording
    from ..session import Session
    from .reductions import Reductions

__all__ = ["Others"]

_MOST_AWAITED: Final = 256
_AT_ONCE_NS: Final = 200_000
"""A wait that begins so soon after the collective was issued began with it: some backends do the work while it is."""


class _Awaited(NamedTuple):
    """A collective that somebody may call ``wait()`` for.

    Attributes:
        work: keeps it alive until it ends, None since then: it holds on to tensors.
        ref: tells it from another that gets its id once it is gone.
        slot: its record.
        issued_ns: when its function had issued it.
    """

    work: Any
    ref: weakref.ref[Any]
    slot: Slot
    issued_ns: int


class Others:
    """Records collectives that are no buckets of DDP, and when ranks stand still for them.

    A rank that calls ``wait()`` on a collective's work, as the synchronous functions of ``torch.distributed`` do, does
    nothing else until it ends, unless a thread beside that of the training does it. Some works, such as those of gloo's
    sends, receives and reduce-scatters, tell their end in no other way.

    Args:
        session: in whose service it records.
        reductions: tells which of the collectives reduce the gradients of a module that is not DDP's.
        look: looks for frameworks that were imported in the meantime.
    """

    def __init__(self, session: Session, reductions: Reductions, *, look: Callable[[], None]) -> None:
        self._session = session
        self._look = look
        self._reductions = reductions
        self._awaited: dict[int, _Awaited] = {}

    def install(self, patches: Patches) -> None:
        """Watch ``wait()`` of all works."""
        patches.replace(dist.Work, "wait", self._waiting)

    def forget(self) -> None:
        """The recording ends."""
        self._awaited.clear()

    def launch(
        self, recording: Recording, group: dist.ProcessGroup, op: int, tensors: Iterable[torch.Tensor], launch_ns: int
    ) -> Slot | None:
        """Record that a collective is issued on ``group`` that sends, or as a receive takes in, ``tensors``."""
        self._look()
        number = self._session.group_number(group)
        self._reductions.begin_reducing(recording, number, op)
        if recording.steps.paused:
            # Only counted, so that ranks still join where recording goes on.
            if op not in POINT_TO_POINT_CODES:
                recording.collectives.skip(number)
            return None
        size = payload_bytes(tensors)
        if op in POINT_TO_POINT_CODES:
            slot = recording.collectives.launch_point_to_point(number, op, size, launch_ns)
        else:
            slot = self._reductions.launch(recording, number, op, size, launch_ns)
        if slot is not None:
            recording.launched(slot)
        return slot

    def issued(self, recording: Recording, slot: Slot, work: Any) -> None:
        """The collective of ``slot`` was issued as ``work``; None if it is over already."""
        if recording.runs_on_device(slot):
            if work is None:
                recording.ended(slot)
                return
            work.get_future().add_done_callback(recording.ender(slot))
            return
        if work is None:
            recording.collectives.waited(slot, None, now_ns())
            return
        awaited = self._awaited
        key = id(work)
        if len(awaited) >= _MOST_AWAITED:
            # Nobody will wait for the oldest, so it seems, and it holds on to its tensors.
            del awaited[next(iter(awaited))]
        awaited[key] = _Awaited(work, weakref.ref(work), slot, now_ns())
        try:
            future = work.get_future()
        except RuntimeError:
            return
        end = recording.ender(slot)

        def ended(done: object) -> None:
            end(done)
            slot[0].keep(slot[1], COLLECTIVE.size)
            entry = awaited.get(key)
            if entry is not None and entry.slot is slot:
                # Let go of the work and its tensors; a call of wait() still tells that the rank did not stand still.
                awaited[key] = entry._replace(work=None)

        future.add_done_callback(ended)

    def _waiting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        awaited = self._awaited
        waited = self._session.guard(self._waited)

        def wait(self: Any, *args: Any, **kwargs: Any) -> Any:
            found = awaited.pop(id(self), None) if awaited else None
            if found is None or found.ref() is not self:
                return original(self, *args, **kwargs)
            start_ns = now_ns()
            result = original(self, *args, **kwargs)
            waited(found, start_ns, now_ns())
            return result

        return wait

    def _waited(self, awaited: _Awaited, start_ns: int, end_ns: int) -> None:
        recording = self._session.recording
        if recording is None:
            return
        if self._session.is_training_thread():
            since_launch = start_ns - awaited.issued_ns < _AT_ONCE_NS
            recording.collectives.waited(awaited.slot, None if since_launch else start_ns, end_ns)
        else:
            recording.ender(awaited.slot)(None)
