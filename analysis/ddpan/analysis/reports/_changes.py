"""The section on what changed during the run: step time, and ranks that fell behind or caught up."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from ._sections import Section
from ._units import duration, interval

if TYPE_CHECKING:
    from ddpan.analysis.measures.changes import ChangePoints
    from ddpan.analysis.measures.summary import Summary

__all__ = ["changes_section", "largest_step_time_change", "step_time_clause"]

_TITLE: Final = "Changes during the run"
_MOST: Final = 10
_Row: TypeAlias = "Mapping[str, Any]"


def changes_section(summary: Summary) -> Section:
    """A sentence for each change, in the order of the steps; of many, those of the step time and the largest others."""
    found = summary.changes
    if found.reason is not None:
        return Section(_TITLE, notes=(f"No change can be found: {found.reason}.",))
    if found.changes.is_empty():
        return Section(_TITLE, notes=("Neither the step time nor the lateness of any rank went to another level.",))
    several = summary.modules.height > 1
    ordered = sorted(found.changes.iter_rows(named=True), key=_importance)
    shown = sorted(ordered[:_MOST], key=_place)
    notes = [f"- {_sentence(row)}{_of_module(row) if several else ''}." for row in shown]
    if more := len(ordered) - len(shown):
        notes.append(f"- and {more:,} smaller ones; --format json lists all.")
    return Section(_TITLE, notes=tuple(notes))


def largest_step_time_change(found: ChangePoints, module: int | None) -> _Row | None:
    """The row of the largest change of the step time of ``module``; None without any."""
    rows = found.changes.iter_rows(named=True)
    return min((row for row in rows if _is_step_time(row) and row["module"] == module), key=_importance, default=None)


def _is_step_time(row: _Row) -> bool:
    return bool(row["series"] == "step_time")


def _importance(row: _Row) -> tuple[bool, float]:
    """The step time comes first, then the ranks; of both, the largest changes."""
    return not _is_step_time(row), -abs(row["change_ns"])


def _place(row: _Row) -> tuple[int, int, bool]:
    return row["module"], row["step"], not _is_step_time(row)


def _sentence(row: _Row) -> str:
    if _is_step_time(row):
        text = step_time_clause(row)
        return text[0].upper() + text[1:]
    what = "fell behind the other ranks" if row["change_ns"] > 0 else "caught up with the other ranks"
    return f"Rank {row['rank']} {what} by {duration(abs(row['change_ns']))} at step {row['step']}{_sure(row)}"


def step_time_clause(row: _Row) -> str:
    """A change of the step time as a clause: "the step time rose from 81.0 to 97.0 ms at step 812"."""
    verb = "rose" if row["change_ns"] > 0 else "fell"
    return f"the step time {verb} from {interval(row['before_ns'], row['after_ns'])} at step {row['step']}{_sure(row)}"


def _of_module(row: _Row) -> str:
    return f", in module {row['module']}"


def _sure(row: _Row) -> str:
    sign = 1 if row["change_ns"] > 0 else -1
    ends = interval(*sorted(sign * row[end] for end in ("change_low_ns", "change_high_ns")))
    return f" (95 % confidence interval of the change {ends})" if ends else ""
