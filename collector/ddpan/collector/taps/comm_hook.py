"""The communication hooks that users register on DDP, wrapped.

Before torch 2.14 a hook is recorded as a whole: what it issues at once is the bucket's own communication. On
torch >= 2.14, where the hooks of the process group see every collective, the first one that it issues is the bucket's.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import torch
from torch._C._distributed_c10d import BuiltinCommHookType, GradBucket
from torch.nn.parallel import DistributedDataParallel

from ..clock import now_ns
from ..collectives import ALL_REDUCE
from .patching import Patches
from .payload import payload_bytes

if TYPE_CHECKING:
    from ..segments import Slot
    from ..session import Session
    from ..steps import ModuleState
    from .ddp import Modules
    from .reducer_group import ReducerGroups

__all__ = ["install"]

Hook = Callable[[Any, Any], Any]
"""A user's hook, which is given the state that the user registered with it, and the bucket."""


class HookRecorder:
    """Runs the hook of one module, and records it.

    Args:
        session: in whose service it begins.
        modules: the modules of the session.
        ddp: the module.
        whole: whether the hook is recorded as a whole, or announced to the hooks of the process group.
    """

    def __init__(self, session: Session, modules: Modules, ddp: DistributedDataParallel, *, whole: bool) -> None:
        self.serve(session, modules)
        self._ddp = weakref.ref(ddp)
        self._whole = whole

    def serve(self, session: Session, modules: Modules) -> None:
        """Record for another session: a hook outlives the session in which it was registered."""
        self._session = session
        self._modules = modules

    def run(self, bucket: GradBucket, state: Any, hook: Hook) -> torch.futures.Future[torch.Tensor]:
        """Run the hook."""
        return self._record(bucket, state, hook) if self._whole else self._announce(bucket, state, hook)

    def _record(self, bucket: GradBucket, state: Any, hook: Hook) -> torch.futures.Future[torch.Tensor]:
        """Run the hook; the bucket ends when the hook's future does."""
        slot = self._launch(bucket)
        # What the hook issues at once is the bucket's own communication, recorded as a whole here.
        inside = self._session.inside
        inside.depth += 1
        try:
            future: torch.futures.Future[torch.Tensor] = hook(state, bucket)
        finally:
            inside.depth -= 1
        ended = self._ender(slot)
        if ended is not None:
            future.add_done_callback(ended)
        return future

    def _announce(self, bucket: GradBucket, state: Any, hook: Hook) -> torch.futures.Future[torch.Tensor]:
        """Run the hook; the first collective that it issues is recorded as the bucket's."""
        entered = self._enter(bucket)
        try:
            future: torch.futures.Future[torch.Tensor] = hook(state, bucket)
        finally:
            self._modules.in_hook = None
        if entered is not None and (bucket.is_last() or entered.skips_buckets):
            self._session.guard(self._modules.follow_backward)(entered)
        return future

    def _state(self) -> ModuleState | None:
        ddp = self._ddp()
        return None if ddp is None else self._modules.get(ddp)

    def _launch(self, bucket: GradBucket) -> Slot | None:
        try:
            recording, state = self._session.recording, self._state()
            if recording is None or state is None:
                return None
            if recording.steps.paused:
                recording.collectives.skip(state.group)
                return None
            buffer = bucket.buffer()
            size_bytes = payload_bytes([buffer]) if buffer.is_sparse else buffer.nbytes
            if not state.armed:
                # A rank that joined launches all-reduces of zeros, which belong to no step of its own.
                return recording.collectives.launch(state.group, ALL_REDUCE, size_bytes, now_ns())
            # In the first iteration of a static graph all buckets say that they are the first and not the last.
            index = max(bucket.index(), state.next_bucket)
            slot = self._modules.launch(state, index, size_bytes, now_ns())
            if not state.following and not state.knows_sizes and bucket.is_last():
                self._modules.follow_backward(state)
        except Exception as error:
            self._session.failed(error)
            return None
        return slot

    def _ender(self, slot: Slot | None) -> Callable[[object], None] | None:
        recording = self._session.recording
        if slot is None or recording is None:
            return None
        try:
            return recording.ender(slot)
        except Exception as error:
            self._session.failed(error)
            return None

    def _enter(self, bucket: GradBucket) -> ModuleState | None:
        """Announce the bucket; the module whose it is, if its backward is followed."""
        try:
            state = self._state()
            if state is None or not state.armed:
                return None
            state.next_bucket = max(bucket.index(), state.next_bucket)
            self._modules.in_hook = state
        except Exception as error:
            self._session.failed(error)
            return None
        return state


_recorders: Final[dict[int, HookRecorder]] = {}
"""The recorder of each module with a user's hook, by the module's id. A reducer never gives a hook back, so recorders
stay when the collector stops, and are taken over when it starts again."""


def install(session: Session, modules: Modules, groups: ReducerGroups, patches: Patches, *, whole: bool) -> None:
    """Wrap the registration of hooks; ``whole`` is as in `HookRecorder`."""
    for recorder in _recorders.values():
        recorder.serve(session, modules)

    def observed(ddp: DistributedDataParallel, hook: Hook) -> Hook:
        recorder = _recorders[id(ddp)] = HookRecorder(session, modules, ddp, whole=whole)
        weakref.finalize(ddp, _recorders.pop, id(ddp), None)

        @functools.wraps(hook)
        def observed(state: Any, bucket: Any) -> Any:
            return recorder.run(bucket, state, hook)

        return observed

    patches.replace(
        DistributedDataParallel, "register_comm_hook", lambda original: _registering(modules, observed, original)
    )
    patches.replace(
        DistributedDataParallel,
        "_register_builtin_comm_hook",
        lambda original: _registering_builtin(session, modules, groups, original),
    )


def _registering(
    modules: Modules, observed: Callable[[DistributedDataParallel, Hook], Hook], original: Callable[..., Any]
) -> Callable[..., Any]:
    @functools.wraps(original)
    def register_comm_hook(self: Any, state: object, hook: Hook) -> None:
        if self._use_python_reducer:
            # The compiler looks into the hook, and there is no bucket.
            original(self, state, hook)
            return
        original(self, state, observed(self, hook))
        modules.name_hook(self, hook.__qualname__)

    return register_comm_hook


def _registering_builtin(
    session: Session, modules: Modules, groups: ReducerGroups, original: Callable[..., Any]
) -> Callable[..., Any]:
    prepare = session.guard(groups.put_for_hook)

    @functools.wraps(original)
    def _register_builtin_comm_hook(self: Any, kind: BuiltinCommHookType) -> None:
        # Such a hook keeps the group that the reducer has now.
        prepare(self)
        original(self, kind)
        modules.name_hook(self, str(kind))

    return _register_builtin_comm_hook
