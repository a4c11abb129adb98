"""The tap of torch >= 2.14: hooks of the process group see every collective, the reducer's included."""

from __future__ import annotations

from _thread import get_ident
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import torch.distributed as dist
from torch._C import _distributed_c10d
from torch.distributed import ProcessGroup

from ..clock import now_ns
from ..collectives import OP_CODES
from ..segments import Slot
from .buckets import Buckets
from .others import Others

if TYPE_CHECKING:
    from ..recording import Recording
    from ..session import Session
    from .ddp import Modules

__all__ = ["GroupHooks", "available"]

Pending = dict[int, tuple[Slot | None, bool]]
"""The record of the collective that a thread is issuing, and whether it is a bucket, by the thread's id: both hooks of
a collective run on that thread."""

NOTHING: Final = (None, False)
RECV: Final = OP_CODES["recv"]
HOOK_ID: Final = 0xDD9A
_NAMES: Final = {
    "ALLREDUCE": "all_reduce",
    "ALLGATHER": "all_gather",
    "REDUCE_SCATTER": "reduce_scatter",
    "BROADCAST": "broadcast",
    "REDUCE": "reduce",
    "ALLTOALL": "all_to_all",
    "BARRIER": "barrier",
    "GATHER": "gather",
    "SCATTER": "scatter",
    "SEND": "send",
    "RECV": "recv",
}
_NO_COLLECTIVES: Final = ("SPLIT", "NEW_WINDOW")


def available() -> bool:
    """Whether this torch has hooks on process groups."""
    return dist.is_available() and hasattr(dist.ProcessGroup, "register_pre_hook")


def _hook_ops() -> dict[str, Any]:
    return dict(vars(_distributed_c10d)["HookOpName"].__members__)


class Listener:
    """The hooks on one process group.

    Args:
        group: the process group.
        before: called with each call of a collective before it is issued.
        after: called with it when it has been issued.
    """

    def __init__(self, group: Any, before: Callable[[Any], None], after: Callable[[Any], None]) -> None:
        self._hooks = [
            _Hook(group.register_pre_hook, group.unregister_pre_hook, before),
            _Hook(group.register_post_hook, group.unregister_post_hook, after),
        ]

    def listen(self, *, before: bool, after: bool) -> None:
        """Have these hooks in place, and no other."""
        for hook, wanted in zip(self._hooks, (before, after), strict=True):
            hook.put(wanted)


class _Hook:
    """One hook that can be taken out and put back."""

    def __init__(self, register: Callable[..., None], unregister: Callable[..., None], hook: Callable[..., None]):
        self._register = register
        self._unregister = unregister
        self._hook = hook
        self._is_in = False

    def put(self, wanted: bool) -> None:
        if wanted and not self._is_in:
            self._register(HOOK_ID, self._hook)
        elif self._is_in and not wanted:
            self._unregister(HOOK_ID)
        self._is_in = wanted


class GroupHooks:
    """Hooks on every process group of the recording."""

    def __init__(self, session: Session, modules: Modules, others: Others) -> None:
        self._session = session
        self._modules = modules
        self._others = others
        self._ops = {
            value: None if name in _NO_COLLECTIVES else OP_CODES[_NAMES.get(name, "unknown")]
            for name, value in _hook_ops().items()
        }
        self._all_reduce = _hook_ops()["ALLREDUCE"]
        self._buckets = Buckets(modules)
        self._listeners: dict[Any, Listener] = {}
        self._paused = False

    def attach(self, group: Any) -> None:
        """Listen to a group."""
        pending: Pending = {}
        listener = self._listeners[group] = Listener(group, self._before(group, pending), self._after(pending))
        listener.listen(before=True, after=not self._paused)

    def detach(self, group: Any) -> None:
        """Stop to listen to a group."""
        listener = self._listeners.pop(group, None)
        if listener is not None:
            listener.listen(before=False, after=False)

    def pause(self, paused: bool, *, uncounted: bool) -> None:
        """While steps are left out, count collectives only, and with ``uncounted`` not those on DDP's groups.

        On other groups, some of whose ranks may have no steps, they are counted in any case.
        """
        self._paused = paused
        reducing = self._modules.groups if uncounted else ()
        for group, listener in self._listeners.items():
            counted = self._session.group_number(group) not in reducing
            listener.listen(before=counted, after=not paused)

    def detach_all(self) -> None:
        """Stop to listen."""
        for group in list(self._listeners):
            self.detach(group)
        self._paused = False

    def _before(self, group: ProcessGroup, pending: Pending) -> Callable[[Any], None]:
        session, modules, record = self._session, self._modules, self._record
        armed, known, launch = modules.armed, self._buckets.known, modules.launch

        def before(call: Any) -> None:
            launch_ns = now_ns()
            recording = session.recording
            if recording is None:
                return
            try:
                # Each attribute of the call costs a conversion, so buckets, which are many, are asked for one only.
                due = (armed or modules.in_hook is not None) and not recording.steps.paused
                bucket = known(call.input_tensors) if due else None
                if bucket is None:
                    pending[get_ident()] = record(call, group, recording, launch_ns)
                else:
                    pending[get_ident()] = launch(*bucket, launch_ns), True
            except Exception as error:
                session.failed(error)

        return before

    def _record(self, call: Any, group: ProcessGroup, recording: Recording, launch_ns: int) -> tuple[Slot | None, bool]:
        """Record a collective which is no bucket, or a bucket that is seen for the first time."""
        name = call.name
        op = self._ops[name]
        if op is None:
            return None, False
        tensors = call.output_tensors if op == RECV else call.input_tensors
        if self._modules.armed and name == self._all_reduce and not recording.steps.paused:
            bucket = self._buckets.find(self._session.group_number(group), tensors)
            if bucket is not None:
                return self._modules.launch(*bucket, launch_ns), True
        return self._others.launch(recording, group, op, tensors, launch_ns), False

    def _after(self, pending: Pending) -> Callable[[Any], None]:
        session, issued = self._session, self._others.issued

        def after(call: Any) -> None:
            slot, is_bucket = pending.pop(get_ident(), NOTHING)
            recording = session.recording
            if slot is None or recording is None:
                return
            try:
                work = call.work
                if work is None:
                    return
                if is_bucket:
                    work.get_future().add_done_callback(recording.ender(slot))
                else:
                    issued(recording, slot, work)
            except RuntimeError:
                # Works of some backends have no future: their end stays unknown.
                return
            except Exception as error:
                session.failed(error)

        return after
