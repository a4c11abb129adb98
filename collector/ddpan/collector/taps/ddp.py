"""DistributedDataParallel: the beginning and end of its forward, and the end of its backward."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _DDPJoinHook

from ..collectives import ALL_REDUCE
from ..cuda import CudaEvents
from ..layouts import describe_module, reduced_parameters
from ..schema import NONE16
from ..segments import Slot
from ..steps import ModuleState, StepRecorder
from .patching import Patches, observed

if TYPE_CHECKING:
    from ..recording import Recording
    from ..session import Session

__all__ = ["Modules", "install"]

_engine = torch.autograd.Variable._execution_engine


class Modules:
    """The DDP modules of this process, known from their first forward on.

    Attributes:
        armed: modules whose backward is due, in the order of their latest forwards.
        in_hook: the module whose hook, the user's, is running: its next collective is that of the module's next bucket.
        stepping: the optimizer that is in its ``step()``, if any.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._states: dict[int, ModuleState] = {}
        self._by_parameter: dict[int, ModuleState] = {}
        self._by_optimizer: dict[int, list[ModuleState]] = {}
        self._user_hooks: weakref.WeakKeyDictionary[DistributedDataParallel, str] = weakref.WeakKeyDictionary()
        self.armed: list[ModuleState] = []
        self.in_hook: ModuleState | None = None
        self.stepping: weakref.ref[torch.optim.Optimizer] | None = None

    def __len__(self) -> int:
        return len(self._states)

    @property
    def groups(self) -> set[int]:
        """Numbers of the process groups on which gradients are reduced."""
        return {state.group for state in self._states.values()}

    def forget(self) -> None:
        """Forget all modules: their numbers belong to a recording."""
        self._states.clear()
        self._by_parameter.clear()
        self._by_optimizer.clear()
        self.armed.clear()

    def get(self, ddp: DistributedDataParallel) -> ModuleState | None:
        """The state of a module that has had a forward, else None."""
        return self._states.get(id(ddp))

    def state(self, ddp: DistributedDataParallel, recording: Recording) -> ModuleState:
        """The state of a module, which is numbered on its first forward."""
        known = self._states.get(id(ddp))
        return self._add(ddp, recording) if known is None else known

    def name_hook(self, ddp: DistributedDataParallel, name: str) -> None:
        """The user has registered a hook of this name."""
        self._user_hooks[ddp] = name
        recording, state = self._session.recording, self.get(ddp)
        if recording is not None and state is not None:
            recording.modules[state.number]["comm_hook"] = name
            recording.metadata_changed()

    def moved(self, ddp: DistributedDataParallel) -> None:
        """The module was given another process group."""
        state, recording = self.get(ddp), self._session.recording
        if state is not None and recording is not None:
            state.will_rebuild = True
            state.group = recording.modules[state.number]["group"] = self._session.group_number(ddp.process_group)
            recording.metadata_changed()

    def arm(self, state: ModuleState) -> None:
        """The module's backward is due."""
        self.disarm(state)
        self.armed.append(state)
        state.ready_before = []
        if len(self.armed) > 1:
            # Two modules may have buckets of one size: what is ready now is not what the backward is about to bring.
            for due in self.armed:
                if due.ready_times is not None and not due.ready_before and not due.knows_addresses:
                    due.ready_before = due.ready_times()

    def disarm(self, state: ModuleState) -> None:
        """No bucket of the module is due any more."""
        if state in self.armed:
            self.armed.remove(state)

    def of_optimizer(self, optimizer: torch.optim.Optimizer) -> list[ModuleState]:
        """The modules that hold parameters of the optimizer."""
        known = self._by_optimizer.get(id(optimizer))
        if known is not None:
            return known
        parameters = (p for group in optimizer.param_groups for p in group["params"])
        found = {id(s): s for p in parameters if (s := self._by_parameter.get(id(p))) is not None}
        states = list(found.values())
        if states:
            self._by_optimizer[id(optimizer)] = states
            weakref.finalize(optimizer, self._by_optimizer.pop, id(optimizer), None)
        return states

    def launch(self, state: ModuleState, index: int, size_bytes: int, launch_ns: int) -> Slot | None:
        """Record the launch of a bucket."""
        recording = self._session.recording
        if recording is None:
            return None
        layout = NONE16 if state.layout is None else state.layout.number
        slot = recording.collectives.launch(
            state.group, ALL_REDUCE, size_bytes, launch_ns, state.number, state.step, index, layout
        )
        state.launched(slot, index, size_bytes)
        if slot is not None and recording.collectives.device is not None:
            recording.launched(slot)
        if index >= state.may_be_last and state.all_launched:
            self.follow_backward(state)
        return slot

    def follow_backward(self, state: ModuleState) -> None:
        """Have the autograd engine tell the end of compute and of the backward.

        The engine runs callbacks in the order in which they were queued, when the graph is done. This is called while
        the last bucket is launched, which is before the reducer queues its own: the first callback marks the end of
        compute, then the reducer waits for the buckets, and the callback queued by the first marks the end of it all.
        Where the last bucket may be left out it is called with the first.
        """
        if state.following or state.ends_compute is None or torch._C._current_graph_task_id() == -1:
            return
        state.following = True
        if not state.skips_buckets:
            self.disarm(state)
        _engine.queue_callback(state.ends_compute)

    def _ends_compute(
        self, state: ModuleState, ref: weakref.ref[DistributedDataParallel], steps: StepRecorder
    ) -> Callable[[], None]:
        def end_backward() -> None:
            ddp = ref()
            if ddp is not None:
                steps.end_backward(state, ddp)

        ended = self._session.guard(end_backward)

        def end_compute() -> None:
            steps.end_compute(state)
            self.disarm(state)
            _engine.queue_callback(ended)

        return self._session.guard(end_compute)

    def _add(self, ddp: DistributedDataParallel, recording: Recording) -> ModuleState:
        named = reduced_parameters(ddp)
        on_device = any(p.is_cuda for _, p in named)
        if on_device:
            recording.use_device("cuda", CudaEvents())
        group = self._session.group_number(ddp.process_group)
        state = recording.steps.add(
            group=group,
            names=[name for name, _ in named],
            reduced_bytes=sum(p.numel() * p.element_size() for _, p in named),
            on_device=on_device,
        )
        state.parameter_bytes = [p.numel() * p.element_size() for _, p in named]
        state.ready_times = _ready_times(weakref.ref(ddp))
        state.skips_buckets = bool(getattr(ddp, "skip_all_reduce_unused_params", False))
        state.ends_compute = self._ends_compute(state, weakref.ref(ddp), recording.steps)
        self._states[id(ddp)] = state
        for parameter in ddp.module.parameters():
            # Also those that DDP leaves to others to reduce, such as delayed ones, unless they are of another module.
            self._by_parameter.setdefault(id(parameter), state)
        self._by_parameter.update((id(parameter), state) for _, parameter in named)
        self._by_optimizer.clear()
        weakref.finalize(ddp, self._drop, id(ddp))
        recording.add_module(state.number, describe_module(ddp, group=group, comm_hook=self._user_hooks.get(ddp)))
        optimizer = None if self.stepping is None else self.stepping()
        if optimizer is not None and state in self.of_optimizer(optimizer):
            # The optimizer was given a closure, and this is the first forward in it.
            recording.steps.begin_optimizer(state)
        return state

    def _drop(self, key: int) -> None:
        """The module with the id ``key`` is gone, and its id may be that of another one soon."""
        state = self._states.pop(key, None)
        if state is None:
            return
        state.row = None
        self.disarm(state)
        self._by_optimizer.clear()
        for parameter in [parameter for parameter, of in self._by_parameter.items() if of is state]:
            del self._by_parameter[parameter]


def _ready_times(ref: weakref.ref[DistributedDataParallel]) -> Callable[[], list[int]]:
    def ready_times() -> list[int]:
        reducer = getattr(ref(), "reducer", None)
        return [] if reducer is None else list(reducer.get_backward_stats())

    return ready_times


def install(session: Session, modules: Modules, patches: Patches) -> None:
    """Wrap what DDP does before and after the forward of the module it holds."""
    patches.replace(_DDPJoinHook, "main_hook", lambda original: _following(session, modules, original))
    before, after = _observers(session, modules)
    for name, observe in (("_pre_forward", before), ("_post_forward", after)):
        patches.replace(DistributedDataParallel, name, functools.partial(observed, before=session.guard(observe)))


def _following(session: Session, modules: Modules, original: Callable[..., Any]) -> Callable[..., Any]:
    """A joined rank follows the others' steps: count them, so that its steps still have the numbers of the others'."""

    def follow(ddp: DistributedDataParallel) -> None:
        recording, state = session.recording, modules.get(ddp)
        if recording is None or state is None:
            return
        info = recording.modules[state.number]
        if info["joined_after_step"] is None:
            info["joined_after_step"] = state.step
            recording.metadata_changed()
        # So says DDP where the iteration before reduced gradients, which ended a step.
        if ddp.require_forward_param_sync:
            recording.steps.follow(state)

    count = session.guard(follow)

    @functools.wraps(original)
    def main_hook(self: Any) -> None:
        count(self.ddp)
        original(self)

    return main_hook


def _observers(
    session: Session, modules: Modules
) -> tuple[Callable[[DistributedDataParallel], None], Callable[[DistributedDataParallel], None]]:
    def before(ddp: DistributedDataParallel) -> None:
        recording = session.recording
        if recording is None:
            session.open()
            recording = session.recording
        if recording is None:
            return
        if not torch.is_grad_enabled():
            # Waiting for an evaluation batch is no part of the next training step.
            recording.steps.data_wait_ns = 0
            return
        recording.steps.begin_forward(modules.state(ddp, recording), synced=ddp.require_backward_grad_sync)

    def after(ddp: DistributedDataParallel) -> None:
        recording = session.recording
        if recording is None or not torch.is_grad_enabled():
            return
        state = modules.get(ddp)
        if state is None:
            return
        synced = ddp.require_backward_grad_sync
        recording.steps.end_forward(state, synced=synced)
        if recording.steps.refresh_layout(state, ddp):
            recording.metadata_changed()
        if synced and state.selected:
            modules.arm(state)

    return before, after
