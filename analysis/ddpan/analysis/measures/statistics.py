"""The four windows of PyTorch's DDP logger, over all recorded steps instead of a sample of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import polars as pl

from ..run import Run
from .facts import facts

__all__ = ["WINDOWS", "Statistics", "statistics"]

WINDOWS: Final = ("forward", "backward_compute", "backward_comm", "overlap")
"""Names of the windows, each a column ``c10d_<name>_ns`` of the facts."""


@dataclass(frozen=True)
class Statistics:
    """Statistics of the windows, in nanoseconds.

    Each table has the columns ``window`` (one of `WINDOWS`), ``n`` (steps in which it is known), ``mean_ns``,
    ``variance_ns2`` (with n - 1; null below two steps), ``std_ns``, ``min_ns``, ``p50_ns``, ``p95_ns``, ``p99_ns``
    (interpolated linearly) and ``max_ns``.

    Attributes:
        per_rank: one row per ``module``, ``rank`` and window, without warm-up.
        overall: one row per ``module`` and window, over the steps of all ranks, without warm-up.
        warmup: the same over the warm-up steps, which are never part of the other two.
    """

    per_rank: pl.DataFrame
    overall: pl.DataFrame
    warmup: pl.DataFrame


def statistics(run: Run) -> Statistics:
    """Statistics of the forward, backward compute, backward communication and overlap windows of ``run``."""
    steps = facts(run).steps
    measured = steps.filter(~pl.col("warmup"))
    return Statistics(
        per_rank=_summary(measured, ["module", "rank"]),
        overall=_summary(measured, ["module"]),
        warmup=_summary(steps.filter("warmup"), ["module"]),
    )


def _summary(steps: pl.DataFrame, keys: Sequence[str]) -> pl.DataFrame:
    order = pl.DataFrame({"window": WINDOWS, "order": range(len(WINDOWS))})
    tables = [
        steps.lazy().group_by(keys).agg(_moments(f"c10d_{window}_ns")).with_columns(window=pl.lit(window))
        for window in WINDOWS
    ]
    table = pl.concat(pl.collect_all(tables)).join(order, on="window").sort(*keys, "order").drop("order")
    return table.select(*keys, "window", pl.exclude(*keys, "window"))


def _moments(column: str) -> list[pl.Expr]:
    value = pl.col(column).cast(pl.Float64)
    quantiles = [value.quantile(q, interpolation="linear").alias(f"p{q * 100:.0f}_ns") for q in (0.5, 0.95, 0.99)]
    return [
        value.count().alias("n"),
        value.mean().alias("mean_ns"),
        value.var(ddof=1).alias("variance_ns2"),
        value.std(ddof=1).alias("std_ns"),
        value.min().alias("min_ns"),
        *quantiles,
        value.max().alias("max_ns"),
    ]
