"""The communication hook of DDP: the tap before torch 2.14, and on any torch the user's own hook, wrapped.

Without a hook the reducer scales each gradient by 1/world while it copies it into the bucket, or, where the gradient
is a view of the bucket already, divides it in place; with a hook it copies and leaves the scaling to the hook. The hook
installed here repeats that arithmetic to the bit.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import torch
from torch._C._distributed_c10d import BuiltinCommHookType, GradBucket, Reducer, _register_comm_hook
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _find_tensors

from ..clock import now_ns
from ..collectives import ALL_REDUCE
from .patching import Patches
from .scaling import Scale

if TYPE_CHECKING:
    from ..segments import Slot
    from ..session import Session
    from ..steps import ModuleState
    from .ddp import Modules

__all__ = ["install"]


class BucketHook:
    """What is installed on one reducer.

    Attributes:
        user: the user's state and hook that took over from the default arithmetic, if any.
        is_default: whether the reducer's hook is this one, repeating the default arithmetic.
    """

    def __init__(self, session: Session, modules: Modules, ddp: DistributedDataParallel) -> None:
        self.serve(session, modules)
        self._ddp = weakref.ref(ddp)
        self.user: tuple[Any, Callable[..., Any]] | None = None
        self.is_default = False
        self._group = ddp.process_group
        self.scale = Scale(ddp)

    def serve(self, session: Session, modules: Modules) -> None:
        """Record for another session: the hook outlives the one that installed it."""
        self._session = session
        self._modules = modules

    def serves(self, reducer: Reducer) -> bool:
        """Whether this is the hook of ``reducer``."""
        ddp = self._ddp()
        return ddp is not None and ddp.reducer is reducer

    def __call__(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Run the user's hook, or the default reduction, and record it."""
        return self._reduce(bucket) if self.user is None else self.record_users(bucket, *self.user)

    def _reduce(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        buffer = bucket.buffer()
        self.scale(buffer, bucket)
        slot = self._launch(bucket, buffer.nbytes)
        future = self._group.allreduce([buffer]).get_future()
        recording = self._session.recording
        if slot is None or recording is None:
            return future.then(_first)
        ended = recording.ender(slot)

        def finish(done: torch.futures.Future[Any]) -> torch.Tensor:
            ended(done)
            tensor: torch.Tensor = done.value()[0]
            return tensor

        return future.then(finish)

    def record_users(
        self, bucket: GradBucket, state: Any, hook: Callable[..., Any]
    ) -> torch.futures.Future[torch.Tensor]:
        """Run the user's hook; the bucket ends when the hook's future does."""
        slot = self._launch(bucket, bucket.buffer().nbytes)
        # What the hook issues is the bucket's own communication, recorded as a whole here.
        self._session.inside += 1
        try:
            future: torch.futures.Future[torch.Tensor] = hook(state, bucket)
        finally:
            self._session.inside -= 1
        recording = self._session.recording
        if slot is not None and recording is not None:
            future.add_done_callback(recording.ender(slot))
        return future

    def announce_users(
        self, bucket: GradBucket, state: Any, hook: Callable[..., Any]
    ) -> torch.futures.Future[torch.Tensor]:
        """Run the user's hook; the first collective that it issues is recorded as the bucket's."""
        followed = self._state()
        if followed is not None and followed.armed:
            self._modules.in_hook = followed
            if bucket.is_last():
                self._modules.follow_backward(followed)
        try:
            future: torch.futures.Future[torch.Tensor] = hook(state, bucket)
        finally:
            self._modules.in_hook = None
        return future

    def _state(self) -> ModuleState | None:
        ddp = self._ddp()
        return None if ddp is None else self._modules.get(ddp)

    def _launch(self, bucket: GradBucket, size_bytes: int) -> Slot | None:
        try:
            recording, state = self._session.recording, self._state()
            if recording is None or state is None:
                return None
            if recording.steps.paused:
                recording.collectives.skip(state.group)
                return None
            if not state.armed:
                # A rank that joined launches all-reduces of zeros, which belong to no step of its own.
                return recording.collectives.launch(state.group, ALL_REDUCE, size_bytes, now_ns())
            slot = self._modules.launch(state, recording, bucket.index(), ALL_REDUCE, size_bytes, now_ns())
            if bucket.is_last():
                self._modules.follow_backward(state)
        except Exception as error:
            self._session.failed(error)
            return None
        return slot


def _first(done: torch.futures.Future[Any]) -> torch.Tensor:
    tensor: torch.Tensor = done.value()[0]
    return tensor


_installed: Final[dict[int, BucketHook]] = {}
"""The hook of each module that has one, by the module's id. A reducer never gives its hook back, so a hook stays when
the collector stops, does the arithmetic that it stands in for, and is taken over when the collector starts again."""


class Hooks:
    """The hooks of this process's modules, in the service of one session."""

    def __init__(self, session: Session, modules: Modules) -> None:
        self._session = session
        self._modules = modules
        for mine in _installed.values():
            mine.serve(session, modules)

    def put(self, ddp: DistributedDataParallel) -> None:
        """Install a hook that repeats the default arithmetic, unless DDP is used in a way that forbids one."""
        if self._session.recording is None or id(ddp) in _installed or not torch.is_grad_enabled():
            return
        if not _may_install(ddp):
            return
        mine = BucketHook(self._session, self._modules, ddp)
        mine.is_default = True
        _remember(ddp, mine)

        def ddpan_bucket_hook(_state: object, bucket: Any) -> Any:
            return mine(bucket)

        _register_comm_hook(ddp.reducer, None, ddpan_bucket_hook)

    def look(self, ddp: DistributedDataParallel, output: Any) -> None:
        """Have the gradients looked at when the backward of ``output`` begins, where the arithmetic depends on them."""
        mine = _installed.get(id(ddp))
        if mine is None or not mine.scale.must_look or not ddp.require_backward_grad_sync:
            return
        looked = [False]

        def look(_gradient: object) -> None:
            if not looked[0]:
                looked[0] = True
                mine.scale.look(ddp)

        for tensor in _find_tensors(output):
            if tensor.requires_grad:
                tensor.register_hook(self._session.guard(look))

    def observed(self, ddp: DistributedDataParallel, hook: Callable[..., Any], *, whole: bool) -> Callable[..., Any]:
        """The user's hook, recorded: as a whole, or by telling the group's hooks which bucket it works on."""
        mine = BucketHook(self._session, self._modules, ddp)
        _remember(ddp, mine)

        def observed(state: Any, bucket: Any) -> Any:
            return mine.record_users(bucket, state, hook) if whole else mine.announce_users(bucket, state, hook)

        observed.__name__, observed.__qualname__ = hook.__name__, hook.__qualname__
        return observed


def install(session: Session, modules: Modules, patches: Patches, *, own: bool) -> None:
    """Wrap the registration of hooks, and with ``own`` put a hook on every module that has none."""
    hooks = Hooks(session, modules)
    patches.replace(
        DistributedDataParallel, "register_comm_hook", lambda original: _registering(modules, hooks, original, own=own)
    )
    if own:
        patches.replace(DistributedDataParallel, "_register_builtin_comm_hook", _registering_builtin)
        patches.replace(Reducer, "_set_forward_pass_work_handle", _counting_live)
        patches.replace(
            DistributedDataParallel, "_pre_forward", lambda original: _installing(original, session.guard(hooks.put))
        )
        patches.replace(
            DistributedDataParallel, "_post_forward", lambda original: _looking(original, session.guard(hooks.look))
        )


def _remember(ddp: DistributedDataParallel, mine: BucketHook) -> None:
    _installed[id(ddp)] = mine
    weakref.finalize(ddp, _installed.pop, id(ddp), None)


def _may_install(ddp: DistributedDataParallel) -> bool:
    """Whether the reducer has room for a hook, and a hook could know the arithmetic."""
    if ddp.logger is None or ddp.mixed_precision is not None or ddp._use_python_reducer or ddp._comm_hooks:
        return False
    if ddp._get_ddp_logging_data().get("comm_hook"):
        return False
    return not any(hasattr(p, "_in_backward_optimizers") for p in ddp.module.parameters())


def _registering(modules: Modules, hooks: Hooks, original: Callable[..., Any], *, own: bool) -> Callable[..., Any]:
    @functools.wraps(original)
    def register_comm_hook(self: Any, state: object, hook: Callable[..., Any]) -> None:
        self._check_comm_hook(hook)
        modules.user_hooks[id(self)] = hook.__qualname__
        mine = _installed.get(id(self))
        if mine is None or not mine.is_default:
            original(self, state, hooks.observed(self, hook, whole=own))
            return
        # The reducer takes one hook only, and it has ours: ours hands over to the user's from now on.
        self.logger._set_comm_hook_name(hook.__qualname__)
        self._comm_hooks.append((hook, state))
        mine.user = (state, hook)
        mine.is_default = False

    return register_comm_hook


def _registering_builtin(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def _register_builtin_comm_hook(self: Any, kind: BuiltinCommHookType) -> None:
        mine = _installed.get(id(self))
        if mine is None or not mine.is_default:
            original(self, kind)
            return
        # The built-in hooks have equals in Python with the same arithmetic, which ours can hand over to.
        self.logger._set_comm_hook_name(str(kind))
        is_plain = kind == BuiltinCommHookType.ALLREDUCE
        mine.user = (None, default_hooks.allreduce_hook if is_plain else default_hooks.fp16_compress_hook)
        mine.is_default = False

    return _register_builtin_comm_hook


def _counting_live(original: Callable[..., Any]) -> Callable[..., Any]:
    def _set_forward_pass_work_handle(self: Reducer, work: Any, use_static_world_size: bool) -> None:
        for mine in _installed.values():
            if mine.serves(self):
                mine.scale.count_live(None if use_static_world_size else work)
        original(self, work, use_static_world_size)

    return _set_forward_pass_work_handle


def _installing(original: Callable[..., Any], put: Callable[[Any], None]) -> Callable[..., Any]:
    @functools.wraps(original)
    def _pre_forward(self: Any, *inputs: Any, **kwargs: Any) -> Any:
        put(self)
        return original(self, *inputs, **kwargs)

    return _pre_forward


def _looking(original: Callable[..., Any], look: Callable[[Any, Any], None]) -> Callable[..., Any]:
    @functools.wraps(original)
    def _post_forward(self: Any, output: Any) -> Any:
        result = original(self, output)
        look(self, result)
        return result

    return _post_forward
