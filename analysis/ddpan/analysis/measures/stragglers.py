"""Stragglers: how late each rank is, and the verdict on it. docs/metrics.md describes the method."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl

from ..run import Run
from . import _reasons as reasons
from ._arrivals import PHASES, find_arrivals
from ._inference import excess_over_others, median
from ._judgement import Judgement
from .facts import facts
from .verdict import Verdict

__all__ = ["Stragglers", "Verdict", "stragglers"]

_RANK_SCHEMA = pl.Schema(
    {
        "module": pl.UInt16,
        "rank": pl.UInt32,
        "host": pl.String,
        "steps": pl.UInt32,
        "lateness_ns": pl.Float64,
        "wait_ns": pl.Float64,
        "last_share": pl.Float64,
        **{f"{phase}_ns": pl.Float64 for phase in PHASES},
        "delay_ns": pl.Float64,
        "delay_low_ns": pl.Float64,
        "delay_high_ns": pl.Float64,
        "p_value": pl.Float64,
        "left_out": pl.String,
    }
)


@dataclass(frozen=True)
class Stragglers:
    """Who is late, and what follows.

    ``ranks`` has one row per module and rank of its group, the latest first; values are null for ranks that are not
    compared, and ``left_out`` says why:

    - ``host``; ``steps``: compared steps in which the rank's arrival is known.
    - ``lateness_ns``: median over steps of the launch of the last bucket, less the median over ranks. Time in
      collectives that are no buckets does not count: there ranks wait for others.
    - ``wait_ns``: mean over steps of the time that it waited for the latest rank.
    - ``last_share``: share of the steps in which it launched its last bucket last.
    - ``data_ns``, ``forward_ns``, ``backward_ns``, ``optimizer_ns``, ``other_ns``: median over steps of the time it
      spent in a phase, less the median of the other ranks. They need not add up to the delay exactly.
    - ``delay_ns``, ``delay_low_ns``, ``delay_high_ns``: lateness against the other ranks with its 95 % interval; for a
      named rank, in the steps in which it is slow.
    - ``p_value``: chance of standing out so clearly if all ranks were alike, adjusted for their number.

    ``buckets`` has one row per module, layout and bucket: ``rank``, the named rank or else the one that launches the
    bucket last most often; its ``lateness_ns`` (median) and ``last_share``; ``n`` steps, ``bytes``; and means over
    ranks and steps of ``wait_ns``, ``transfer_ns``, ``duration_ns``, ``exposed_ns`` and ``queue_ns``.

    Attributes:
        verdict: the verdict on the run: the costliest of ``named``, or why there is none.
        named: a verdict for each rank that is named, or for all ranks of a host or process group that are slow
            together, the costliest first.
        step_time_without_all_ns: mean time of the compared steps had all ranks named in the module and group of the
            verdict arrived with the median of the others; None if no rank is named.
        ranks: see above.
        buckets: see above.
    """

    verdict: Verdict
    named: tuple[Verdict, ...]
    step_time_without_all_ns: float | None
    ranks: pl.DataFrame
    buckets: pl.DataFrame


def stragglers(run: Run) -> Stragglers:
    """Find the ranks that slow ``run`` down.

    Lateness needs no clock that the ranks share: they leave the last bucket of a step together, and how long each
    takes from there to launching the last bucket of the next step is measured on its own clock.
    """
    known = facts(run)
    groups = find_arrivals(run, known)
    comparisons = sum(len(group.ranks) for group in groups)
    judgements = [Judgement(run, known, group, comparisons) for group in groups]
    named = sorted((v for one in judgements for v in one.named), key=lambda v: -(v.lost_seconds or 0.0))
    return Stragglers(
        verdict=named[0] if named else _unnamed(judgements),
        named=tuple(named),
        step_time_without_all_ns=_without_all_ns(judgements, named[0]) if named else None,
        ranks=_ranks(run, judgements),
        buckets=_buckets(known.buckets, named),
    )


def _without_all_ns(judgements: Sequence[Judgement], verdict: Verdict) -> float | None:
    return next(one.step_time_without_ns for one in judgements if verdict in one.named)


def _unnamed(judgements: Sequence[Judgement]) -> Verdict:
    """Of several modules or groups, the verdict that says most: what is missing, then what is odd, then nothing."""
    if not judgements:
        return Verdict(kind="insufficient_data", reason=reasons.too_few_ranks(None))
    order = ("insufficient_data", "onset", "transient", "rotating", "none")
    return min((one.unnamed() for one in judgements), key=lambda verdict: order.index(verdict.kind))


def _ranks(run: Run, judgements: Sequence[Judgement]) -> pl.DataFrame:
    tables = [pl.DataFrame(_rank_columns(one), schema_overrides=_RANK_SCHEMA) for one in judgements]
    silent = [
        {"module": one.arrivals.module, "rank": rank, "left_out": why}
        for one in judgements
        for rank, why in one.arrivals.silent.items()
    ]
    hosts = {rank: metadata["host"] for rank, metadata in run.metadata.items()}
    silent_table = pl.DataFrame(silent, schema_overrides=_RANK_SCHEMA)
    table = pl.concat([pl.DataFrame(schema=_RANK_SCHEMA), *tables, silent_table], how="diagonal")
    return (
        table.with_columns(host=pl.col("rank").replace_strict(hosts, default=None, return_dtype=pl.String))
        .with_columns(pl.col(pl.Float64).fill_nan(None))
        .select(pl.col(name).cast(dtype) for name, dtype in _RANK_SCHEMA.items())
        .sort("module", "lateness_ns", "rank", descending=[False, True, False], nulls_last=True)
    )


def _rank_columns(one: Judgement) -> dict[str, Any]:
    """Columns of the ranks that are compared; of the table in `Stragglers`, those that the arrivals give."""
    arrivals, evidence = one.arrivals, one.evidence
    if evidence is None:
        return {"module": [arrivals.module] * len(arrivals.ranks), "rank": arrivals.ranks}
    middle = median(arrivals.arrival_ns, axis=1)[:, None]
    columns: dict[str, Any] = {
        "module": np.full(len(arrivals.ranks), arrivals.module),
        "rank": arrivals.ranks,
        "steps": np.sum(~np.isnan(evidence.excess_ns), axis=0),
        "lateness_ns": median(arrivals.arrival_ns - middle),
        "wait_ns": arrivals.waits_ns(),
        "last_share": one.last_shares,
        "delay_ns": evidence.interval.middle.copy(),
        "delay_low_ns": evidence.interval.low.copy(),
        "delay_high_ns": evidence.interval.high.copy(),
        "p_value": evidence.p_values,
    }
    columns |= {f"{phase}_ns": median(excess_over_others(arrivals.phases_ns[phase])) for phase in PHASES}
    for verdict in one.slow_ranks:
        at = arrivals.ranks.index(verdict.rank if verdict.rank is not None else -1)
        for name in ("delay_ns", "delay_low_ns", "delay_high_ns"):
            columns[name][at] = getattr(verdict, name)
    return columns


def _buckets(buckets: pl.DataFrame, named: Sequence[Verdict]) -> pl.DataFrame:
    suspects = {verdict.module: verdict.rank for verdict in reversed(named)}
    suspect = pl.col("module").replace_strict(suspects, default=None, return_dtype=pl.UInt32)
    keys = ["module", "layout", "bucket"]
    means = ("wait", "transfer", "duration", "exposed", "queue")
    latest = pl.col("rank").sort_by("last_share", descending=True, nulls_last=True).first().over(keys)
    whole = buckets.group_by(keys).agg(
        pl.col("bytes").max(), *(pl.col(f"{name}_mean_ns").mean().alias(f"{name}_ns") for name in means)
    )
    rank = buckets.with_columns(shown=pl.coalesce(suspect, latest)).filter(pl.col("rank") == pl.col("shown"))
    rank = rank.select(*keys, "rank", "n", "last_share", lateness_ns="lateness_median_ns")
    columns = (*keys, "rank", "n", "bytes", "lateness_ns", "last_share", *(f"{name}_ns" for name in means))
    return whole.join(rank, on=keys, how="left").select(columns).sort(keys)
