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
from torch.distributed import ProcessGroup
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _find_tensors

from ..clock import now_ns
from ..collectives import ALL_REDUCE
from .patching import Patches
from .payload import payload_bytes
from .scaling import Scale

if TYPE_CHECKING:
    from ..segments import Slot
    from ..session import Session
    from ..steps import ModuleState
    from .ddp import Modules

__all__ = ["install"]

_all_reduce: Final = ProcessGroup.allreduce
"""As it was before any tap wrapped it: the bucket is recorded here."""

UserHook = tuple[Any, Callable[..., Any]]
"""State and hook, as they are registered."""


class BucketHook:
    """What is installed on one reducer.

    Args:
        session: in whose service it begins.
        modules: the modules of the session.
        ddp: whose reducer it is.
        whole: whether a user's hook is recorded as a whole, or announced to the hooks of the process group.

    Attributes:
        user: the user's state and hook that took over from the default arithmetic, if any.
        is_default: whether the reducer's hook is this one, repeating the default arithmetic.
    """

    def __init__(self, session: Session, modules: Modules, ddp: DistributedDataParallel, *, whole: bool) -> None:
        self.serve(session, modules)
        self._ddp = weakref.ref(ddp)
        self._whole = whole
        self.user: UserHook | None = None
        self.is_default = False
        self._group = ddp.process_group
        self.scale = Scale(ddp)

    def serve(self, session: Session, modules: Modules) -> None:
        """Record for another session: the hook outlives the one that installed it."""
        self._session = session
        self._modules = modules

    def look(self, ddp: DistributedDataParallel, _inputs: object, output: Any) -> None:
        """Have the gradients looked at when the backward of ``output`` begins, where the arithmetic depends on them."""
        if not self.scale.must_look or not ddp.require_backward_grad_sync or torch.compiler.is_compiling():
            return
        looked = [False]

        def look(_gradient: object) -> None:
            if not looked[0]:
                looked[0] = True
                self._session.guard(self.scale.look)(ddp)

        for tensor in _find_tensors(output):
            if tensor.requires_grad:
                tensor.register_hook(look)

    def serves(self, reducer: Reducer) -> bool:
        """Whether this is the hook of ``reducer``."""
        ddp = self._ddp()
        return ddp is not None and ddp.reducer is reducer

    def __call__(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Run the user's hook, or the default reduction, and record it."""
        return self._reduce(bucket) if self.user is None else self.run_users(bucket, *self.user)

    def _reduce(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        buffer = bucket.buffer()
        self.scale(buffer, bucket)
        ended = self._ender(self._launch(bucket, buffer))
        future = _all_reduce(self._group, [buffer]).get_future()
        if ended is None:
            return future.then(_first)

        def finish(done: torch.futures.Future[Any]) -> torch.Tensor:
            ended(done)
            tensor: torch.Tensor = done.value()[0]
            return tensor

        return future.then(finish)

    def run_users(self, bucket: GradBucket, state: Any, hook: Callable[..., Any]) -> torch.futures.Future[torch.Tensor]:
        """Run the user's hook, and record it."""
        return self._record(bucket, state, hook) if self._whole else self._announce(bucket, state, hook)

    def _record(self, bucket: GradBucket, state: Any, hook: Callable[..., Any]) -> torch.futures.Future[torch.Tensor]:
        """Run the user's hook; the bucket ends when the hook's future does."""
        slot = self._launch(bucket, bucket.buffer())
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

    def _announce(self, bucket: GradBucket, state: Any, hook: Callable[..., Any]) -> torch.futures.Future[torch.Tensor]:
        """Run the user's hook; the first collective that it issues is recorded as the bucket's."""
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

    def _launch(self, bucket: GradBucket, buffer: torch.Tensor) -> Slot | None:
        try:
            recording, state = self._session.recording, self._state()
            if recording is None or state is None:
                return None
            if recording.steps.paused:
                recording.collectives.skip(state.group)
                return None
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


def _first(done: torch.futures.Future[Any]) -> torch.Tensor:
    tensor: torch.Tensor = done.value()[0]
    return tensor


_installed: Final[dict[int, BucketHook]] = {}
"""The hook of each module that has one, by the module's id. A reducer never gives its hook back, so a hook stays when
the collector stops, does the arithmetic that it stands in for, and is taken over when the collector starts again."""


class Hooks:
    """The hooks of this process's modules, in the service of one session."""

    def __init__(self, session: Session, modules: Modules, *, own: bool) -> None:
        self._session = session
        self._modules = modules
        self._own = own
        self._fresh: set[int] = set()
        for mine in _installed.values():
            mine.serve(session, modules)

    def put(self, ddp: DistributedDataParallel) -> None:
        """Install a hook that repeats the default arithmetic, unless DDP is used in a way that forbids one."""
        if self._session.recording is None or id(ddp) in _installed or not torch.is_grad_enabled():
            return
        if _may_install(ddp):
            self._install(ddp).is_default = True

    def look_first(self, ddp: DistributedDataParallel, output: Any) -> None:
        """Look at the gradients of the forward in which the hook was installed."""
        if id(ddp) in self._fresh:
            self._fresh.discard(id(ddp))
            _installed[id(ddp)].look(ddp, None, output)

    def hand_over(self, ddp: DistributedDataParallel, user: UserHook, name: str) -> bool:
        """Let our hook on the reducer, if need be installed now, run ``user`` from now on; false if that cannot be."""
        mine = _installed.get(id(ddp))
        if ddp.logger is None or (mine is not None and not mine.is_default):
            return False
        if mine is None:
            if self._session.recording is None or ddp._use_python_reducer:
                return False
            mine = self._install(ddp)
        ddp.logger._set_comm_hook_name(name)
        mine.user = user
        mine.is_default = False
        return True

    def observed(self, ddp: DistributedDataParallel, hook: Callable[..., Any]) -> Callable[..., Any]:
        """The user's hook, recorded, and looking to DDP like the user's."""
        mine = BucketHook(self._session, self._modules, ddp, whole=self._own)
        _remember(ddp, mine)

        @functools.wraps(hook)
        def observed(state: Any, bucket: Any) -> Any:
            return mine.run_users(bucket, state, hook)

        return observed

    def _install(self, ddp: DistributedDataParallel) -> BucketHook:
        mine = BucketHook(self._session, self._modules, ddp, whole=self._own)
        _remember(ddp, mine)

        def ddpan_bucket_hook(_state: object, bucket: Any) -> Any:
            return mine(bucket)

        _register_comm_hook(ddp.reducer, None, ddpan_bucket_hook)
        if mine.scale.views_possible:
            # It stays as long as the hook does, which outlives the collector. The forward that runs now is too late for
            # it, and is looked at by `look_first`.
            ddp.register_forward_hook(self._session.guard(mine.look))
            self._fresh.add(id(ddp))
        return mine


def install(session: Session, modules: Modules, patches: Patches, *, own: bool) -> None:
    """Wrap the registration of hooks, and with ``own`` put a hook on every module that has none."""
    hooks = Hooks(session, modules, own=own)
    patches.replace(
        DistributedDataParallel, "register_comm_hook", lambda original: _registering(modules, hooks, original)
    )
    patches.replace(
        DistributedDataParallel,
        "_register_builtin_comm_hook",
        lambda original: _registering_builtin(modules, hooks, original),
    )
    if own:
        patches.replace(Reducer, "_set_forward_pass_work_handle", _counting_live)
        patches.replace(
            DistributedDataParallel, "_pre_forward", lambda original: _installing(original, session.guard(hooks.put))
        )
        patches.replace(
            DistributedDataParallel,
            "_post_forward",
            lambda original: _looking(original, session.guard(hooks.look_first)),
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


def _registering(modules: Modules, hooks: Hooks, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def register_comm_hook(self: Any, state: object, hook: Callable[..., Any]) -> None:
        if self._use_python_reducer:
            # The compiler looks into the hook, and there is no bucket.
            original(self, state, hook)
            return
        mine = _installed.get(id(self))
        if mine is None or not mine.is_default:
            original(self, state, hooks.observed(self, hook))
        else:
            # The reducer takes one hook only, and it has ours.
            self._check_comm_hook(hook)
            hooks.hand_over(self, (state, hook), hook.__qualname__)
            self._comm_hooks.append((hook, state))
        modules.name_hook(self, hook.__qualname__)

    return register_comm_hook


def _registering_builtin(modules: Modules, hooks: Hooks, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def _register_builtin_comm_hook(self: Any, kind: BuiltinCommHookType) -> None:
        # The hooks in C++ have equals in Python, with the same arithmetic, which can be observed.
        equal = _EQUALS.get(kind)
        if equal is None or not hooks.hand_over(self, (self.process_group, equal), str(kind)):
            original(self, kind)
        modules.name_hook(self, str(kind))

    return _register_builtin_comm_hook


_EQUALS: Final = {
    BuiltinCommHookType.ALLREDUCE: default_hooks.allreduce_hook,
    BuiltinCommHookType.FP16_COMPRESS: default_hooks.fp16_compress_hook,
}


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
        if not torch.compiler.is_compiling():
            put(self)
        return original(self, *inputs, **kwargs)

    return _pre_forward


def _looking(original: Callable[..., Any], look: Callable[[Any, Any], None]) -> Callable[..., Any]:
    @functools.wraps(original)
    def _post_forward(self: Any, output: Any) -> Any:
        result = original(self, output)
        if not torch.compiler.is_compiling():
            look(self, result)
        return result

    return _post_forward
