"""Following each DDP module through forward, backward and optimizer: one step row per forward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final

from .clock import now_ns
from .device_records import DeviceRecords
from .layouts import Layout, read_layout
from .schema import NONE16
from .segments import (
    COLLECTIVE_END,
    COLLECTIVE_READY,
    INT64,
    STEP,
    STEP_FIELDS,
    Segment,
    Slot,
    Spool,
    keep_collectives,
)
from .selection import StepSelection

if TYPE_CHECKING:
    from torch.nn.parallel import DistributedDataParallel

__all__ = ["ModuleState", "StepRecorder"]

_pack = STEP.pack_into
_pack_time = INT64.pack_into
_unpack_time = INT64.unpack_from
_FORWARD_START: Final = STEP_FIELDS["forward_start_ns"]
_FORWARD_END: Final = STEP_FIELDS["forward_end_ns"]
_COMPUTE_END: Final = STEP_FIELDS["compute_end_ns"]
_BACKWARD_END: Final = STEP_FIELDS["backward_end_ns"]
_OPTIMIZER_START: Final = STEP_FIELDS["optimizer_start_ns"]
_OPTIMIZER_END: Final = STEP_FIELDS["optimizer_end_ns"]


@dataclass(eq=False)
class ModuleState:
    """Where one DDP module is in its step.

    Attributes:
        number: the module's number in the log.
        group: number of its process group.
        names: names of the reduced parameters, in the reducer's order.
        step: number of the current step.
        micro_batch: position of the current forward within the step.
        row: the current forward's record, None before the first forward or where it was dropped.
        forward_end_ns: end of the current forward, 0 while it runs.
        selected: whether the current step is recorded.
        optimizer_begun: whether an optimizer has begun since the current forward.
        optimizer_open: whether the current row's optimizer has begun and not ended.
        stepping: whether an optimizer is in its ``step()``, which may run forward and backward itself.
        synced: whether the current forward's backward reduces gradients.
        armed: a backward that reduces is due: its next launches are this module's buckets.
        next_bucket: index of the bucket to be launched next.
        following: whether the engine was asked to tell the end of this backward.
        launched_bytes: bytes of the buckets launched in this backward.
        slots: records of the buckets launched in this backward, by index.
        reduced_bytes: bytes of all reduced parameters.
        on_device: whether the module computes on a device with a clock of its own.
        layout: the reducer's present layout, None until it is known.
        layouts: every layout so far.
        ends_compute: what the autograd engine calls when all gradients of a backward are ready.
        addresses: index of a bucket by the address of its buffer, in the present layout.
        parameter_bytes: bytes of each reduced parameter, in the reducer's order.
        ready_times: asks the reducer when the gradient of each parameter was ready.
        ready_before: its answer before the backward that is due, where it may be needed.
        skips_buckets: whether buckets are left out of a backward that does not need them.
        may_be_last: least index of a bucket that may be the last of its backward.
        will_rebuild: whether the buckets are about to be rebuilt once more, because the process group is another.
    """

    number: int
    group: int
    names: list[str]
    reduced_bytes: int
    on_device: bool
    step: int = 0
    micro_batch: int = 0
    started: bool = False
    selected: bool = True
    optimizer_begun: bool = False
    optimizer_open: bool = False
    stepping: bool = False
    synced: bool = False
    finished: bool = False
    row: Slot | None = None
    forward_end_ns: int = 0
    armed: bool = False
    next_bucket: int = 0
    launched_bytes: int = 0
    following: bool = False
    slots: list[Slot | None] = field(default_factory=list)
    layout: Layout | None = None
    layouts: list[Layout] = field(default_factory=list)
    ends_compute: Callable[[], None] | None = None
    addresses: dict[int, int] = field(default_factory=dict)
    ready_of_buckets: list[Any] = field(default_factory=list)
    parameter_bytes: list[int] = field(default_factory=list)
    ready_times: Callable[[], list[int]] | None = None
    ready_before: list[int] = field(default_factory=list)
    skips_buckets: bool = False
    may_be_last: int = 0
    will_rebuild: bool = False

    def find_bucket(self, size_bytes: int) -> int | None:
        """Index of the next bucket if it can have this size, or of the next that has it where some are skipped."""
        if self.layout is None:
            return None
        sizes = self.layout.sizes_bytes
        if not sizes:
            return self.next_bucket if self.launched_bytes + size_bytes <= self.reduced_bytes else None
        if self.skips_buckets:
            return next((k for k in range(self.next_bucket, len(sizes)) if sizes[k] == size_bytes), None)
        return self.next_bucket if sizes[self.next_bucket : self.next_bucket + 1] == (size_bytes,) else None

    @property
    def knows_sizes(self) -> bool:
        """Whether the size of every bucket is known."""
        return self.layout is not None and bool(self.layout.sizes_bytes)

    @property
    def knows_addresses(self) -> bool:
        """Whether every bucket can be told by its address."""
        return self.layout is not None and 0 < len(self.layout.sizes_bytes) == len(self.addresses)

    def launched(self, slot: Slot | None, index: int, size_bytes: int) -> None:
        """A bucket was launched."""
        self.slots.append(slot)
        self.next_bucket = index + 1
        self.launched_bytes += size_bytes

    @property
    def all_launched(self) -> bool:
        """Whether the last bucket of this backward was launched, as far as one can tell."""
        if self.skips_buckets:
            return True
        if self.layout is not None and self.layout.sizes_bytes:
            return self.next_bucket >= len(self.layout.sizes_bytes)
        return self.launched_bytes >= self.reduced_bytes

    def adopt(self, layout: Layout) -> None:
        """Take over a new layout."""
        self.layout = layout
        self.addresses.clear()
        self.may_be_last = 0 if self.skips_buckets else max(0, len(layout.sizes_bytes) - 1)
        if layout.sizes_bytes:
            self.layouts.append(layout)
        self.ready_of_buckets = [itemgetter(*indices) for indices in layout.parameters]


class StepRecorder:
    """Writes the step rows of one process.

    Args:
        spool: where the records go.
        selection: the steps to record.

    Attributes:
        modules: every module so far.
        data_wait_ns: time in the DataLoader since the last forward.
        device: writes the times of modules that run on a device, None where none does.
        paused: whether the present step is one that is not recorded.
        on_pause: called when that changes.
    """

    def __init__(self, spool: Spool, *, selection: StepSelection) -> None:
        self._spool = spool
        self._selection = selection
        self._everything = selection == StepSelection()
        self.paused = False
        self.on_pause: Callable[[bool], None] = _nobody_listens
        self.modules: list[ModuleState] = []
        self.data_wait_ns = 0
        self.device: DeviceRecords | None = None

    def add(self, *, group: int, names: list[str], reduced_bytes: int, on_device: bool) -> ModuleState:
        """Number a new module."""
        state = ModuleState(
            number=len(self.modules), group=group, names=names, reduced_bytes=reduced_bytes, on_device=on_device
        )
        self.modules.append(state)
        return state

    def begin_forward(self, state: ModuleState, *, synced: bool, start_ns: int | None = None) -> None:
        """A forward with gradients enabled begins, now or at ``start_ns``."""
        if start_ns is None:
            start_ns = now_ns()
        if state.optimizer_open:
            self._set(state, _OPTIMIZER_END, start_ns)
            self._keep_row(state)
            state.optimizer_open = False
        if state.finished:
            state.step += 1
            state.micro_batch = 0
            state.finished = False
        elif state.started:
            state.micro_batch = min(state.micro_batch + 1, NONE16 - 1)
        state.started = True
        state.synced = synced
        state.forward_end_ns = 0
        state.optimizer_begun = False
        if self.device is not None:
            self.device.poll()
        wait_ns, self.data_wait_ns = self.data_wait_ns, 0
        if not self._everything:
            self._select(state)
            if not state.selected:
                state.row = None
                return
        state.row = self._spool.reserve_step()
        if state.row is not None:
            segment, offset = state.row
            _pack(
                segment.map, offset,
                wait_ns, start_ns, 0, 0, 0, 0, 0, state.step, state.number, state.micro_batch, 0, 0, synced, 1,
            )  # fmt: skip
            segment.keep(offset, STEP.size)
            if state.on_device and self.device is not None:
                self.device.step(state.row, _FORWARD_START)

    def follow(self, state: ModuleState) -> None:
        """The rank has joined, and follows a step of the other ranks."""
        state.step += 1
        self._select(state)

    def _select(self, state: ModuleState) -> None:
        """A step begins, which may be left out, or the first that is not."""
        state.selected = state.step in self._selection
        paused = not any(module.selected for module in self.modules)
        if paused != self.paused:
            self.paused = paused
            self.on_pause(paused)

    def end_forward(self, state: ModuleState, *, synced: bool) -> None:
        """The module's forward is over; if ``synced``, its backward will reduce gradients."""
        if not state.selected:
            # Nobody watches this backward, so the forward has to tell that a step is over.
            state.finished = synced
            return
        end_ns = now_ns()
        state.forward_end_ns = end_ns
        self._set(state, _FORWARD_END, end_ns)
        if synced:
            state.armed = True
            state.next_bucket = 0
            state.launched_bytes = 0
            state.following = False
            state.slots.clear()
        else:
            self._keep_row(state)

    def refresh_layout(self, state: ModuleState, ddp: DistributedDataParallel) -> bool:
        """Ask for the layout if it may have changed; true if it did."""
        rebuilt = bool(getattr(ddp, "_has_rebuilt_buckets", False))
        known = state.layout
        if rebuilt and state.will_rebuild:
            # In the order of the gradients that the layout has already, so its sizes stand.
            state.will_rebuild = False
            state.addresses.clear()
        if known is not None and known.number >= int(rebuilt) and known.sizes_bytes:
            return False
        layout = read_layout(ddp, rebuilt=rebuilt)
        if layout is not None:
            state.adopt(layout)
            return True
        if rebuilt and (known is None or known.number == 0):
            state.adopt(Layout(number=1, sizes_bytes=()))
        return False

    def end_compute(self, state: ModuleState) -> None:
        """All gradients of the backward are ready."""
        self._set(state, _COMPUTE_END, now_ns())

    def end_backward(self, state: ModuleState, ddp: DistributedDataParallel | None = None) -> None:
        """All buckets are reduced and copied back: the step's backward is over."""
        end_ns = now_ns()
        self._set(state, _BACKWARD_END, end_ns)
        state.armed = False
        state.finished = True
        if state.stepping:
            self._open_optimizer(state, end_ns)
        if not state.on_device:
            self._end_buckets(state, end_ns)
            if ddp is not None and state.ready_of_buckets:
                self._fill_ready(state, ddp)
        self._keep(state)

    def begin_optimizer(self, state: ModuleState) -> None:
        """An optimizer that holds parameters of the module begins to step; of several in one step the first counts.

        One that was given a closure runs forward and backward within its step, maybe several times: its own work
        begins where a backward ends, and ends where the next forward begins.
        """
        state.stepping = True
        if not state.synced:
            return
        # Where the reducer tells no end, as when every gradient's all-reduce is delayed, this ends the step.
        state.finished = True
        self._open_optimizer(state, now_ns())

    def end_optimizer(self, state: ModuleState) -> None:
        """An optimizer that holds parameters of the module has stepped; of several in one step the last counts."""
        state.stepping = state.optimizer_open = False
        if state.optimizer_begun:
            self._set(state, _OPTIMIZER_END, now_ns())
            self._keep_row(state)

    def _open_optimizer(self, state: ModuleState, start_ns: int) -> None:
        if not state.optimizer_begun:
            state.optimizer_begun = state.optimizer_open = True
            self._set(state, _OPTIMIZER_START, start_ns)

    def keep(self) -> None:
        """Keep what is known of the present steps; called by the background thread.

        While a step goes on, its times are kept where several are known, not one by one. Where it does not go on,
        because a rank hangs, they are kept here.
        """
        for state in self.modules:
            self._keep(state)

    def _keep(self, state: ModuleState) -> None:
        keep_collectives(tuple(state.slots))
        self._keep_row(state)

    @staticmethod
    def _keep_row(state: ModuleState) -> None:
        if state.row is not None:
            segment, offset = state.row
            segment.keep(offset, STEP.size)

    def rows_closed(self, segment: Segment) -> bool:
        """Whether no module's current row lies in ``segment``, and no row there waits for a time of the device."""
        if self.device is not None and self.device.owes(segment):
            return False
        return all(state.row is None or state.row[0] is not segment for state in self.modules)

    def _end_buckets(self, state: ModuleState, end_ns: int) -> None:
        """End the buckets whose own callback still waits for the interpreter: the reducer has seen them done."""
        for slot in state.slots:
            if slot is not None:
                segment, offset = slot
                if _unpack_time(segment.map, offset + COLLECTIVE_END)[0] == 0:
                    _pack_time(segment.map, offset + COLLECTIVE_END, end_ns)

    def _fill_ready(self, state: ModuleState, ddp: DistributedDataParallel) -> None:
        """Write when each bucket's last gradient was ready, from the reducer's own record.

        The reducer counts from its preparation for the backward, which is where the forward ends. It says zero for
        what it has not seen, as in the first iteration of a static graph.
        """
        since_forward_ns = ddp.reducer.get_backward_stats()
        for pick, slot in zip(state.ready_of_buckets, state.slots, strict=False):
            if slot is None:
                continue
            ready = pick(since_forward_ns)
            latest = max(ready) if isinstance(ready, tuple) else ready
            if latest > 0:
                segment, offset = slot
                _pack_time(segment.map, offset + COLLECTIVE_READY, state.forward_end_ns + latest)

    def _set(self, state: ModuleState, place: int, value_ns: int) -> None:
        """Write a time into the current row; a device's own time takes its place later."""
        if state.row is None:
            return
        segment, offset = state.row
        if segment.converted:
            self._spool.count("late_ends")
            return
        _pack_time(segment.map, offset + place, value_ns)
        if state.on_device and self.device is not None:
            self.device.step(state.row, place)


def _nobody_listens(_paused: bool) -> None:
    pass
