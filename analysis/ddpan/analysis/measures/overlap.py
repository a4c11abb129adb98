"""Overlap: how much of the communication is hidden behind the backward computation, and what the rest costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import polars as pl

from ..run import Run
from .facts import facts

__all__ = ["Overlap", "overlap"]


@dataclass(frozen=True)
class Overlap:
    """Communication of a step and the part of it that the backward computation hides, without warm-up.

    ``per_rank`` and ``overall`` have one row per ``module`` and ``layout`` of buckets, and ``rank`` in the former;
    times are means over ``n`` steps:

    - ``comm_ns``: length of the union of the buckets' spans from launch to end, so buckets in flight together count
      once; ``hidden_ns``: the part within the backward computation; ``exposed_ns``: the rest.
    - ``ratio``: hidden / comm, null without communication. ``exposed_share``: exposed / step time.
    - ``c10d_overlap_ns``: the overlap window of PyTorch's logger, from the first launch to the last gradient, which
      counts the gaps between buckets as overlap too.
    - ``before_first_bucket_ns``: from the end of forward to the launch of the first bucket: the loss, any code before
      ``backward()``, and the layers of that bucket. ``tail_ns``: from the last gradient to the end of backward.
    - ``step_time_ns``: mean time of a step.

    ``buckets`` has one row per ``module``, ``layout`` and ``bucket``: ``bytes``, ``exposed_ns`` (mean over ranks and
    steps of its share of the exposed communication, split evenly among the buckets in flight) and ``exposed_share``
    of the step time.

    Attributes:
        per_rank: see above.
        overall: see above.
        buckets: see above.
        reason: why there is no ratio; None if there is one.
    """

    per_rank: pl.DataFrame
    overall: pl.DataFrame
    buckets: pl.DataFrame
    reason: str | None


def overlap(run: Run) -> Overlap:
    """Overlap of communication with backward computation in ``run``."""
    known = facts(run)
    measured = known.steps.filter(~pl.col("warmup"))
    overall = _means(measured, ["module", "layout"])
    return Overlap(
        per_rank=_means(measured, ["module", "layout", "rank"]),
        overall=overall,
        buckets=_buckets(known.buckets, overall),
        reason=_reason(measured, overall),
    )


def _means(steps: pl.DataFrame, keys: Sequence[str]) -> pl.DataFrame:
    names = ("comm_ns", "hidden_ns", "exposed_ns", "tail_ns", "c10d_overlap_ns")
    communicating = steps.lazy().filter(pl.col("comm_ns").is_not_null())
    before_first = pl.col("c10d_backward_compute_ns") - pl.col("c10d_overlap_ns")
    means = communicating.group_by(keys).agg(
        pl.len().alias("n"),
        *(pl.col(name).mean() for name in names),
        before_first.mean().alias("before_first_bucket_ns"),
        pl.col("step_time_ns").mean(),
        (_where_known("hidden_ns") / _where_known("comm_ns")).fill_nan(None).alias("ratio"),
        pl.col("exposed_ns").filter(pl.col("step_time_ns").is_not_null()).mean().alias("exposed_in_step"),
    )
    share = (pl.col("exposed_in_step") / pl.col("step_time_ns")).alias("exposed_share")
    return means.with_columns(share).drop("exposed_in_step").sort(keys).collect()


def _where_known(column: str) -> pl.Expr:
    """Sum over the steps in which both the communication and its hidden part are known."""
    return pl.col(column).filter(pl.col("hidden_ns").is_not_null()).sum()


def _buckets(buckets: pl.DataFrame, overall: pl.DataFrame) -> pl.DataFrame:
    keys = ["module", "layout", "bucket"]
    exposed = pl.col("exposed_mean_ns")
    table = buckets.group_by(keys).agg(pl.col("bytes").max(), exposed.mean().alias("exposed_ns"))
    table = table.join(overall.select("module", "layout", "step_time_ns"), on=["module", "layout"], how="left")
    share = (pl.col("exposed_ns") / pl.col("step_time_ns")).alias("exposed_share")
    return table.with_columns(share).drop("step_time_ns").sort(keys)


def _reason(measured: pl.DataFrame, overall: pl.DataFrame) -> str | None:
    if overall["ratio"].is_not_null().any():
        return None
    if measured.is_empty():
        return "no step outside warm-up was recorded"
    if measured["buckets"].fill_null(0).sum() == 0:
        return "no communication was recorded: with one rank, or without DDP's reducer, there is none to overlap"
    return "no step has both its communication and the times of its backward pass"
