"""Verdicts in plain words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ._arrivals import Arrivals
from ._evidence import Evidence
from ._inference import Matrix
from .verdict import Verdict

__all__ = [
    "duration",
    "named",
    "nobody",
    "rotating",
    "slow_transfer",
    "too_correlated",
    "too_few_ranks",
    "too_few_steps",
    "unseen",
]

_MOST_RANKS = 8
_WHEN = {
    "persistent": "in nearly every step",
    "onset": "from step {first} on",
    "transient": "in steps {first} to {last}",
    "intermittent": "now and then, in {affected} of {steps} steps",
}
_WHERE = {
    "data": "waiting for {its} data loader",
    "forward": "in {its} forward",
    "backward": "in {its} backward",
    "optimizer": "in {its} optimizer step",
    "other": "in code outside data loading, forward, backward and optimizer",
    None: "in a phase that the log does not show",
}


def duration(value_ns: float) -> str:
    """A duration in a unit that suits it: "18.4 ms"."""
    for unit, scale in (("s", 1e9), ("ms", 1e6), ("µs", 1e3)):
        if abs(value_ns) >= scale or unit == "µs":
            break
    value = value_ns / scale
    return f"{value:.{0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2}f} {unit}"


def named(verdict: Verdict) -> str:
    """Why the rank of ``verdict`` is named."""
    when = _WHEN[verdict.kind].format(
        first=verdict.first_step, last=verdict.last_step, affected=verdict.affected_steps, steps=verdict.steps
    )
    low, high = duration(verdict.delay_low_ns or 0.0), duration(verdict.delay_high_ns or 0.0)
    return (
        f"{_who(verdict)} late {when}, {_where(verdict)}{_bucket(verdict)}: by "
        f"{duration(verdict.delay_ns or 0.0)} a step against the other ranks ({verdict.confidence:.0%} interval "
        f"{low} to {high}), and the last to arrive in {verdict.last_share:.0%} of {verdict.steps} steps."
    )


def _where(verdict: Verdict) -> str:
    return _WHERE[verdict.cause].format(its="their" if len(verdict.ranks) > 1 else "its")


def _who(verdict: Verdict) -> str:
    if len(verdict.ranks) < 2:
        return f"Rank {verdict.rank} is"
    ranks = ", ".join(map(str, verdict.ranks[:_MOST_RANKS])) + (", ..." if len(verdict.ranks) > _MOST_RANKS else "")
    shared = f"host {verdict.host}" if verdict.host is not None else f"process group {verdict.group}"
    return f"All ranks of {shared} ({ranks}) are"


def _bucket(verdict: Verdict) -> str:
    if verdict.first_late_bucket is None:
        return ""
    if verdict.first_late_bucket == 0:
        return " before its first bucket (the loss, code after the forward, or the last layers)"
    return f" from bucket {verdict.first_late_bucket} on"


def slow_transfer(verdict: Verdict, usual_ns: float) -> str:
    """That the transfer itself is slow."""
    when = _WHEN[verdict.kind].format(first=verdict.first_step, last=verdict.last_step)
    low, high = duration(verdict.delay_low_ns or 0.0), duration(verdict.delay_high_ns or 0.0)
    return (
        f"No rank is late, but {when} the gradient transfer takes {duration(verdict.delay_ns or 0.0)} longer than the "
        f"usual {duration(usual_ns)}, for all ranks alike ({verdict.confidence:.0%} interval {low} to {high})."
    )


def nobody(arrivals: Arrivals, evidence: Evidence, last_shares: Matrix) -> str:
    """Why no rank is named although there is enough to judge."""
    spread = float(np.max(evidence.level_ns) - np.min(evidence.level_ns))
    floor = max(evidence.floor_ns(rank) for rank in range(len(arrivals.ranks)))
    return (
        f"No rank stands out in {len(arrivals.steps)} steps: the typical arrivals of the {len(arrivals.ranks)} ranks "
        f"lie within {duration(spread)} of each other, beside {duration(evidence.noise_ns)} of noise from step to "
        f"step, and each rank is the last in {np.min(last_shares):.0%} to {np.max(last_shares):.0%} of the steps. "
        f"A steady delay under {duration(floor)} would not be named."
    )


def rotating(arrivals: Arrivals, lost_ns: float) -> str:
    """Why no rank is named although some rank is far behind in most steps."""
    return (
        f"In most of {len(arrivals.steps)} steps one rank is far behind all others, but each time another, and the "
        f"others wait for it: {duration(lost_ns)} a step. Next: look for what hits the ranks in turn: uneven batches, "
        f"garbage collection, data loading, or a shared machine or file system."
    )


def too_few_ranks(arrivals: Arrivals | None) -> str:
    """Why there is nothing to compare."""
    if arrivals is None:
        return (
            "The log holds no steps outside warm-up in which gradients were reduced. Next: train longer, or keep the "
            "first steps with --skip-warmup 0."
        )
    if len(arrivals.members) == 1:
        return "Only one rank takes part: there is no other to compare it with."
    return f"Fewer than two ranks can be compared{_silent(arrivals.silent)}. Next: record all ranks of the run."


def too_few_steps(steps: int, needed: int) -> str:
    """Why the run is too short."""
    return (
        f"Only {steps} steps can be compared after warm-up, and at least {needed} are needed. "
        f"Next: record {needed - steps} more."
    )


def too_correlated(arrivals: Arrivals, evidence: Evidence) -> str:
    """Why many steps can be too few."""
    steps = len(arrivals.steps)
    return (
        f"Neighbouring steps are so alike that {steps} of them say no more than {len(evidence.blocks_ns)} separate "
        f"ones would, too few to tell a slow rank from chance. Next: record at least {evidence.steps_needed()} steps."
    )


def unseen(arrivals: Arrivals) -> str:
    """Why nobody is cleared as long as some ranks cannot be seen."""
    return (
        f"No rank stands out among the {len(arrivals.ranks)} that can be compared, but a rank that is not among them "
        f"may be the slow one{_silent(arrivals.silent)}. Next: record all ranks of the run."
    )


def _silent(silent: Mapping[int, str]) -> str:
    shown: Sequence[str] = [f"rank {rank}: {why}" for rank, why in sorted(silent.items())]
    if not shown:
        return ""
    more = f" and {len(shown) - 3} more" if len(shown) > 3 else ""
    return f" ({'; '.join(shown[:3])}{more})"
