"""Which ranks may be compared with which: those that share a module's process group, while they take part."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import polars as pl

from ..run import Run

__all__ = ["Peers", "find_peers"]

_NEVER: Final = (1, 0)
_ALWAYS: Final = (0, 1 << 32)


@dataclass(frozen=True)
class Peers:
    """The ranks of one module that reduce gradients with one another.

    Attributes:
        module: number of the module.
        ranks: global ranks of the group whose log is read, ascending.
        first: step from which each rank takes part in comparisons, shape (ranks,).
        last: last step in which it does; below ``first`` for a rank that is left out.
        left_out: why, by rank.
        joined: by rank, its last step before it ran out of inputs under ``join()`` and only followed the others.
        bucket_counts: number of buckets by layout, as far as the metadata tells.
    """

    module: int
    ranks: tuple[int, ...]
    first: npt.NDArray[np.int64]
    last: npt.NDArray[np.int64]
    left_out: Mapping[int, str]
    joined: Mapping[int, int]
    bucket_counts: Mapping[int, int]

    def expected(self, steps: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Which ranks take part in which steps, shape (steps, ranks)."""
        return np.asarray((self.first <= steps[:, None]) & (steps[:, None] <= self.last))


def find_peers(run: Run, without: Mapping[tuple[int, int], str]) -> list[Peers]:
    """The peers of every module of ``run``.

    Args:
        run: the run.
        without: ranks to leave out, as (module, rank), and why.
    """
    survey = _survey(run)
    groups: defaultdict[tuple[int, tuple[int, ...]], list[int]] = defaultdict(list)
    for module, rank in sorted(_modules(run, survey)):
        groups[module, _group(run, rank, module)].append(rank)
    return [_peers(run, module, ranks, survey, without) for (module, _), ranks in groups.items()]


@dataclass
class _Seen:
    """What the table of steps holds of a rank's module."""

    first: int
    last: int
    backward: int


def _survey(run: Run) -> dict[tuple[int, int], _Seen]:
    """First and last synchronised step of each (module, rank), and how many have the times of their backward."""
    seen: dict[tuple[int, int], _Seen] = {}
    times = pl.col("compute_end_ns").is_not_null() & pl.col("backward_end_ns").is_not_null()
    columns = ["rank", "module", "step", "synced", "compute_end_ns", "backward_end_ns"]
    for frame in run.segments("steps", columns):
        synced = frame.lazy().filter("synced").group_by("module", "rank")
        rows = synced.agg(first=pl.col("step").min(), last=pl.col("step").max(), backward=times.sum()).collect()
        for module, rank, first, last, backward in rows.iter_rows():
            one = seen.setdefault((module, rank), _Seen(first, last, 0))
            one.first, one.last = min(one.first, first), max(one.last, last)
            one.backward += backward
    return seen


def _modules(run: Run, survey: Mapping[tuple[int, int], _Seen]) -> set[tuple[int, int]]:
    named = {(int(module), rank) for rank, metadata in run.metadata.items() for module in metadata["modules"]}
    return named | set(survey)


def _joined_after(run: Run, rank: int, module: int) -> int | None:
    info: Mapping[str, Any] = run.metadata[rank]["modules"].get(str(module), {})
    return info.get("joined_after_step")


def _group(run: Run, rank: int, module: int) -> tuple[int, ...]:
    metadata = run.metadata[rank]
    info: Mapping[str, Any] = metadata["modules"].get(str(module), {})
    group = metadata["groups"].get(str(info.get("group")))
    return tuple(group["ranks"]) if group else ()


def _peers(
    run: Run,
    module: int,
    ranks: list[int],
    survey: Mapping[tuple[int, int], _Seen],
    without: Mapping[tuple[int, int], str],
) -> Peers:
    left_out = {rank: without[module, rank] for rank in ranks if (module, rank) in without}
    seen = {rank: survey[module, rank] for rank in ranks if (module, rank) in survey}
    joined = {rank: step for rank in ranks if (step := _joined_after(run, rank, module)) is not None}
    has_backward = any(one.backward for one in seen.values())
    spans = []
    for rank in ranks:
        if seen and rank not in seen and rank not in left_out:
            left_out[rank] = "it recorded no synchronised step"
        elif rank in seen and has_backward and not seen[rank].backward:
            left_out[rank] = "it has no times of the backward pass"
        spans.append(_NEVER if rank in left_out else (seen[rank].first, seen[rank].last) if seen else _ALWAYS)
    first, last = np.array(spans, np.int64).T
    last = np.minimum(last, [joined.get(rank, _ALWAYS[1]) for rank in ranks])
    return Peers(module, tuple(ranks), first, last, left_out, joined, _bucket_counts(run, module, ranks))


def _bucket_counts(run: Run, module: int, ranks: list[int]) -> dict[int, int]:
    counts: dict[int, int] = {}
    for rank in ranks:
        for layout, buckets in run.metadata[rank]["layouts"].get(str(module), {}).items():
            counts.setdefault(int(layout), len(buckets))
    return counts
