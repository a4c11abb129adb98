"""From the arrivals of some ranks to verdicts on them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np
import polars as pl

from ..run import Run
from . import _reasons as reasons
from ._arrivals import Arrivals
from ._cause import find_cause, first_late_bucket
from ._evidence import LEAST_BLOCKS, SIGNIFICANCE, Evidence, weigh
from ._inference import CONFIDENCE, Matrix
from ._pattern import Pattern, find_pattern, is_rotating
from ._together import Together, find_together
from ._transfer import find_slow_transfer
from .facts import Facts
from .verdict import Cause, Verdict

__all__ = ["LEAST_STEPS", "Judgement"]

LEAST_STEPS = 20
"""Compared steps below which no verdict is given."""

_ALIKE = 2.0
"""Ranks are slow together if the delay of none is more than this times that of another."""


@dataclass(frozen=True)
class Judgement:
    """Verdicts on the ranks of one module and group.

    Attributes:
        run: the run.
        facts: its facts.
        arrivals: the ranks that are compared.
        comparisons: number of ranks that are compared in the whole run.
    """

    run: Run
    facts: Facts
    arrivals: Arrivals
    comparisons: int

    @cached_property
    def step_time_ns(self) -> float | None:
        """Mean time of the compared steps."""
        known = self.arrivals.step_time_ns[~np.isnan(self.arrivals.step_time_ns)]
        return float(known.mean()) if len(known) else None

    @cached_property
    def evidence(self) -> Evidence | None:
        """What the comparison shows; None with fewer than two ranks or no step time."""
        if len(self.arrivals.ranks) < 2 or self.step_time_ns is None:
            return None
        return weigh(self.arrivals.arrival_ns, self.step_time_ns, comparisons=self.comparisons)

    @cached_property
    def last_shares(self) -> Matrix:
        """Share of the steps in which each rank arrived last, shape (ranks,)."""
        arrival = self.arrivals.arrival_ns
        present = ~np.isnan(arrival)
        latest = np.where(present, arrival, -np.inf).argmax(axis=1)
        counts = np.bincount(latest, minlength=arrival.shape[1])
        return np.asarray(counts / np.maximum(present.sum(axis=0), 1))

    @cached_property
    def slow_ranks(self) -> tuple[Verdict, ...]:
        """A verdict for each rank that is slow."""
        evidence = self.evidence
        if evidence is None or len(self.arrivals.steps) < LEAST_STEPS or len(evidence.blocks_ns) < LEAST_BLOCKS:
            return ()
        suspects = np.flatnonzero(evidence.p_values < SIGNIFICANCE).tolist()
        patterns = {rank: find_pattern(evidence, rank) for rank in suspects}
        found = [
            self._verdict(_Suspect(self.arrivals, evidence, rank, (rank,)), pattern)
            for rank, pattern in patterns.items()
            if pattern is not None
        ]
        return tuple(sorted(found, key=_total_delay_ns, reverse=True))

    @cached_property
    def named(self) -> tuple[Verdict, ...]:
        """Verdicts that name ranks, the costliest first: one for those that share a host or group and its slowness."""
        found = list(self.slow_ranks)
        for together in find_together(self.run, self.arrivals, [one.rank for one in found if one.rank is not None]):
            if (joint := self._joint(together)) is not None:
                found = [joint, *(one for one in found if one.rank not in together.ranks)]
        return tuple(sorted(found, key=lambda one: (one.lost_seconds or 0.0, _total_delay_ns(one)), reverse=True))

    @cached_property
    def step_time_without_ns(self) -> float | None:
        """Mean time of the compared steps, had all named ranks arrived with the median of the others."""
        columns = [self.arrivals.ranks.index(rank) for one in self.named for rank in one.ranks]
        if not columns or self.step_time_ns is None:
            return None
        return self.step_time_ns - float(np.nanmean(self.arrivals.lost_ns(*columns)))

    def _joint(self, together: Together) -> Verdict | None:
        """The verdict on ranks that are slow together; None if as one they are not."""
        own = [one for one in self.slow_ranks if one.rank in together.ranks]
        delays = [one.delay_ns or 0.0 for one in own]
        if max(delays) > _ALIKE * min(delays):
            return None
        columns = [self.arrivals.ranks.index(rank) for rank in together.ranks]
        arrivals = self.arrivals.merged(columns)
        evidence = weigh(arrivals.arrival_ns, self.step_time_ns or 0.0, comparisons=self.comparisons)
        pattern = find_pattern(evidence, 0)
        if pattern is None:
            return None
        latest = max(own, key=lambda one: one.delay_ns or 0.0)
        joint = self._verdict(_Suspect(arrivals, evidence, 0, tuple(columns)), pattern, latest.rank)
        named = replace(
            joint,
            ranks=together.ranks,
            host=together.host,
            group=together.group,
            p_value=min(one.p_value or 0.0 for one in own),
        )
        return replace(named, reason=reasons.named(named))

    def unnamed(self) -> Verdict:
        """The verdict where no rank is named."""
        kind, reason = self._silence()
        verdict = Verdict(
            kind=kind,
            reason=reason,
            module=self.arrivals.module,
            steps=len(self.arrivals.steps),
            step_time_ns=self.step_time_ns,
        )
        if kind == "rotating":
            return self._with_loss(verdict, self._lost_in_turn_ns * len(self.arrivals.steps))
        return self._with_slow_transfer(verdict) if kind == "none" else verdict

    @property
    def _lost_in_turn_ns(self) -> float:
        """Mean time of a step that its latest rank costs, whichever it is."""
        return sum(float(np.nanmean(self.arrivals.lost_ns(column))) for column in range(len(self.arrivals.ranks)))

    def _with_loss(self, verdict: Verdict, lost_ns: float) -> Verdict:
        """The verdict with what the time ``lost_ns``, over all compared steps, means."""
        return replace(
            verdict,
            step_time_without_ns=(verdict.step_time_ns or 0.0) - lost_ns / len(self.arrivals.steps),
            lost_seconds=lost_ns / 1e9,
            lost_gpu_hours=lost_ns / 3.6e12 * len(self.arrivals.members),
        )

    def _with_slow_transfer(self, verdict: Verdict) -> Verdict:
        """The verdict that the transfer is slow for everybody, if it is, or else ``verdict``."""
        step_time_ns = self.step_time_ns or 0.0
        found = find_slow_transfer(self.arrivals.transfer_ns, step_time_ns)
        if found is None:
            return verdict
        steps = self.arrivals.steps[found.affected]
        slow = replace(
            self._with_loss(verdict, found.delay_ns * len(steps)),
            kind="onset" if found.lasts else "transient",
            cause="collective",
            first_step=int(steps[0]),
            last_step=int(steps[-1]),
            affected_steps=len(steps),
            delay_ns=found.delay_ns,
            delay_low_ns=found.low_ns,
            delay_high_ns=found.high_ns,
            confidence=CONFIDENCE,
            p_value=found.p_value,
        )
        return replace(slow, reason=reasons.slow_transfer(slow, found.usual_ns))

    def _silence(self) -> tuple[Literal["none", "rotating", "insufficient_data"], str]:
        arrivals, evidence = self.arrivals, self.evidence
        if len(arrivals.ranks) < 2:
            return "insufficient_data", reasons.too_few_ranks(arrivals)
        if evidence is None or len(arrivals.steps) < LEAST_STEPS:
            return "insufficient_data", reasons.too_few_steps(len(arrivals.steps), LEAST_STEPS)
        if arrivals.silent:
            return "insufficient_data", reasons.unseen(arrivals)
        if evidence.steps_needed() > len(arrivals.steps):
            return "insufficient_data", reasons.too_correlated(arrivals, evidence)
        if is_rotating(evidence):
            return "rotating", reasons.rotating(arrivals, self._lost_in_turn_ns)
        return "none", reasons.nobody(arrivals, evidence, self.last_shares)

    def _verdict(self, suspect: _Suspect, pattern: Pattern, rank: int | None = None) -> Verdict:
        arrivals, evidence = self.arrivals, suspect.evidence
        steps = arrivals.steps[pattern.affected]
        lost = arrivals.lost_ns(*suspect.columns)
        # Where rows are missing, the steps that are known stand for the others.
        lost_ns = float(np.nanmean(np.where(pattern.affected | np.isnan(lost), lost, 0.0))) * len(arrivals.steps)
        own = suspect.arrivals.ranks[suspect.column] if rank is None else rank
        verdict = Verdict(
            kind=pattern.kind,
            reason="",
            module=arrivals.module,
            steps=len(arrivals.steps),
            step_time_ns=evidence.step_time_ns,
            rank=own,
            ranks=(own,),
            first_step=int(steps[0]),
            last_step=int(steps[-1]),
            affected_steps=len(steps),
            delay_ns=pattern.delay_ns,
            delay_low_ns=pattern.low_ns,
            delay_high_ns=pattern.high_ns,
            confidence=CONFIDENCE,
            last_share=float(self.last_shares[[*suspect.columns]].sum()),
            p_value=float(evidence.p_values[suspect.column]),
        )
        found = find_cause(evidence, suspect.arrivals.phases_ns, suspect.column, pattern.affected)
        caused = self._with_cause(self._with_loss(verdict, lost_ns), found)
        return replace(caused, reason=reasons.named(caused))

    def _with_cause(self, verdict: Verdict, found: tuple[Cause, float] | None) -> Verdict:
        if found is None:
            return verdict
        cause, excess_ns = found
        rows = self.facts.buckets.filter(
            (pl.col("module") == self.arrivals.module) & pl.col("rank").is_in(self.arrivals.ranks) & (pl.col("n") > 0)
        )
        if cause != "backward" or rows.is_empty() or verdict.rank is None or verdict.delay_ns is None:
            return replace(verdict, cause=cause)
        layout = int(rows.sort("n", "layout")["layout"][-1])
        share = min(1.0, excess_ns / verdict.delay_ns)
        bucket = first_late_bucket(rows.filter(pl.col("layout") == layout), verdict.rank, share)
        buckets = self.run.metadata[verdict.rank]["layouts"].get(str(self.arrivals.module), {}).get(str(layout), [])
        parameters = buckets[bucket]["parameters"] if bucket is not None and bucket < len(buckets) else []
        return replace(verdict, cause=cause, first_late_bucket=bucket, first_late_parameters=tuple(parameters))


@dataclass(frozen=True)
class _Suspect:
    """Ranks that are judged as one.

    Attributes:
        arrivals: in which they are one column.
        evidence: of these arrivals.
        column: their column.
        columns: their columns among the ranks one by one.
    """

    arrivals: Arrivals
    evidence: Evidence
    column: int
    columns: tuple[int, ...]


def _total_delay_ns(verdict: Verdict) -> float:
    return (verdict.delay_ns or 0.0) * (verdict.affected_steps or 0)
