"""What is wrong with a log, in words for its reader."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ddpan.collector.schema import Metadata

__all__ = ["Problem", "losses", "rank_list"]


@dataclass(frozen=True)
class Problem:
    """A fault of the log that does not prevent an answer, but that its reader must know.

    Attributes:
        kind: a fixed word, such as ``missing_rank`` or ``truncated_part``.
        message: one line: what was found, where, and what to do if anything can be done.
        ranks: global ranks concerned; empty where it concerns all or none.
    """

    kind: str
    message: str
    ranks: tuple[int, ...] = ()


def rank_list(ranks: Iterable[int]) -> str:
    """Ranks in words, runs of them abridged: ``rank 3``, ``ranks 0-3, 7``."""
    ordered = sorted(set(ranks))
    spans: list[list[int]] = []
    for rank in ordered:
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    text = ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in spans)
    return ("rank " if len(ordered) == 1 else "ranks ") + text


def losses(metadata: Mapping[int, Metadata], removed: Mapping[int, int]) -> list[Problem]:
    """What the recorders themselves say they lost; the same loss of several ranks makes one problem.

    Args:
        metadata: metadata by rank.
        removed: by rank, parts that the recorder removed again to keep the log within its limit.
    """
    found = []
    if ranks := [r for r, parts in removed.items() if parts]:
        parts = max(removed.values())
        message = f"removed up to {parts:,} parts to keep the log within its limit: parts of the run are not known"
        found.append(_of("removed_parts", ranks, message))
    dropped: Counter[str] = Counter()
    for one in metadata.values():
        dropped.update({reason: n for reason, n in one["counters"]["dropped"].items() if n})
    if dropped:
        ranks = [r for r, one in metadata.items() if any(one["counters"]["dropped"].values())]
        reasons = ", ".join(f"{n:,} ({reason.replace('_', ' ')})" for reason, n in sorted(dropped.items()))
        found.append(_of("dropped_events", ranks, f"could not keep all events; lost: {reasons}"))
    if ranks := [r for r, one in metadata.items() if one["counters"]["errors"]]:
        errors = sum(one["counters"]["errors"] for one in metadata.values())
        found.append(
            _of("recorder_errors", ranks, f"met errors in the recorder, {errors:,} in all: rows may be missing")
        )
    if ranks := [r for r, one in metadata.items() if one["counters"]["spool_repairs"]]:
        message = "had files damaged or removed while recording; the spool was written anew from memory"
        found.append(_of("spool_repairs", ranks, message))
    if ranks := [r for r, one in metadata.items() if not one["closed"]]:
        found.append(_of("not_closed", ranks, "did not close the log: killed or still running; read to the last event"))
    return found


def _of(kind: str, ranks: Iterable[int], message: str) -> Problem:
    ordered = tuple(sorted(ranks))
    return Problem(kind, f"{rank_list(ordered)} {message}", ordered)
