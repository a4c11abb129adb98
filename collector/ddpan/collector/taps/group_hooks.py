"""The tap of torch >= 2.14: hooks of the process group see every collective, the reducer's included."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import torch.distributed as dist
from torch._C import _distributed_c10d
from torch.distributed import ProcessGroup

from ..clock import now_ns
from ..collectives import BETWEEN_TWO, OP_CODES
from ..segments import Slot
from .buckets import Buckets
from .others import Others

if TYPE_CHECKING:
    from ..recording import Recording
    from ..session import Session
    from .ddp import Modules

__all__ = ["GroupHooks", "available"]

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
        self._buckets = Buckets(modules, session.group_number)
        self._attached: list[Any] = []

    def attach(self, group: Any) -> None:
        """Listen to a group."""
        pending: dict[int, Slot] = {}
        others: dict[int, Slot] = {}
        group.register_pre_hook(HOOK_ID, self._before(group, pending, others))
        group.register_post_hook(HOOK_ID, self._after(pending, others))
        self._attached.append(group)

    def detach(self, group: Any) -> None:
        """Stop to listen to a group."""
        if group in self._attached:
            self._attached.remove(group)
            group.unregister_pre_hook(HOOK_ID)
            group.unregister_post_hook(HOOK_ID)

    def detach_all(self) -> None:
        """Stop to listen."""
        for group in list(self._attached):
            self.detach(group)

    def _before(self, group: ProcessGroup, pending: dict[int, Slot], others: dict[int, Slot]) -> Callable[[Any], None]:
        session, modules = self._session, self._modules
        launch_other = self._others.launch
        armed, find = modules.armed, self._buckets.find
        ops, all_reduce = self._ops, self._all_reduce

        def before(call: Any) -> None:
            launch_ns = now_ns()
            recording = session.recording
            if recording is None:
                return
            try:
                if recording.steps.paused:
                    self._skip(call, group, recording)
                    return
                tensors = call.input_tensors
                name = call.name
                bucket = find(group, tensors, is_all_reduce=name == all_reduce) if armed else None
                if bucket is None:
                    op = ops[name]
                    if op is None:
                        return
                    slot = launch_other(recording, group, op, call.output_tensors if op == RECV else tensors, launch_ns)
                    if slot is not None:
                        others[call.op_id] = slot
                    return
                state, index, size = bucket
                slot = modules.launch(state, recording, index, size, launch_ns)
                if state.all_launched:
                    modules.follow_backward(state)
                if slot is not None:
                    pending[call.op_id] = slot
            except Exception as error:
                session.failed(error)

        return before

    def _skip(self, call: Any, group: ProcessGroup, recording: Recording) -> None:
        """Count a collective that is not recorded."""
        op = self._ops[call.name]
        if op is not None and op not in BETWEEN_TWO:
            recording.collectives.skip(self._session.group_number(group))

    def _after(self, pending: dict[int, Slot], others: dict[int, Slot]) -> Callable[[Any], None]:
        session, issued = self._session, self._others.issued

        def after(call: Any) -> None:
            recording = session.recording
            if recording is None or not (pending or others):
                return
            try:
                slot = pending.pop(call.op_id, None)
                work = call.work
                if slot is not None:
                    if work is not None:
                        work.get_future().add_done_callback(recording.ender(slot))
                elif (other := others.pop(call.op_id, None)) is not None and work is not None:
                    issued(recording, other, work)
            except RuntimeError:
                # Works of some backends have no future: their end stays unknown.
                return
            except Exception as error:
                session.failed(error)

        return after
