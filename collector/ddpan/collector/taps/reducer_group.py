"""The tap before torch 2.14: the process group on which a DDP module's reducer issues its collectives.

A reducer can be given another process group between any two backwards. The one that it is given here records what the
reducer issues, and passes it on to the module's group. All arithmetic stays the reducer's own.

On torch >= 2.14 the hooks of the process group see what the reducer issues. There such a group only announces a bucket
to them where its size does not tell it: under a communication hook in C++, which may compress.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel

from ..clock import now_ns
from ..collectives import ALL_REDUCE, OP_CODES
from .buckets import find_in
from .patching import Patches, observed
from .payload import payload_bytes

if TYPE_CHECKING:
    from ..recording import Recording
    from ..segments import Slot
    from ..session import Session
    from ..steps import ModuleState
    from .ddp import Modules
    from .others import Others

__all__ = ["ReducerGroups"]

# As they were before any tap wrapped them: what the reducer issues is recorded here.
_all_reduce: Final = ProcessGroup.allreduce
_broadcast: Final = ProcessGroup.broadcast

BROADCAST: Final = OP_CODES["broadcast"]
USED_MAP: Final = torch.int32
"""Type of the map of used parameters, which the reducer reduces as well. No gradient has it."""


class ReducerGroup(ProcessGroup):
    """Stands between one reducer and its group.

    It is called as long as the reducer lives, recording or not: a communication hook in C++ keeps the group that the
    reducer had when the hook was registered.

    Args:
        ddp: whose reducer it is.

    Attributes:
        ddp: the module, if it still exists.
        group: the module's group, which does the work.
        tap: who is told of what passes, None for nobody.
        in_order: whether each bucket is the one that comes next, whatever its size.
    """

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self.ddp = weakref.ref(ddp)
        self.group: ProcessGroup = ddp.process_group
        self.tap: ReducerGroups | None = None
        self.in_order = False
        super().__init__(self.group.rank(), self.group.size())  # type: ignore[call-arg]

    def allreduce(self, tensors: list[torch.Tensor], options: Any) -> Any:  # type: ignore[override]
        """What the reducer calls for each bucket, and for the map of used parameters."""
        tap = self.tap
        slot, is_bucket = (None, False) if tap is None else tap.launch(self, tensors)
        work = _all_reduce(self.group, tensors, options)
        if tap is not None:
            if slot is not None:
                tap.issued(slot, work, is_bucket=is_bucket)
            if self.in_order:
                tap.follow(self)
        return work

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> Any:  # type: ignore[override]
        """What the reducer calls when it has rebuilt its buckets: all ranks take the arrangement of rank 0."""
        tap = self.tap
        slot = None if tap is None else tap.launch_broadcast(self, tensors)
        work = _broadcast(self.group, tensors, options)
        if slot is not None and tap is not None:
            tap.issued(slot, work, is_bucket=False)
        return work


_given: Final[dict[int, ReducerGroup]] = {}
"""The group that each module's reducer was given, by the module's id."""


class ReducerGroups:
    """The groups that reducers were given, in the service of one session.

    Args:
        session: in whose service they are.
        modules: the modules of the session.
        others: records what is no bucket.
        own: whether collectives are recorded here, or announced to the hooks of the process group.
    """

    def __init__(self, session: Session, modules: Modules, others: Others, *, own: bool) -> None:
        self._session = session
        self._modules = modules
        self._others = others
        self._own = own
        self._paused = False

    def install(self, patches: Patches) -> None:
        """Give every reducer a group of ours when its module's next forward begins, if they record.

        From now on this session records, even where one before it could not be taken out.
        """
        for mine in _given.values():
            mine.tap = None
        if self._own:
            put = self._session.guard(self._put_if_recording)
            patches.replace(DistributedDataParallel, "_pre_forward", functools.partial(observed, before=put))
        exchanged = self._session.guard(self._exchanged)
        patches.replace(
            DistributedDataParallel, "_update_process_group", functools.partial(_exchanging, exchanged=exchanged)
        )

    def put(self, ddp: DistributedDataParallel) -> None:
        """Have the reducer of a module call a group of ours; nothing where it does, or where there is no reducer."""
        mine = _given.get(id(ddp))
        if mine is None or mine.ddp() is not ddp:
            if ddp.logger is None or ddp._use_python_reducer:
                return
            mine = _given[id(ddp)] = ReducerGroup(ddp)
            weakref.finalize(ddp.reducer, _drop, id(ddp), mine).atexit = False
        elif mine.tap is not None:
            return
        mine.tap = self
        if not self._paused:
            ddp.reducer._update_process_group(mine)

    def put_for_hook(self, ddp: DistributedDataParallel) -> None:
        """The same, for the hook in C++ that is about to be registered: it may send something else than the buckets."""
        self.put(ddp)
        mine = _given.get(id(ddp))
        if mine is not None:
            mine.in_order = True

    def pause(self, paused: bool) -> None:
        """While paused, have reducers call the groups of their modules, unseen."""
        self._paused = paused
        for mine in _given.values():
            ddp = mine.ddp()
            if mine.tap is self and ddp is not None:
                ddp.reducer._update_process_group(mine.group if paused else mine)

    def take_all(self) -> None:
        """Have every reducer call the group of its module again."""
        self._paused = False
        for mine in list(_given.values()):
            if mine.tap is self:
                mine.tap = None
                ddp = mine.ddp()
                if ddp is not None:
                    ddp.reducer._update_process_group(mine.group)

    def launch(self, mine: ReducerGroup, tensors: list[torch.Tensor]) -> tuple[Slot | None, bool]:
        """Record that the reducer issues an all-reduce; whether it is a bucket comes second."""
        launch_ns = now_ns()
        session = self._session
        recording = session.recording
        if recording is None or session.inside.depth:
            return None, False
        try:
            found = None if recording.steps.paused else self._find(mine, tensors)
            if found is None:
                return self._launch_other(recording, mine, ALL_REDUCE, tensors, launch_ns), False
            if self._own:
                return self._modules.launch(*found, launch_ns), True
            self._modules.in_hook = found[0]
        except Exception as error:
            session.failed(error)
        return None, False

    def launch_broadcast(self, mine: ReducerGroup, tensors: list[torch.Tensor]) -> Slot | None:
        """Record that the reducer issues a broadcast."""
        launch_ns = now_ns()
        recording = self._session.recording
        if recording is None:
            return None
        try:
            return self._launch_other(recording, mine, BROADCAST, tensors, launch_ns)
        except Exception as error:
            self._session.failed(error)
            return None

    def issued(self, slot: Slot, work: Any, *, is_bucket: bool) -> None:
        """The collective of ``slot`` was issued as ``work``."""
        recording = self._session.recording
        if recording is None:
            return
        try:
            if is_bucket:
                work.get_future().add_done_callback(recording.ender(slot))
            else:
                self._others.issued(recording, slot, work)
        except RuntimeError:
            # Works of some backends have no future: their end stays unknown.
            return
        except Exception as error:
            self._session.failed(error)

    def follow(self, mine: ReducerGroup) -> None:
        """Have the end of the backward told, where what is sent does not tell which bucket is the last."""
        try:
            state = self._state(mine)
            if state is not None and not state.knows_sizes:
                self._modules.follow_backward(state)
        except Exception as error:
            self._session.failed(error)

    def _state(self, mine: ReducerGroup) -> ModuleState | None:
        """The module's state while its buckets are due.

        A rank that joined launches all-reduces of zeros, which belong to no step of its own.
        """
        ddp = mine.ddp()
        state = None if ddp is None else self._modules.get(ddp)
        return state if state is not None and state.armed else None

    def _find(self, mine: ReducerGroup, tensors: list[torch.Tensor]) -> tuple[ModuleState, int, int] | None:
        """The bucket that an all-reduce of the reducer is."""
        state = self._state(mine)
        [tensor] = tensors
        if state is None or tensor.dtype is USED_MAP:
            return None
        return (state, state.next_bucket, payload_bytes(tensors)) if mine.in_order else find_in(state, tensor)

    def _launch_other(
        self, recording: Recording, mine: ReducerGroup, op: int, tensors: list[torch.Tensor], launch_ns: int
    ) -> Slot | None:
        return self._others.launch(recording, mine.group, op, tensors, launch_ns) if self._own else None

    def _put_if_recording(self, ddp: DistributedDataParallel) -> None:
        if self._session.recording is not None:
            self.put(ddp)

    def _exchanged(self, ddp: DistributedDataParallel) -> None:
        """The module, and its reducer, were given another process group."""
        if _given.pop(id(ddp), None) is not None:
            self.put(ddp)
        self._modules.moved(ddp)


def _drop(key: int, mine: ReducerGroup) -> None:
    """The reducer that called ``mine`` is gone. As an argument of its finalizer, the group has lived until now."""
    if _given.get(key) is mine:
        del _given[key]


def _exchanging(original: Callable[..., Any], *, exchanged: Callable[[Any], None]) -> Callable[..., Any]:
    @functools.wraps(original)
    def _update_process_group(self: Any, new_process_group: Any) -> None:
        original(self, new_process_group)
        exchanged(self)

    return _update_process_group
