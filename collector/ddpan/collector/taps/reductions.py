"""Gradients reduced by others than DDP: by DeepSpeed's ZeRO, by FSDP.

There the reductions are collectives like any other. What tells them is that they are issued while the backward of a
module runs, on the group in which its gradients are reduced, and that they reduce. They are numbered in their order;
the sizes that they have in one backward make a layout.
"""

from __future__ import annotations

import struct
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.distributed import ProcessGroup, distributed_c10d

from ..clock import now_ns
from ..collectives import OP_CODES
from ..cuda import CudaEvents
from ..layouts import Layout
from ..schema import NONE16, ModuleInfo
from ..segments import COLLECTIVE_LAYOUT, Slot
from ..steps import ModuleState

if TYPE_CHECKING:
    from ..recording import Recording
    from ..session import Session

__all__ = ["Reduced", "Reductions"]

_REDUCING: Final = tuple(OP_CODES[op] for op in ("all_reduce", "reduce_scatter", "reduce"))
_MOST_LAYOUTS: Final = 256
_pack_number = struct.Struct("<H").pack_into


@dataclass(eq=False)
class Reduced:
    """A module whose gradients are reduced by somebody else than DDP.

    Attributes:
        state: where it is in its step.
        parameters: index of each of its parameters by its id.
        ended_ns: end of the last step, of a module of which no more is known than its optimizer.
        layouts: the layouts that were seen, by the sizes of their buckets and what these hold.
        sizes_bytes: of the reductions in the present backward.
        held: indices of the parameters that each of these reduced, empty where nobody tells.
        holding: asks which parameters a reduction of so many bytes holds, which is about to be issued.
    """

    state: ModuleState
    parameters: dict[int, int] = field(default_factory=dict)
    ended_ns: int = 0
    layouts: dict[tuple[Any, ...], Layout] = field(default_factory=dict)
    sizes_bytes: list[int] = field(default_factory=list)
    held: list[tuple[int, ...]] = field(default_factory=list)
    holding: Callable[[int], Iterable[Any]] | None = None

    def indices(self, parameters: Iterable[Any]) -> tuple[int, ...]:
        """Indices of parameters of the module, empty if there is any other among them."""
        found = [self.parameters.get(id(p)) for p in parameters]
        return () if None in found else tuple(index for index in found if index is not None)


class Reductions:
    """The modules whose gradients are reduced by others than DDP, known from their first forward on."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._known: dict[int, Reduced] = {}
        self._first_ended_ns: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()
        self._current: Reduced | None = None

    @property
    def has_models(self) -> bool:
        """Whether there is a module of which more is known than its optimizer."""
        return any(known.ended_ns == 0 for known in self._known.values())

    def begin_step_of(self, optimizer: torch.optim.Optimizer, recording: Recording) -> None:
        """An optimizer of which nothing is known but its steps begins one: a step lasts from one to the next.

        The first is left out. Nobody knows when it began, and a module may show up until it is over: one whose forward
        the optimizer's closure runs, or ran before the recording began.
        """
        first_ended_ns = self._first_ended_ns.pop(optimizer, 0)
        if first_ended_ns == 0 and id(optimizer) not in self._known:
            return
        known = self._known.get(id(optimizer)) or self.add(
            optimizer,
            recording,
            kind="optimizer",
            name=type(optimizer).__name__,
            group=distributed_c10d._get_default_group(),
            named=[("", p) for group in optimizer.param_groups for p in group["params"]],
        )
        known.ended_ns = known.ended_ns or first_ended_ns
        if self._current is known:
            self.end_backward(recording, known)
        else:
            recording.steps.begin_forward(known.state, synced=True, start_ns=known.ended_ns)
        recording.steps.begin_optimizer(known.state)

    def begin_reducing(self, recording: Recording, group: int, op: int) -> None:
        """A collective is about to be issued; reductions between the steps of the only optimizer are its buckets.

        Only where no module is known: whatever is reduced on all ranks then, all ranks meet in it before they step.
        """
        if self._current is not None or op not in _REDUCING or len(self._known) != 1:
            return
        [known] = self._known.values()
        state = known.state
        if known.ended_ns == 0 or state.stepping or group != state.group:
            return
        recording.steps.begin_forward(state, synced=True, start_ns=known.ended_ns)
        state.armed = True
        state.next_bucket = 0
        state.slots.clear()
        self.begin_backward(known)

    def end_step_of(self, optimizer: torch.optim.Optimizer, recording: Recording) -> bool:
        """Such an optimizer has stepped; false if it is none, or not known to be one."""
        known = self._known.get(id(optimizer))
        if known is None or known.ended_ns == 0:
            self._first_ended_ns[optimizer] = now_ns()
            return False
        recording.steps.end_optimizer(known.state)
        known.ended_ns = now_ns()
        return True

    def forget(self) -> None:
        """Forget all modules: their numbers belong to a recording."""
        self._known.clear()
        self._first_ended_ns.clear()
        self._current = None

    def get(self, owner: object) -> Reduced | None:
        """What is known of ``owner``, an engine for example, if it has had a forward."""
        return self._known.get(id(owner))

    def add(
        self,
        owner: object,
        recording: Recording,
        *,
        kind: str,
        name: str,
        group: ProcessGroup,
        named: Iterable[tuple[str, Any]],
        zero_stage: int | None = None,
        holding: Callable[[int], Iterable[Any]] | None = None,
    ) -> Reduced:
        """Number the module of ``owner``; ``kind``, ``name`` and ``zero_stage`` are as in its metadata.

        ``named`` are its parameters with their names, ``holding`` is as in `Reduced`.
        """
        reduced = [(name, p) for name, p in named if p.requires_grad]
        trained = [p for _, p in reduced]
        on_device = any(p.is_cuda for p in trained)
        if on_device:
            recording.use_device("cuda", CudaEvents())
        # Under ZeRO-3 a parameter is empty until it is gathered, and has its number of elements beside it.
        size = sum(int(getattr(p, "ds_numel", None) or p.numel()) * p.element_size() for p in trained)
        number = self._session.group_number(group)
        names = [name for name, _ in reduced]
        state = recording.steps.add(group=number, names=names, reduced_bytes=size, on_device=on_device)
        indices = {id(p): index for index, p in enumerate(trained)}
        known = self._known[id(owner)] = Reduced(state, indices, holding=holding)
        weakref.finalize(owner, self._drop, id(owner), known)
        info = ModuleInfo(
            kind=kind,
            name=name,
            group=number,
            parameters=len(trained),
            parameter_bytes=size,
            bucket_cap_mb=None,
            find_unused_parameters=False,
            gradient_as_bucket_view=False,
            static_graph=False,
            comm_hook=None,
            joined_after_step=None,
            zero_stage=zero_stage,
        )
        recording.add_module(state.number, info)
        return known

    def of_optimizer(self, optimizer: torch.optim.Optimizer) -> list[ModuleState]:
        """The modules that hold parameters of the optimizer."""
        if not self._known:
            return []
        own = {id(p) for group in optimizer.param_groups for p in group["params"]}
        return [
            known.state for known in self._known.values() if not (known.ended_ns or own.isdisjoint(known.parameters))
        ]

    def begin_backward(self, known: Reduced) -> None:
        """The backward of a module begins: what reduces on its group from now on is one of its buckets."""
        if known.state.armed and self._current is not known:
            self._current = known
            known.sizes_bytes.clear()
            known.held.clear()

    def launch(self, recording: Recording, group: int, op: int, size_bytes: int, launch_ns: int) -> Slot | None:
        """Record the launch of a collective, as a bucket if it is one."""
        known = self._current
        if known is None or op not in _REDUCING or group != known.state.group:
            return recording.collectives.launch(group, op, size_bytes, launch_ns)
        state = known.state
        index = min(state.next_bucket, NONE16 - 1)
        layout = NONE16 if state.layout is None else state.layout.number
        slot = recording.collectives.launch(group, op, size_bytes, launch_ns, state.number, state.step, index, layout)
        state.launched(slot, index, size_bytes)
        known.sizes_bytes.append(size_bytes)
        known.held.append(() if known.holding is None else known.indices(known.holding(size_bytes)))
        return slot

    def end_compute(self, recording: Recording, known: Reduced) -> None:
        """All gradients of the backward are ready."""
        if self._current is known:
            recording.steps.end_compute(known.state)

    def end_backward(self, recording: Recording, known: Reduced) -> None:
        """All gradients of the module are reduced."""
        if self._current is known:
            self._current = None
            recording.steps.end_backward(known.state)
            self._settle(recording, known)

    def _settle(self, recording: Recording, known: Reduced) -> None:
        """Now that all buckets are known, so is the layout; where it is another than expected, put it right."""
        sizes = tuple(known.sizes_bytes)
        if not sizes:
            return
        state = known.state
        key = (sizes, *known.held)
        layout = known.layouts.get(key)
        if layout is None:
            # Number 0 is that of the buckets that DDP begins with, and those are warm-up.
            number = min(len(known.layouts), _MOST_LAYOUTS) + 1
            layout = Layout(number=number, sizes_bytes=sizes, parameters=tuple(known.held))
            if len(known.layouts) < _MOST_LAYOUTS:
                known.layouts[key] = layout
                state.layouts.append(layout)
                recording.metadata_changed()
        if layout is state.layout:
            return
        state.layout = layout
        for slot in state.slots:
            if slot is not None and not slot[0].converted:
                _pack_number(slot[0].map, slot[1] + COLLECTIVE_LAYOUT, layout.number)

    def _drop(self, key: int, known: Reduced) -> None:
        """The owner with the id ``key`` is gone, and its id may be that of another one soon."""
        if self._known.get(key) is known:
            del self._known[key]
            known.state.row = None
