"""The verdict: which rank slows the run down, in which way, in which phase, by how much, and how sure that is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Cause", "Kind", "Verdict"]

Kind = Literal["none", "persistent", "onset", "transient", "intermittent", "rotating", "insufficient_data"]
Cause = Literal["data", "forward", "backward", "optimizer", "other", "collective"]


@dataclass(frozen=True)
class Verdict:
    """An answer to "is a rank slow?".

    A rank is named in the kinds ``persistent`` (slow in nearly all steps), ``onset`` (from a step on), ``transient``
    (in one stretch of steps) and ``intermittent`` (now and then). ``rotating`` means that in most steps one rank is
    far behind, each time another; ``none`` that no rank stands out; ``insufficient_data`` that this log cannot tell.
    Where no rank is named, the fields on one rank are None; ``rotating`` has what the waiting costs. ``onset`` and
    ``transient`` without a rank and with the cause ``collective`` mean that no rank is late, but the transfer itself
    takes longer from a step on, or for a while.

    Attributes:
        kind: see above.
        reason: one or two sentences in plain words: what was found, or why nobody is named and what is missing, and
            after "Next:" what to do about that.
        module: number of the DDP module that is judged; None if the log has none.
        steps: steps that were compared, warm-up left out.
        step_time_ns: mean time of these steps; None if unknown.
        rank: global rank that is slow; of several that are slow together, the latest.
        ranks: all ranks that the verdict names: this one, or those that are slow together because they share a host or
            a process group.
        host: the host, if all its ranks, and no others, are slow together.
        group: name of the process group, if all its ranks are slow together and they are no host's.
        cause: the phase of the step in which it loses the time, or ``collective``; None if the log does not tell.
        first_late_bucket: where the cause is ``backward``, the first bucket that the rank launches late.
        first_late_parameters: names of the parameters in this bucket, as far as known.
        first_step: first of the steps in which it is slow.
        last_step: last of them.
        affected_steps: number of compared steps in which it is slow.
        delay_ns: how much later than the others it is in each of these steps.
        delay_low_ns: lower end of the confidence interval of the delay.
        delay_high_ns: upper end.
        confidence: level of this interval.
        last_share: share of all compared steps in which it was the last rank to launch its last bucket.
        p_value: chance of a rank standing out so clearly if all ranks were alike, adjusted for the number of ranks.
        step_time_without_ns: mean time of the compared steps had the rank arrived with the median of the others.
        lost_seconds: time by which the compared steps would have been shorter, in all.
        lost_gpu_hours: the same, times the number of ranks that wait for each other.
    """

    kind: Kind
    reason: str
    module: int | None = None
    steps: int = 0
    step_time_ns: float | None = None
    rank: int | None = None
    ranks: tuple[int, ...] = ()
    host: str | None = None
    group: str | None = None
    cause: Cause | None = None
    first_late_bucket: int | None = None
    first_late_parameters: tuple[str, ...] = ()
    first_step: int | None = None
    last_step: int | None = None
    affected_steps: int | None = None
    delay_ns: float | None = None
    delay_low_ns: float | None = None
    delay_high_ns: float | None = None
    confidence: float | None = None
    last_share: float | None = None
    p_value: float | None = None
    step_time_without_ns: float | None = None
    lost_seconds: float | None = None
    lost_gpu_hours: float | None = None
