"""Where the collector listens: one module per place in torch.

To add a place, write a module with a function ``install(session, patches, …)`` and call it in `install_taps`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

from torch.distributed.algorithms.join import Join

from . import comm_hook, dataloader, ddp, functions, group_hooks, groups, optimizer, reducer_group
from .compiler import hide_from_compiler
from .deepspeed import Engines
from .fsdp import ShardedModels
from .others import Others
from .patching import Patches, observed
from .reductions import Reductions

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from ..session import Session

__all__ = ["Taps", "install_taps", "tap_name"]


def tap_name() -> str:
    """How collectives are seen: by the process group's hooks (torch >= 2.14), else by a group given to the reducer."""
    return "process_group_hooks" if group_hooks.available() else "reducer_group"


class Taps:
    """All installed taps."""

    def __init__(self, session: Session) -> None:
        self._guard = session.guard
        self._patches = Patches()
        self._paused = False
        self._joins = 0
        self._undo: list[Callable[[], None]] = []
        try:
            self._install(session)
        except BaseException:
            self.remove()
            raise

    def _install(self, session: Session) -> None:
        self._modules = ddp.Modules(session)
        self._reductions = Reductions(session)
        self._others = Others(session, self._reductions, look=self._install_late)
        self._late = (
            Engines(session, self._reductions, self._patches),
            ShardedModels(session, self._reductions, self._patches),
        )
        available = group_hooks.available()
        self._group_hooks = group_hooks.GroupHooks(session, self._modules, self._others) if available else None
        hide_from_compiler("ddpan.collector", alone=type(session).guard)
        groups.install(session, self._patches)
        ddp.install(session, self._modules, self._patches)
        whole = self._group_hooks is None
        reducers = reducer_group.ReducerGroups(session, self._modules, self._others, own=whole)
        self._reducers = reducers
        reducers.install(self._patches)
        comm_hook.install(session, self._modules, reducers, self._patches, whole=whole)
        dataloader.install(session, self._patches)
        self._undo.append(optimizer.install(session, self._modules, self._reductions))
        entered, left = session.guard(self._enter_join), session.guard(self._leave_join)
        self._patches.replace(Join, "__enter__", functools.partial(observed, before=entered))
        self._patches.replace(Join, "__exit__", functools.partial(observed, after=left))
        if self._group_hooks is None:
            functions.install(session, self._others, self._patches)
        self._others.install(self._patches)

    def listen_to(self, group: ProcessGroup) -> None:
        """Listen to a process group."""
        self._install_late()
        if self._group_hooks is not None:
            self._group_hooks.attach(group)

    def _install_late(self) -> None:
        """Watch what may have been imported in the meantime."""
        for one in self._late:
            one.install()

    def pause(self, paused: bool) -> None:
        """The present step is, or is no longer, one that is not recorded."""
        self._paused = paused
        self._count()

    def _count(self) -> None:
        """Count what is not recorded, unless all ranks leave the same out: those that join issue other collectives."""
        uncounted = self._paused and not self._joins
        self._reducers.pause(uncounted)
        if self._group_hooks is not None:
            self._group_hooks.pause(self._paused, uncounted=uncounted)

    def _enter_join(self, _join: object) -> None:
        self._joins += 1
        self._count()

    def _leave_join(self, _join: object) -> None:
        self._joins -= 1

    def leave(self, group: ProcessGroup) -> None:
        """Stop to listen to a process group."""
        if self._group_hooks is not None:
            self._group_hooks.detach(group)

    def forget(self) -> None:
        """The recording ends: forget modules and groups of it."""
        self._paused = False
        forgets = [self._reducers.take_all, self._modules.forget, self._others.forget, self._reductions.forget]
        if self._group_hooks is not None:
            forgets.append(self._group_hooks.detach_all)
        for forget in forgets:
            self._guard(forget)()

    def remove(self) -> None:
        """Take every tap out."""
        for undo in self._undo:
            self._guard(undo)()
        self._patches.restore()


def install_taps(session: Session) -> Taps:
    """Put every tap in place that this torch allows."""
    return Taps(session)
