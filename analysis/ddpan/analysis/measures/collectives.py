"""Every collective of a run by operation, size and process group: how long, how fast, and who came last."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import polars as pl

from ddpan.collector.schema import POINT_TO_POINT

from ..run import Run

__all__ = ["LEFT_TOGETHER", "CollectiveTables", "collectives"]

LEFT_TOGETHER: Final = ("all_reduce", "all_gather", "all_to_all", "barrier", "reduce_scatter")
"""Collectives that no rank can leave before all have come, so that the shortest stay is that of the last to come."""

_COLUMNS: Final = ("rank", "group", "seq", "op", "bytes", "launch_ns", "end_ns", "wait_start_ns")
_KEYS: Final = ("group", "lowest_rank", "op", "bytes")
_KEY_TYPES: Final[dict[str, Any]] = {
    "group": pl.UInt16,
    "lowest_rank": pl.UInt32,
    "op": pl.String,
    "bytes": pl.UInt64,
}
_TIMES: Final = ("total_ns", "duration_ns", "wait_ns", "transfer_ns", "hidden_ns", "exposed_ns")
_BANDWIDTHS: Final = ("algbw_observed", "busbw_observed", "algbw_transfer", "busbw_transfer")
_SIZES: Final = pl.Schema(
    {
        **_KEY_TYPES,
        "ranks": pl.List(pl.UInt32),
        "size_bytes": pl.UInt64,
        "count": pl.UInt64,
        "complete": pl.UInt64,
        **dict.fromkeys((*_TIMES, *_BANDWIDTHS), pl.Float64),
        "last_rank": pl.UInt32,
        "last_share": pl.Float64,
    }
)
_RANKS: Final = pl.Schema(
    {
        **_KEY_TYPES,
        "rank": pl.UInt32,
        "count": pl.UInt64,
        **dict.fromkeys(("duration_ns", "hidden_ns", "exposed_ns", "straggler_ns"), pl.Float64),
        "last": pl.UInt64,
    }
)
_OF_ONE_RANK: Final = ("all_gather", "gather")
"""Operations in which a rank puts in an n-th of what is moved."""


@dataclass(frozen=True)
class CollectiveTables:
    """Collectives by operation, size and process group, over all steps, warm-up included.

    Both tables have the keys ``group`` (number in the log), ``lowest_rank`` (which tells apart groups of one number),
    ``op`` and ``bytes`` (payload of a rank's input, the largest of any rank). ``sizes`` has one row for each, the ones
    that took most time first:

    - ``ranks``: of the group. ``size_bytes``: what nccl-tests calls the size, n times ``bytes`` for all_gather and
      gather. ``count``: collectives; ``complete``: of these, recorded from launch to end by all ranks of the group.
    - ``total_ns``: time that a rank spent in all of them, mean over ranks. ``duration_ns``: mean from launch to end,
      over ranks and collectives; ``hidden_ns``, ``exposed_ns``: the part during the backward computation while the
      rank did not stand still, and the rest.
    - ``wait_ns``, ``transfer_ns``: means over complete ones of what `facts` calls so.
    - ``algbw_observed``, ``busbw_observed``: bytes per second from ``duration_ns``; ``algbw_transfer``,
      ``busbw_transfer``: from ``transfer_ns``, free of the skew of the ranks. Formulas and factors are those of
      nccl-tests' doc/PERFORMANCE.md, with n the size of the group.
    - ``last_rank``: the rank that came last, that is, stayed for the shortest time, most often; ``last_share``: the
      share of complete ones in which it did.

    A broadcast, reduce, gather or scatter may be over for some ranks before others have come, and sends and receives
    are not matched with one another: of these no wait, transfer or last rank is known.

    ``ranks`` has one row for each rank in addition: ``count``, means ``duration_ns``, ``hidden_ns`` and ``exposed_ns``,
    ``straggler_ns`` (sum over complete ones of its duration less the shortest of any rank, as in DeepSpeed's comms
    logger) and ``last`` (how often it came last).

    Attributes:
        sizes: see above.
        ranks: see above.
    """

    sizes: pl.DataFrame
    ranks: pl.DataFrame


def collectives(run: Run, *, progress: Callable[[float], None] | None = None) -> CollectiveTables:
    """The collectives of ``run`` by operation, size and process group.

    Args:
        run: the run.
        progress: called with the share of the log that was read, 0 to 1.
    """
    groups = _groups(run)
    partial = [_by_rank(rows) for rows in _joined(run, groups, progress)]
    by_rank = pl.concat([*partial, _by_rank(_empty(groups))]).group_by(*_KEYS, "rank", "members").agg(pl.all().sum())
    return CollectiveTables(sizes=_sizes(by_rank, groups), ranks=_ranks(by_rank))


def _groups(run: Run) -> pl.DataFrame:
    """The process groups that each rank knows by which number: columns rank, group, ranks, lowest_rank and members."""
    rows = []
    for rank, metadata in run.metadata.items():
        for number, info in metadata["groups"].items():
            ranks = sorted(info["ranks"])
            rows.append((rank, int(number), ranks, min(ranks, default=rank), len(ranks)))
    schema: dict[str, Any] = {
        "rank": pl.UInt32,
        "group": pl.UInt16,
        "ranks": pl.List(pl.UInt32),
        "lowest_rank": pl.UInt32,
        "members": pl.UInt32,
    }
    return pl.DataFrame(rows, schema=schema, orient="row")


def _empty(groups: pl.DataFrame) -> pl.DataFrame:
    times: dict[str, Any] = {
        "duration": pl.Int64,
        "hidden": pl.Int64,
        "known": pl.UInt32,
        "shortest": pl.Int64,
        "last": pl.UInt32,
    }
    keys: dict[str, Any] = {**_KEY_TYPES, "rank": pl.UInt32, "seq": pl.UInt64, "members": groups.schema["members"]}
    return pl.DataFrame(schema={**keys, **times})


def _joined(run: Run, groups: pl.DataFrame, progress: Callable[[float], None] | None) -> Iterator[pl.DataFrame]:
    """The rows of whole collectives, a part of the run at a time, with what the ranks of each have in common."""
    windows = _windows(run)
    recorded = groups.group_by("group", "lowest_rank").agg(recorders=pl.len())
    held: pl.DataFrame | None = None
    reached = pl.DataFrame()
    for done, segment in enumerate(run.segments("collectives", _COLUMNS), start=1):
        rows = _timed(segment, groups, windows)
        held = rows if held is None else pl.concat([held, rows])
        reached = pl.concat([reached, rows], how="diagonal")
        reached = reached.group_by("group", "lowest_rank", "rank").agg(pl.col("seq").max())
        marked = held.join(_horizon(reached, recorded), on=["group", "lowest_rank"], how="left")
        whole = (pl.col("seq") <= pl.col("horizon")).fill_null(False)
        yield _compared(marked.filter(whole).drop("horizon"))
        held = marked.filter(~whole).drop("horizon")
        if progress is not None:
            progress(1 - 1 / (1 + done))
    if held is not None:
        yield _compared(held)


def _horizon(reached: pl.DataFrame, recorded: pl.DataFrame) -> pl.DataFrame:
    """The position in each group's order up to which all recorded ranks have been read."""
    least = reached.group_by("group", "lowest_rank").agg(horizon=pl.col("seq").min(), ranks=pl.len())
    joined = least.join(recorded, on=["group", "lowest_rank"])
    return joined.filter(pl.col("ranks") == pl.col("recorders")).select("group", "lowest_rank", "horizon")


def _windows(run: Run) -> pl.DataFrame:
    """The backward computation of each step and rank: from the end of forward to the last gradient."""
    known = pl.col("forward_end_ns").is_not_null() & pl.col("compute_end_ns").is_not_null()
    rows = run.steps().filter(known).select("rank", from_ns="forward_end_ns", to_ns="compute_end_ns")
    return rows.sort("from_ns").collect()


def _timed(rows: pl.DataFrame, groups: pl.DataFrame, windows: pl.DataFrame) -> pl.DataFrame:
    """Rows with their group, their duration, and how much of it lies hidden behind the backward computation."""
    worked_until = pl.min_horizontal(pl.coalesce("wait_start_ns", "end_ns"), "to_ns")
    return (
        rows.with_columns(pl.col("op").cast(pl.String))
        .join(groups.drop("ranks"), on=["rank", "group"], how="inner")
        .sort("launch_ns")
        .join_asof(windows, left_on="launch_ns", right_on="from_ns", by="rank", check_sortedness=False)
        .with_columns(
            duration=pl.col("end_ns") - pl.col("launch_ns"),
            hidden=(worked_until - pl.col("launch_ns")).clip(0).fill_null(0),
        )
        .select(*_KEYS, "rank", "seq", "members", "duration", "hidden")
    )


def _compared(rows: pl.DataFrame) -> pl.DataFrame:
    """Rows with what the ranks of one collective have in common."""
    one = ["group", "lowest_rank", "op", "seq"]
    duration = pl.col("duration")
    point_to_point = pl.col("op").is_in(POINT_TO_POINT)
    known = pl.when(point_to_point).then(0).otherwise(duration.count().over(one)).cast(pl.UInt32)
    shortest = duration.min().over(one)
    # Of several that stayed equally long the lowest rank counts, so that each collective has one last rank.
    last = pl.col("rank") == pl.col("rank").filter(duration == duration.min()).min().over(one)
    return rows.with_columns(
        bytes=pl.when(point_to_point).then(pl.col("bytes")).otherwise(pl.col("bytes").max().over(one)),
        known=known,
        shortest=shortest,
        last=(last & (known == pl.col("members")) & pl.col("op").is_in(LEFT_TOGETHER)).fill_null(False).cast(pl.UInt32),
    )


def _by_rank(rows: pl.DataFrame) -> pl.DataFrame:
    """Sums over the collectives of each key and rank."""
    complete = pl.col("known") == pl.col("members")
    return rows.group_by(*_KEYS, "rank", "members").agg(
        recorded=pl.len().cast(pl.UInt64),
        ended=pl.col("duration").count().cast(pl.UInt64),
        complete=complete.sum().cast(pl.UInt64),
        duration=pl.col("duration").sum(),
        hidden=pl.col("hidden").filter(pl.col("duration").is_not_null()).sum(),
        straggler=(pl.col("duration") - pl.col("shortest")).filter(complete).sum(),
        shortest=pl.col("shortest").filter(complete).sum(),
        last=pl.col("last").sum().cast(pl.UInt64),
    )


def _sizes(by_rank: pl.DataFrame, groups: pl.DataFrame) -> pl.DataFrame:
    ended = pl.col("ended").sum()
    complete = pl.when(pl.col("op").is_in(LEFT_TOGETHER).first()).then(pl.col("complete").sum()).otherwise(0)
    summed = by_rank.group_by(*_KEYS, "members").agg(
        count=pl.col("recorded").max(),
        complete=pl.col("complete").max(),
        total_ns=pl.col("duration").mean(),
        duration_ns=_ratio(pl.col("duration").sum(), ended),
        hidden_ns=_ratio(pl.col("hidden").sum(), ended),
        wait_ns=_ratio(pl.col("straggler").sum(), complete),
        transfer_ns=_ratio(pl.col("shortest").sum(), complete),
        last_rank=pl.col("rank").sort_by(["last", "rank"], descending=[True, False]).first(),
        last_share=_ratio(pl.col("last").max(), pl.when(complete > 0).then(pl.col("complete").max())),
    )
    size = pl.col("bytes") * pl.when(pl.col("op").is_in(_OF_ONE_RANK)).then(pl.col("members")).otherwise(1)
    members = groups.group_by("group", "lowest_rank", "members").agg(pl.col("ranks").first())
    table = (
        summed.join(members, on=["group", "lowest_rank", "members"], how="left")
        .with_columns(
            size_bytes=size,
            exposed_ns=pl.col("duration_ns") - pl.col("hidden_ns"),
            last_rank=pl.when(pl.col("last_share").is_not_null()).then("last_rank"),
        )
        .with_columns(*_bandwidths("observed", "duration_ns"), *_bandwidths("transfer", "transfer_ns"))
    )
    table = table.sort("total_ns", *_KEYS, descending=[True, *[False] * len(_KEYS)], nulls_last=True)
    return table.select(pl.col(name).cast(kind) for name, kind in _SIZES.items())


def _bandwidths(of: str, time: str) -> tuple[pl.Expr, pl.Expr]:
    """Algorithm and bus bandwidth in bytes per second, null where nothing is moved."""
    n = pl.col("members").cast(pl.Float64)
    share = (n - 1) / n
    factor = (
        pl.when(pl.col("op") == "all_reduce")
        .then(2 * share)
        .when(pl.col("op").is_in(["all_gather", "reduce_scatter", "all_to_all", "gather", "scatter"]))
        .then(share)
        .otherwise(1.0)
    )
    moved = (pl.col("size_bytes") > 0) & (pl.col(time) > 0)
    algorithm = pl.when(moved).then(pl.col("size_bytes") / pl.col(time) * 1e9)
    return algorithm.alias(f"algbw_{of}"), (algorithm * factor).alias(f"busbw_{of}")


def _ranks(by_rank: pl.DataFrame) -> pl.DataFrame:
    table = by_rank.with_columns(
        count="recorded",
        duration_ns=_ratio(pl.col("duration"), pl.col("ended")),
        hidden_ns=_ratio(pl.col("hidden"), pl.col("ended")),
        straggler_ns=pl.when(pl.col("complete") > 0).then("straggler"),
    ).with_columns(exposed_ns=pl.col("duration_ns") - pl.col("hidden_ns"))
    return table.sort(*_KEYS, "rank").select(pl.col(name).cast(kind) for name, kind in _RANKS.items())


def _ratio(total: pl.Expr, count: pl.Expr) -> pl.Expr:
    return pl.when(count > 0).then(total / count)
