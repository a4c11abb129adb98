"""The results as plain records for scripts: dictionaries of numbers, words and nulls. docs/json.md lists every key."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import polars as pl

    from ddpan.analysis.measures.summary import Summary
    from ddpan.analysis.measures.verdict import Verdict

__all__ = ["SCHEMA_VERSION", "Record", "rows", "run_record", "tables", "verdict_record"]

SCHEMA_VERSION: Final = 1
"""Version of the JSON report. It changes when a key is removed or changes its meaning, not when one is added."""

Record = dict[str, Any]


def run_record(summary: Summary) -> Record:
    """The run: what ran where, and what of it was read."""
    run = summary.run
    return {
        "id": run.id,
        "path": str(run.path),
        "start_ns": run.start_ns,
        "job_id": run.job_id,
        "restart": run.restart,
        "world_size": run.world_size,
        "backend": run.backend,
        "devices": list(summary.devices),
        "ranks": list(summary.ranks),
        "missing_ranks": list(summary.missing_ranks),
        "hosts": {host: list(ranks) for host, ranks in summary.hosts.items()},
        "versions": {name: list(found) for name, found in summary.versions.items()},
        "warmup_rule": summary.warmup_rule,
    }


def verdict_record(verdict: Verdict) -> Record:
    """A verdict, field by field."""
    return _plain(asdict(verdict))


def tables(summary: Summary) -> dict[str, list[Record]]:
    """Every table of the results by its name, a record for each row."""
    frames = {
        "modules": summary.modules,
        "step_split": summary.step_split,
        "statistics": summary.statistics.overall,
        "statistics_by_rank": summary.statistics.per_rank,
        "statistics_of_warmup": summary.statistics.warmup,
        "overlap": summary.overlap.overall,
        "overlap_by_rank": summary.overlap.per_rank,
        "overlap_by_bucket": summary.overlap.buckets,
        "ranks": summary.stragglers.ranks,
        "buckets": summary.stragglers.buckets,
        "changes": summary.changes.changes,
        "gaps": summary.gaps,
    }
    problems = [asdict(problem) for problem in summary.problems]
    return {**{name: rows(frame) for name, frame in frames.items()}, "problems": [_plain(one) for one in problems]}


def rows(frame: pl.DataFrame) -> list[Record]:
    """A record for each row of ``frame``."""
    return [_plain(row) for row in frame.iter_rows(named=True)]


def _plain(record: Mapping[str, Any]) -> Record:
    return {name: _value(value) for name, value in record.items()}


def _value(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return _listed(value) if isinstance(value, tuple | list) else value


def _listed(values: Iterable[Any]) -> list[Any]:
    return [_value(value) for value in values]
