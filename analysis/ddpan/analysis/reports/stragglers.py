"""The report of ``ddpan stragglers``: the verdict, every rank against the others, and the buckets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from ._records import rows, verdict_record
from ._sections import Column, Section, Table, keys, printable
from ._units import UNKNOWN, duration, hours, interval, milliseconds, percent, plural, rank_list, shown
from .document import Document

if TYPE_CHECKING:
    import polars as pl

    from ddpan.analysis.measures.stragglers import Stragglers
    from ddpan.analysis.measures.verdict import Verdict
    from ddpan.analysis.run import Run

__all__ = ["stragglers_document"]

_MOST_NAMED: Final = 3
_PHASES: Final = ("data", "forward", "backward", "optimizer", "other")
_LEAST_P_VALUE: Final = 1e-4


def stragglers_document(run: Run, result: Stragglers) -> Document:
    """The report on how late each rank of ``run`` is."""
    on_gpus = any(metadata["device"].startswith("cuda") for metadata in run.metadata.values())
    verdict = result.verdict
    return Document(
        answer=_answer(result, on_gpus=on_gpus),
        fine=verdict.kind == "none",
        sections=(_verdicts(result), _ranks(result.ranks), _buckets(result.buckets)),
        facts={
            "run": run.id,
            "path": str(run.path),
            "step_time_without_all_ns": result.step_time_without_all_ns,
        },
        tables={
            "verdicts": [verdict_record(one) for one in result.named or (verdict,)],
            "ranks": rows(result.ranks),
            "buckets": rows(result.buckets),
        },
        keys=("module", "layout", "rank", "bucket"),
    )


def _answer(result: Stragglers, *, on_gpus: bool) -> list[str]:
    verdict = result.verdict
    lines = [printable(one.reason) for one in (result.named or (verdict,))[:_MOST_NAMED]]
    if len(result.named) > _MOST_NAMED:
        lines[-1] += f" {plural(len(result.named) - _MOST_NAMED, 'more verdict')} in the table."
    now, without = verdict.step_time_ns, verdict.step_time_without_ns
    if shown(now) and shown(without):
        lost = duration((verdict.lost_seconds or 0.0) * 1e9)
        lost += f" or {hours(verdict.lost_gpu_hours)} GPU-hours" if on_gpus and verdict.lost_gpu_hours else ""
        lines.append(
            f"A step takes {duration(now)}, and {duration(without)} without the first of these delays, which cost "
            f"{lost} in {plural(verdict.steps, 'step')}."
        )
    if len(result.named) > 1 and shown(result.step_time_without_all_ns):
        lines.append(f"Without all of these delays a step would take {duration(result.step_time_without_all_ns)}.")
    return lines


def _verdicts(result: Stragglers) -> Section:
    columns = (
        Column("verdict", text=True),
        Column("ranks", text=True),
        Column("cause", text=True),
        Column("steps", text=True),
        Column("delay"),
        Column("95 % interval", text=True),
        Column("p-value", text=True),
    )
    cells = tuple(map(_verdict, result.named or (result.verdict,)))
    note = "p-value: chance of standing out so clearly if all ranks were alike, adjusted for their number."
    return Section("Verdicts, the costliest first", table=Table(columns, cells), notes=(note,))


def _verdict(one: Verdict) -> tuple[str, ...]:
    steps = f"{one.affected_steps or 0:,} of {one.steps:,}, {one.first_step}-{one.last_step}"
    return (
        one.kind.replace("_", " "),
        rank_list(one.ranks) or UNKNOWN,
        one.cause or UNKNOWN,
        UNKNOWN if one.first_step is None else steps,
        UNKNOWN if one.delay_ns is None else duration(one.delay_ns),
        interval(one.delay_low_ns, one.delay_high_ns) or UNKNOWN,
        _p_value(one.p_value),
    )


def _ranks(ranks: pl.DataFrame) -> Section:
    if ranks.is_empty():
        return Section("Ranks, the latest first (ms per step)", notes=("Nothing to show: no step can be compared.",))
    key_columns, key_cells = keys(ranks, "module")
    heads = ("rank", "steps", "late", "low", "high", "last", "wait", *_PHASES)
    columns = (*key_columns, *map(Column, heads), Column("p-value"), Column("host", text=True, wraps=True))
    ordered = ranks.sort("module", "delay_ns", descending=[False, True], nulls_last=True)
    cells = tuple((*key_cells(row), *_rank(row)) for row in ordered.iter_rows(named=True))
    left_out = [
        f"Rank {rank} is not compared: {printable(why)}."
        for rank, why in ranks.drop_nulls("left_out").select("rank", "left_out").iter_rows()
    ]
    note = (
        "late: how much later than the others the rank launches its last bucket, low and high the ends of its 95 % "
        "interval; last: share of steps in which it is the last to do so; wait: for the last rank; data to other: how "
        "much longer than in the others that phase takes (negative: shorter)."
    )
    return Section("Ranks, the latest first (ms per step)", table=Table(columns, cells), notes=(note, *left_out))


def _rank(row: Mapping[str, Any]) -> tuple[str, ...]:
    times = ("delay_ns", "delay_low_ns", "delay_high_ns")
    return (
        str(row["rank"]),
        UNKNOWN if row["steps"] is None else f"{row['steps']:,}",
        *(milliseconds(row[name]) for name in times),
        percent(row["last_share"]),
        milliseconds(row["wait_ns"]),
        *(milliseconds(row[f"{phase}_ns"]) for phase in _PHASES),
        _p_value(row["p_value"]),
        printable(row["host"] or UNKNOWN),
    )


def _buckets(buckets: pl.DataFrame) -> Section:
    title = "Launch of each bucket (ms per step)"
    if buckets.is_empty():
        return Section(title, notes=("Nothing to show: no step outside warm-up has buckets.",))
    key_columns, key_cells = keys(buckets, "module", "layout")
    columns = (*key_columns, *map(Column, ("bucket", "rank", "late", "last", "wait", "transfer")))
    cells = tuple(
        (
            *key_cells(row),
            str(row["bucket"]),
            UNKNOWN if row["rank"] is None else str(row["rank"]),
            milliseconds(row["lateness_ns"]),
            percent(row["last_share"]),
            milliseconds(row["wait_ns"]),
            milliseconds(row["transfer_ns"]),
        )
        for row in buckets.iter_rows(named=True)
    )
    note = (
        "rank: the slow one, or else the one that launches the bucket last most often; late: by how much later than "
        "the median; wait and transfer: means over ranks."
    )
    return Section(title, table=Table(columns, cells), notes=(note,))


def _p_value(value: float | None) -> str:
    if value is None or not shown(value):
        return UNKNOWN
    return f"< {_LEAST_P_VALUE:.4f}" if value < _LEAST_P_VALUE else f"{value:.4f}"
