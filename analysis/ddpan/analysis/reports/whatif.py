"""The report of ``ddpan whatif``: what steps would take had ranks not been late, or communication been hidden."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from ._records import rows
from ._sections import Column, Section, Table, keys
from ._units import UNKNOWN, duration, hours, milliseconds, percent, plural, rank_list, shown
from .document import Document

if TYPE_CHECKING:
    import polars as pl

    from ddpan.analysis.measures.whatif import WhatIf
    from ddpan.analysis.run import Run

__all__ = ["whatif_document"]

_MOST_RANKS: Final = 8
_WORTH_WHILE: Final = 0.01
_SCENARIOS: Final = {
    "recorded": "as recorded",
    "no_rank_late": "no rank later than the median",
    "communication_hidden": "all gradient communication hidden",
}
_COSTS: Final = ("ms per step", "slowdown", "saved", "seconds")


def whatif_document(run: Run, result: WhatIf) -> Document:
    """The report on what the steps of ``run`` would have taken."""
    on_gpus = any(metadata["device"].startswith("cuda") for metadata in run.metadata.values())
    return Document(
        answer=_answer(result, on_gpus=on_gpus),
        fine=result.reason is None,
        sections=(_scenarios(result, on_gpus=on_gpus), _ranks(result, on_gpus=on_gpus), _top(result, on_gpus=on_gpus)),
        facts={"run": run.id, "path": str(run.path), "reason": result.reason},
        tables={"scenarios": rows(result.scenarios), "ranks": rows(result.ranks), "top": rows(result.top)},
        keys=("module", "lowest_rank", "scenario", "rank", "fixed"),
    )


def _answer(result: WhatIf, *, on_gpus: bool) -> list[str]:
    if result.scenarios.is_empty():
        return [f"Cannot tell: {result.reason}."]
    ideal = result.scenarios.filter(scenario="no_rank_late").sort("saved_seconds", descending=True).row(0, named=True)
    here = {"module": ideal["module"], "lowest_rank": ideal["lowest_rank"]}
    by_name = {row["scenario"]: row for row in result.scenarios.filter(**here).iter_rows(named=True)}
    lines = [_ideal(by_name["recorded"], ideal, on_gpus=on_gpus)]
    first = result.ranks.filter(**here).row(0, named=True)
    if ideal["waste"] >= _WORTH_WHILE and first["explained"] is not None:
        lines.append(
            f"Rank {first['rank']} alone accounts for {percent(first['explained'])} of that: with it at the median, a "
            f"step would take {duration(first['step_time_ns'])}."
        )
    hidden = by_name["communication_hidden"]
    if shown(hidden["waste"]):
        lines.append(
            f"If all gradient communication were hidden behind computation, a step would take "
            f"{duration(hidden['step_time_ns'])}, {percent(hidden['waste'])} less."
        )
    return lines + ([f"Caution: {result.reason}."] if result.reason else [])


def _ideal(recorded: Mapping[str, Any], ideal: Mapping[str, Any], *, on_gpus: bool) -> str:
    now, then = duration(recorded["step_time_ns"]), duration(ideal["step_time_ns"])
    if ideal["waste"] < _WORTH_WHILE:
        return f"There is little to gain between the ranks: a step takes {now}, and {then} if no rank is ever late."
    saved = duration(ideal["saved_seconds"] * 1e9)
    if on_gpus:
        saved += f" or {hours(ideal['saved_gpu_hours'])} GPU-hours"
    return (
        f"If no rank were later than the median, a step would take {then} instead of {now}: "
        f"{percent(ideal['waste'])} of the time, {saved} in the {plural(recorded['steps'], 'step')} compared."
    )


def _scenarios(result: WhatIf, *, on_gpus: bool) -> Section:
    key_columns, key_cells = keys(result.scenarios, "module", "lowest_rank")
    columns = (*key_columns, Column("case", text=True), Column("steps"), *_cost_columns(on_gpus=on_gpus))
    cells = (
        (*key_cells(row), _SCENARIOS[row["scenario"]], f"{row['steps']:,}", *_cost(row, on_gpus=on_gpus))
        for row in result.scenarios.iter_rows(named=True)
    )
    note = (
        "slowdown: recorded step time divided by that of this case; saved: share of the recorded time. Noise makes "
        "some rank the last in every step, so a healthy run, too, is slower than with every rank at the median."
    )
    return _section("What a step would take", result.scenarios, Table(columns, tuple(cells)), note)


def _ranks(result: WhatIf, *, on_gpus: bool) -> Section:
    table = result.ranks
    key_columns, key_cells = keys(table, "module", "lowest_rank")
    costs = _cost_columns(on_gpus=on_gpus)
    cells = [
        (*key_cells(row), str(row["rank"]), *_cost(row, on_gpus=on_gpus), percent(row["explained"]))
        for of_group in table.partition_by("module", "lowest_rank", maintain_order=True)
        for row in of_group.head(_MOST_RANKS).iter_rows(named=True)
    ]
    note = "One rank alone arrives with the median; explained: share of what the case with no rank late saves."
    if hidden := table.height - len(cells):
        note = f"{plural(hidden, 'more rank')}; --format csv or json has all of them. {note}"
    columns = (*key_columns, Column("rank"), *costs, Column("explained"))
    return _section("One rank put right", table, Table(columns, tuple(cells)), note)


def _top(result: WhatIf, *, on_gpus: bool) -> Section:
    key_columns, key_cells = keys(result.top, "module", "lowest_rank")
    costs = _cost_columns(on_gpus=on_gpus)
    columns = (*key_columns, Column("ranks", text=True, wraps=True), *costs, Column("explained"))
    cells = (
        (*key_cells(row), rank_list(row["ranks"]), *_cost(row, on_gpus=on_gpus), percent(row["explained"]))
        for row in result.top.iter_rows(named=True)
    )
    note = "Each further rank is the one that saves most once those before it are put right."
    return _section("Several ranks put right together", result.top, Table(columns, tuple(cells)), note)


def _section(title: str, frame: pl.DataFrame, table: Table, note: str) -> Section:
    if frame.is_empty():
        return Section(title, notes=("Nothing to show: no rank could be put right.",))
    return Section(title, table=table, notes=(note,))


def _cost_columns(*, on_gpus: bool) -> tuple[Column, ...]:
    return tuple(map(Column, (*_COSTS, "GPU-hours") if on_gpus else _COSTS))


def _cost(row: Mapping[str, Any], *, on_gpus: bool) -> tuple[str, ...]:
    slowdown, seconds, gpu_hours = (row[name] for name in ("slowdown", "saved_seconds", "saved_gpu_hours"))
    cells = (
        milliseconds(row["step_time_ns"]),
        f"{slowdown:.3f}" if shown(slowdown) else UNKNOWN,
        percent(row["waste"]),
        f"{seconds:,.1f}" if shown(seconds) else UNKNOWN,
    )
    return (*cells, hours(gpu_hours) if shown(gpu_hours) else UNKNOWN) if on_gpus else cells
