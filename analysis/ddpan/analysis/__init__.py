"""Analysis of ddpan logs: find the rank, the phase and the bucket that slow down a distributed training run.

    from ddpan.analysis import load, stragglers
    print(stragglers(load("logs")).verdict)

Names are imported on first use, so that ``import ddpan.analysis`` itself costs next to nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from .errors import DamagedLogError, DdpanError, NoLogError, UsageError
    from .measures.changes import ChangePoints, change_points
    from .measures.clock import ClockOffsets, clock_offsets
    from .measures.collectives import CollectiveTables, collectives
    from .measures.facts import Facts, facts
    from .measures.overlap import Overlap, overlap
    from .measures.statistics import Statistics, statistics
    from .measures.stragglers import Stragglers, Verdict, stragglers
    from .measures.summary import Summary, summarize
    from .measures.whatif import WhatIf, whatif
    from .run import Problem, Run, RunInfo, find_runs, load

__all__ = [
    "ChangePoints",
    "ClockOffsets",
    "CollectiveTables",
    "DamagedLogError",
    "DdpanError",
    "Facts",
    "NoLogError",
    "Overlap",
    "Problem",
    "Run",
    "RunInfo",
    "Statistics",
    "Stragglers",
    "Summary",
    "UsageError",
    "Verdict",
    "WhatIf",
    "change_points",
    "clock_offsets",
    "collectives",
    "facts",
    "find_runs",
    "load",
    "overlap",
    "statistics",
    "stragglers",
    "summarize",
    "whatif",
]

_HOMES: Final = {
    "errors": ("DamagedLogError", "DdpanError", "NoLogError", "UsageError"),
    "measures.changes": ("ChangePoints", "change_points"),
    "measures.clock": ("ClockOffsets", "clock_offsets"),
    "measures.collectives": ("CollectiveTables", "collectives"),
    "measures.facts": ("Facts", "facts"),
    "measures.overlap": ("Overlap", "overlap"),
    "measures.statistics": ("Statistics", "statistics"),
    "measures.stragglers": ("Stragglers", "Verdict", "stragglers"),
    "measures.summary": ("Summary", "summarize"),
    "measures.whatif": ("WhatIf", "whatif"),
    "run": ("Problem", "Run", "RunInfo", "find_runs", "load"),
}
_HOME_OF: Final = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Import the public name ``name`` from the module that defines it."""
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_HOME_OF[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Public names, imported or not."""
    return sorted({*globals(), *__all__})
