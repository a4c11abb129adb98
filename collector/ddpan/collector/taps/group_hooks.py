"""The tap of torch >= 2.14: hooks of the process group see every collective, the reducer's included."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d
from torch.distributed import ProcessGroup

from ..clock import now_ns
from ..collectives import ALL_REDUCE, OP_CODES
from ..segments import Slot

if TYPE_CHECKING:
    from ..session import Session
    from ..steps import ModuleState
    from .ddp import Modules

__all__ = ["GroupHooks", "available"]

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


def available() -> bool:
    """Whether this torch has hooks on process groups."""
    return dist.is_available() and hasattr(dist.ProcessGroup, "register_pre_hook")


def _hook_ops() -> dict[str, Any]:
    return dict(vars(_distributed_c10d)["HookOpName"].__members__)


class GroupHooks:
    """Hooks on every process group of the recording."""

    def __init__(self, session: Session, modules: Modules) -> None:
        self._session = session
        self._modules = modules
        self._ops = {
            value: OP_CODES[_NAMES[name]] if name in _NAMES else OP_CODES["unknown"]
            for name, value in _hook_ops().items()
        }
        self._all_reduce = _hook_ops()["ALLREDUCE"]
        self._attached: list[Any] = []

    def attach(self, group: Any) -> None:
        """Listen to a group."""
        pending: dict[int, Slot] = {}
        group.register_pre_hook(HOOK_ID, self._before(group, pending))
        group.register_post_hook(HOOK_ID, self._after(pending))
        self._attached.append(group)

    def detach_all(self) -> None:
        """Stop to listen."""
        while self._attached:
            group = self._attached.pop()
            group.unregister_pre_hook(HOOK_ID)
            group.unregister_post_hook(HOOK_ID)

    def _before(self, group: ProcessGroup, pending: dict[int, Slot]) -> Callable[[Any], None]:
        session, modules = self._session, self._modules
        armed = modules.armed

        def before(call: Any) -> None:
            launch_ns = now_ns()
            recording = session.recording
            if recording is None:
                return
            try:
                if recording.steps.paused:
                    recording.collectives.skip(session.group_number(group))
                    return
                tensors = call.input_tensors
                bucket = self._bucket(call, tensors) if armed else None
                if bucket is None:
                    size = sum(tensor.nbytes for tensor in tensors)
                    slot = recording.collectives.launch(
                        session.group_number(group), self._ops[call.name], size, launch_ns
                    )
                    if slot is not None:
                        recording.launched(slot)
                else:
                    state, size = bucket
                    slot = modules.launch(state, recording, state.next_bucket, ALL_REDUCE, size, launch_ns)
                    if state.all_launched:
                        modules.follow_backward(state)
                if slot is not None:
                    pending[call.op_id] = slot
            except Exception as error:
                session.failed(error)

        return before

    def _after(self, pending: dict[int, Slot]) -> Callable[[Any], None]:
        session = self._session

        def after(call: Any) -> None:
            recording = session.recording
            if recording is None or not pending:
                return
            try:
                slot = pending.pop(call.op_id, None)
                work = call.work
                if slot is not None and work is not None:
                    work.get_future().add_done_callback(recording.ender(slot))
            except RuntimeError:
                # Sends, receives and barriers of some backends have no future: their end stays unknown.
                return
            except Exception as error:
                session.failed(error)

        return after

    def _bucket(self, call: Any, tensors: list[Any]) -> tuple[ModuleState, int] | None:
        """The module whose next bucket this collective is, and the bytes; None if it is no bucket.

        A bucket has a buffer of its own while a layout lasts, so its address tells. The first time in a layout it is
        an all-reduce of one tensor, launched by a backward, of the size that the layout expects next.
        """
        if self._modules.in_hook is not None:
            state, self._modules.in_hook = self._modules.in_hook, None
            return state, sum(tensor.nbytes for tensor in tensors)
        if len(tensors) != 1:
            return None
        address = tensors[0].data_ptr()
        for state in self._modules.armed:
            if state.layout is not None and state.addresses.get(address) == state.next_bucket:
                sizes = state.layout.sizes_bytes
                return state, sizes[state.next_bucket] if sizes else tensors[0].nbytes
        if torch._C._current_graph_task_id() == -1 or call.name != self._all_reduce:
            return None
        size = tensors[0].nbytes
        for state in self._modules.armed:
            if state.expects(size):
                state.addresses[address] = state.next_bucket
                return state, size
        return None
