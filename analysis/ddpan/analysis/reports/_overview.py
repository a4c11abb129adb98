"""Sections about the run itself and about its log, and the list of runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from ._sections import Column, Section, Table, printable
from ._units import UNKNOWN, listed, moment, plural, rank_list, size

if TYPE_CHECKING:
    from ddpan.analysis.measures.summary import Summary
    from ddpan.analysis.run import Problem, RunInfo

__all__ = ["quality_section", "run_section", "run_table"]

_MOST_HOSTS: Final = 8
_MOST_PROBLEMS: Final = 10

_RUN_COLUMNS: Final = (
    Column("run", text=True),
    Column("started", text=True, wraps=True),
    Column("job", text=True, wraps=True),
    Column("restart"),
    Column("ranks"),
    Column("steps"),
    Column("backend", text=True),
)


def run_table(runs: Sequence[RunInfo]) -> Table:
    """One row per run."""
    rows = (
        (
            printable(run.id),
            moment(run.start_ns),
            printable(run.job_id) if run.job_id else UNKNOWN,
            str(run.restart),
            f"{len(run.ranks)} of {run.world_size}",
            f"{run.steps:,}",
            printable(run.backend),
        )
        for run in runs
    )
    return Table(_RUN_COLUMNS, tuple(rows))


def run_section(summary: Summary) -> Section:
    """What ran where."""
    run = summary.run
    facts = [
        ("run", f"{printable(run.id)}, started {moment(run.start_ns)}"),
        ("log", printable(str(run.path))),
        ("ranks", _ranks(summary)),
        ("hosts", _hosts(summary.hosts)),
        ("backend", f"{printable(run.backend)} on {printable(', '.join(summary.devices)) or UNKNOWN}"),
        *((_named("module", row), _module(row)) for row in summary.modules.iter_rows(named=True)),
        ("versions", _versions(summary.versions)),
    ]
    if run.job_id:
        restarts = f", restarted {plural(run.restart, 'time')} before" if run.restart else ""
        facts.insert(1, ("job", printable(run.job_id) + restarts))
    return Section("Run", facts=tuple(facts))


def quality_section(summary: Summary) -> Section:
    """What is missing from the log, and what was left out on purpose."""
    gaps = summary.gaps
    missing = gaps.filter(gaps["collectives_missing"] > 0)
    total = int(gaps["collectives"].sum()) + int(gaps["collectives_missing"].sum())
    facts = [(_named("steps", row), _steps(row)) for row in summary.modules.iter_rows(named=True)]
    facts += [
        ("warm-up", printable(summary.warmup_rule)),
        ("missing ranks", rank_list(summary.missing_ranks) or "none"),
        ("missing collectives", _missing(int(missing["collectives_missing"].sum()), total, missing["rank"].to_list())),
    ]
    return Section("Data quality", facts=tuple(facts), notes=_problems(summary.problems))


def _ranks(summary: Summary) -> str:
    found = f"{len(summary.ranks)} of {summary.run.world_size}"
    unread = set(summary.run.ranks) - set(summary.ranks)
    if unread:
        found += f", {plural(len(unread), 'rank')} left out as asked"
    return found


def _hosts(hosts: Mapping[str, Sequence[int]]) -> str:
    names = [f"{printable(host)} (ranks {rank_list(ranks)})" for host, ranks in hosts.items()]
    return (f"{len(names)}: " if len(names) > 1 else "") + listed(names, most=_MOST_HOSTS)


def _versions(versions: Mapping[str, Sequence[str]]) -> str:
    each = (f"{name} {' and '.join(found)}" for name, found in versions.items())
    return printable(", ".join(each)) or UNKNOWN


def _named(what: str, row: Mapping[str, Any]) -> str:
    """A heading for a module's facts; a run nearly always has one module only, number 0."""
    return what if row["module"] == 0 else f"{what} {row['module']}"


def _module(row: Mapping[str, Any]) -> str:
    parts = [printable(row["name"]) if row["name"] else "unknown"]
    if row["parameters"] is not None:
        parts.append(f"{plural(row['parameters'], 'parameter tensor')} of {size(row['parameter_bytes'])}")
    if row["buckets"] is not None:
        parts.append(f"{plural(row['buckets'], 'gradient bucket')} of {size(row['bytes'])} in all per step")
    if (row["micro_batches"] or 1) > 1:
        parts.append(f"gradients accumulated over {row['micro_batches']} forwards")
    return ", ".join(parts)


def _steps(row: Mapping[str, Any]) -> str:
    recorded, warmup, incomplete = (row[name] or 0 for name in ("steps", "warmup_steps", "incomplete_steps"))
    text = f"{plural(recorded, 'step')} recorded, {warmup:,} of them warm-up and left out"
    if row["first_step"] is not None:
        text += f"; steps {row['first_step']} to {row['last_step']} are used"
    return text + (f"; {incomplete:,} incomplete on some rank" if incomplete else "")


def _missing(missing: int, total: int, ranks: Sequence[int]) -> str:
    return f"{missing:,} of {total:,}, on {plural(len(ranks), 'rank')}: {rank_list(ranks)}" if missing else "none"


def _problems(problems: Sequence[Problem]) -> tuple[str, ...]:
    """The problems, of each kind no more than a page holds."""
    if not problems:
        return ("Nothing is damaged, nothing was dropped.",)
    shown: list[str] = []
    seen: Counter[str] = Counter()
    for problem in problems:
        seen[problem.kind] += 1
        if seen[problem.kind] <= _MOST_PROBLEMS:
            shown.append("- " + _sentence(printable(problem.message)))
    more = sum(count - _MOST_PROBLEMS for count in seen.values() if count > _MOST_PROBLEMS)
    return (*shown, *([f"- and {more:,} more like these; --format json lists all."] if more else []))


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + ("" if text.endswith(".") else ".")
