"""What a report for people contains below the answer, and in which order."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ._changes import changes_section
from ._lateness import buckets_section, ranks_section
from ._overview import quality_section, run_section
from ._timing import overlap_section, split_section, statistics_section

if TYPE_CHECKING:
    from ddpan.analysis.measures.summary import Summary

    from ._sections import Section

__all__ = ["sections"]


def sections(summary: Summary) -> tuple[Section, ...]:
    """All sections; one whose table has no rows says so instead."""
    found = (
        run_section(summary),
        split_section(summary),
        changes_section(summary),
        statistics_section(summary),
        overlap_section(summary),
        ranks_section(summary),
        buckets_section(summary),
        quality_section(summary),
    )
    return tuple(_without_table(one) if one.table is not None and not one.table.rows else one for one in found)


def _without_table(section: Section) -> Section:
    return replace(section, table=None, notes=("Nothing to show: no step outside warm-up was recorded for it.",))
