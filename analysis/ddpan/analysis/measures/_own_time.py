"""A rank's own time: the facts without what it spent standing still in collectives on its way to its last bucket.

DDP broadcasts buffers, such as those of BatchNorm, from rank 0 at the start of the forward, SyncBatchNorm gathers
within it, and users reduce losses. There ranks wait for each other before they reach their buckets: if rank 0 is late
with its data, all others spend the delay in their forward and launch their last buckets no sooner than rank 0. ZeRO and
FSDP gather parameters on the way, and where ZeRO waits for each bucket, ranks meet there as well. With that taken out,
each rank's time from the start of a step to its last bucket is its own again, and so is each phase.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final
from weakref import WeakKeyDictionary

import polars as pl

from ..run import Run
from .facts import facts

__all__ = ["own_time"]

_KEYS: Final = ("module", "rank", "step")
_PLACES: Final = ("before", "forward", "backward")

_cache: WeakKeyDictionary[Run, pl.DataFrame] = WeakKeyDictionary()


def own_time(run: Run) -> pl.DataFrame:
    """The table ``Facts.steps`` with ``arrival_ns`` and its phases reduced to the rank's own time; kept with the run.

    Time in a collective outside the phases known by their moments is taken from ``other_ns`` first, then from
    ``optimizer_ns``, where an optimizer with sharded state communicates.
    """
    known = _cache.get(run)
    if known is None:
        known = _cache[run] = _own_time(run)
    return known


def _own_time(run: Run) -> pl.DataFrame:
    steps = facts(run).steps
    spans = _spans(run)
    if spans.is_empty() or steps.is_empty():
        return steps
    inside = [
        _inside(steps.filter(pl.col("module") == module), spans, _forwards(run, module))
        for module in steps["module"].unique()
    ]
    of_place = [pl.col("span").filter(pl.col("place") == place).sum().alias(place) for place in _PLACES]
    spent = pl.concat(inside).group_by(_KEYS).agg(of_place)
    before, forward, backward = (pl.col(place).fill_null(0) for place in _PLACES)
    from_other = pl.min_horizontal(before, pl.col("other_ns").fill_null(0))
    return (
        steps.join(spent, on=_KEYS, how="left", maintain_order="left")
        .with_columns(
            pl.col("arrival_ns") - before - forward - backward,
            pl.col("forward_ns") - forward,
            pl.col("backward_ns") - backward,
            pl.col("other_ns") - from_other,
            pl.col("optimizer_ns") - (before - from_other),
        )
        .select(steps.columns)
    )


def _spans(run: Run) -> pl.DataFrame:
    """Time that each rank spent in collectives, from ``begin_ns`` on; what overlaps counts once, with the earlier one.

    Where the rank was seen to stand still, that is known; ``seen`` says so. Elsewhere it is for `_inside` to judge, and
    buckets are not among them.
    """
    seen = pl.col("wait_start_ns").is_not_null()
    others = run.collectives().filter((pl.col("module").is_null() | seen) & pl.col("end_ns").is_not_null())
    begin_ns = pl.coalesce("wait_start_ns", "launch_ns")
    rows = others.select("rank", "end_ns", begin_ns=begin_ns, seen=seen).collect().sort("rank", "begin_ns")
    ended = pl.col("end_ns").cum_max().shift(1).over("rank").fill_null(0)
    begin = pl.max_horizontal("begin_ns", ended)
    spans = rows.with_columns(span=(pl.col("end_ns") - begin).clip(0)).filter(pl.col("span") > 0)
    return spans.sort("begin_ns")


def _forwards(run: Run, module: int) -> pl.LazyFrame:
    """Every forward of a module, those of earlier micro-batches included.

    Where steps are told by their optimizer alone, forwards are not known; there all of a step passes for its backward.
    """
    infos: list[Mapping[str, Any]] = [one["modules"].get(str(module), {}) for one in run.metadata.values()]
    by_optimizer = any(info.get("kind") == "optimizer" for info in infos)
    ended = pl.coalesce("forward_end_ns", "forward_start_ns") if by_optimizer else pl.col("forward_end_ns")
    rows = run.steps().filter(pl.col("module") == module).select("rank", at="forward_start_ns", forward_end=ended)
    return rows.filter(pl.col("forward_end").is_not_null())


def _inside(steps: pl.DataFrame, spans: pl.DataFrame, forwards: pl.LazyFrame) -> pl.DataFrame:
    """Spans in which a rank was blocked on its way to the last bucket of a step, by (module, rank, step) and place."""
    # During a collective that blocks the rank nothing else begins or ends there; one that runs beside its work does
    # not delay it.
    blocked = pl.all_horizontal(
        (pl.col(moment) <= pl.col("begin_ns")) | (pl.col("end_ns") <= pl.col(moment))
        for moment in ("forward_start", "forward_end", "first_launch", "last_launch")
    )
    place = (
        pl.when(pl.col("end_ns") <= pl.col("forward_start"))
        .then(pl.lit("before"))
        .when(pl.col("begin_ns") < pl.col("forward_end"))
        .then(pl.lit("forward"))
        .otherwise(pl.lit("backward"))
    )
    found = _in_windows(steps, spans, forwards)
    found = found.filter((pl.col("seen") | blocked) & (pl.col("end_ns") <= pl.col("last_launch")))
    return found.select(*_KEYS, "span", place=place).collect()


def _carried_over(windows: pl.LazyFrame, spans: pl.DataFrame) -> pl.LazyFrame:
    """The rest of spans in which a step begins, from there on: a rank may leave its last bucket and be held up yet."""
    starts = windows.select("rank", start="at").drop_nulls().sort("start")
    last = (
        spans.lazy()
        .sort("end_ns")
        .join_asof(starts, left_on="end_ns", right_on="start", by="rank", check_sortedness=False)
    )
    rest = last.filter((pl.col("begin_ns") < pl.col("start")) & (pl.col("start") < pl.col("end_ns")))
    span = pl.min_horizontal("span", pl.col("end_ns") - pl.col("start"))
    return rest.with_columns(span=span, begin_ns="start").select(spans.columns)


def _in_windows(steps: pl.DataFrame, spans: pl.DataFrame, forwards: pl.LazyFrame) -> pl.LazyFrame:
    """Each span with the moments of the step of ``steps``, and the end of the forward, that its rank had last begun."""
    windows = steps.lazy().select(
        *_KEYS,
        at="step_start_ns",
        forward_start="forward_start_ns",
        first_launch=pl.col("step_start_ns") + pl.col("first_arrival_ns"),
        last_launch=pl.col("step_start_ns") + pl.col("arrival_ns"),
    )
    names = ("module", "step", "forward_start", "forward_end", "first_launch", "last_launch")
    begun = pl.concat([spans.lazy(), _carried_over(windows, spans)]).with_columns(at="begin_ns")
    # Of equal moments the window comes first, then the forward.
    events = pl.concat([windows.drop_nulls(), forwards, begun], how="diagonal")
    return (
        events.sort("rank", "at", maintain_order=True)
        .with_columns(pl.col(names).forward_fill().over("rank"))
        .filter(pl.col("span").is_not_null() & pl.col("step").is_not_null() & pl.col("forward_end").is_not_null())
    )
