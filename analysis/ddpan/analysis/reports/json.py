"""The report as one JSON object, for scripts; docs/json.md documents every key."""

from __future__ import annotations

import json
from importlib import import_module
from typing import TYPE_CHECKING

from ._answer import answer
from ._records import SCHEMA_VERSION, Record, run_record, tables, verdict_record

if TYPE_CHECKING:
    from ddpan.analysis.measures.summary import Summary

    from .document import Document

__all__ = ["render", "render_document"]


def render(summary: Summary) -> str:
    """The report as JSON: null where a value is not known, never NaN or Infinity."""
    report = {
        "answer": list(answer(summary)),
        "verdict": verdict_record(summary.stragglers.verdict),
        "named": [verdict_record(verdict) for verdict in summary.stragglers.named],
        "run": run_record(summary),
        "overlap_reason": summary.overlap.reason,
        "changes_reason": summary.changes.reason,
        **tables(summary),
    }
    return _dumped(report)


def render_document(document: Document) -> str:
    """A report on one measure as JSON."""
    return _dumped({"answer": list(document.answer), **document.facts, **document.tables})


def _dumped(report: Record) -> str:
    # Loaded on use: it takes as long as all other imports of the reports together, for text and CSV in vain.
    metadata = import_module("importlib.metadata")
    head = {"schema_version": SCHEMA_VERSION, "ddpan_version": metadata.version("ddpan")}
    return json.dumps(head | report, indent=2, allow_nan=False) + "\n"
