"""Which run, ranks and steps the caller wants: checked once, here, against what is there.

All functions raise `UsageError` where the choice is out of range or fits nothing.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable

from ._discovery import Found, RunLog
from ._problems import Problem, rank_list
from .errors import UsageError

__all__ = ["check_skip_warmup", "check_steps", "choose_ranks", "choose_run"]


def choose_run(found: Found, wanted: str | None) -> tuple[RunLog, list[Problem]]:
    """The run whose id is or begins with ``wanted``, by default the newest, with a problem if there was a choice."""
    if wanted is None:
        newest = found.runs[0]
        if len(found.runs) == 1:
            return newest, []
        message = (
            f"{len(found.runs)} runs in {found.path}: this is the newest, {newest.id}; "
            f"`ddpan runs {found.path}` lists them, --run ID chooses another"
        )
        return newest, [Problem("several_runs", message)]
    fitting = [run for run in found.runs if run.id == wanted]
    fitting = fitting or [run for run in found.runs if run.id.startswith(wanted)]
    if len(fitting) != 1 or not wanted:
        ids = ", ".join(run.id for run in (fitting or found.runs)[:8])
        fault = "fits several runs" if fitting else f"is no run in {found.path}"
        raise UsageError(f"{wanted!r} {fault}: choose one of {ids}")
    return fitting[0], []


def choose_ranks(log: RunLog, wanted: Iterable[int] | None) -> tuple[int, ...]:
    """The ``wanted`` ranks of ``log``, by default all, ascending."""
    if wanted is None:
        return tuple(sorted(log.ranks))
    chosen = tuple(sorted({_integer(rank, "a rank") for rank in wanted}))
    if unknown := [rank for rank in chosen if rank not in log.ranks]:
        raise UsageError(f"run {log.id} has no log of {rank_list(unknown)}; it has {rank_list(log.ranks)}")
    if not chosen:
        raise UsageError("no rank chosen: leave ranks out to read all of them")
    return chosen


def check_steps(steps: tuple[int, int] | slice | None) -> tuple[int, int] | None:
    """The first step and the one after the last, or None for all."""
    if steps is None:
        return None
    if isinstance(steps, slice):
        if steps.step not in (None, 1):
            raise UsageError(f"steps must be consecutive, so a slice with step {steps.step} cannot be taken")
        steps = (steps.start or 0, (1 << 32) if steps.stop is None else steps.stop)
    first, end = (_integer(step, "a step") for step in steps)
    if not 0 <= first < end:
        raise UsageError(f"steps {first}:{end} holds no step: give the first and the one after the last, such as 0:100")
    return first, end


def check_skip_warmup(steps: int | None) -> None:
    """Whether ``steps`` is a number of steps, or None."""
    if steps is not None and _integer(steps, "skip_warmup") < 0:
        raise UsageError(f"skip_warmup must be 0 or more, not {steps}")


def _integer(value: int, name: str) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise UsageError(f"{name} must be a whole number, not {value!r}") from None
