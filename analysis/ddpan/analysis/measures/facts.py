"""Facts: what every other measure starts from, one row per (module, step, rank), computed block by block.

All comparisons stand on two ideas. *Ranks leave a step's last collective together*, so the end of step s-1's last
bucket starts step s on every rank's own clock, and no shared clock is needed. And *the rank with the shortest
collective is the one the others wait for*, so its duration is the transfer time and the rest is waiting.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import polars as pl

from ..run import Problem, Run
from ._buckets import bucket_schema
from ._computation import WARMUP_STEPS, PeerFacts
from ._frame import STEP_FACTS
from ._gaps import Presence
from ._lattice import COLLECTIVE_COLUMNS, STEP_COLUMNS
from ._peers import find_peers

__all__ = ["WARMUP_STEPS", "Facts", "facts"]


@dataclass(frozen=True)
class Facts:
    """The facts of a run.

    ``steps`` has one row per (module, step, rank) with a synchronised micro-batch or a bucket, in this order. Times
    are nanoseconds, null where unknown; moments are since the epoch on the rank's own clock:

    - ``micro_batches``: forwards of the step; ``warmup``: whether the step is warm-up; ``layout``: bucket layout;
      ``buckets``, ``bytes``: buckets the step has and their payload on one rank.
    - ``forward_start_ns``: start of the first forward; ``step_start_ns``: end of the previous step's last bucket;
      ``step_end_ns``: end of this step's last bucket; ``step_time_ns``: from the one to the other.
    - ``arrival_ns``: launch of the last bucket since the start of the step, made up of ``data_ns`` (waiting for the
      DataLoader), ``forward_ns``, ``backward_ns`` (from the end of forward to the last bucket's launch, and of each
      earlier micro-batch to the next forward), ``optimizer_ns`` (the previous step's, within this window; null where
      no optimizer was seen) and ``other_ns`` (the rest). Data and forward are sums over micro-batches.
    - ``backward_compute_ns``: end of forward to the last gradient, in the synchronised micro-batch.
    - ``c10d_forward_ns``, ``c10d_backward_compute_ns``, ``c10d_backward_comm_ns``, ``c10d_overlap_ns``: the windows of
      PyTorch's DDP logger, of the synchronised micro-batch.
    - ``comm_ns``: union of the buckets' spans from launch to end; ``hidden_ns``: the part within backward compute;
      ``exposed_ns``: the rest; ``tail_ns``: from the last gradient to the end of backward.
    - ``lateness_ns``: arrival less its median over ranks; ``first_arrival_ns``, ``first_lateness_ns``: the same for
      the first bucket; ``last``: no rank arrived later. All null unless every rank taking part is known.
    - ``wait_ns``: sum over buckets of the time waited for others; ``transfer_ns``: sum of the transfer times.
    - ``ranks``: ranks taking part in comparisons; ``complete``: whether all of them recorded all buckets' launches
      and ends.

    ``buckets`` has one row per (module, layout, bucket, rank) over the steps that are no warm-up: ``n`` (steps whose
    lateness is known), ``bytes``, ``last_share`` (share of them in which the rank launched the bucket last) and mean
    and median of ``lateness``, ``wait``, ``transfer``, ``duration`` (launch to end), ``exposed`` (its share of the
    exposed communication) and ``queue`` (from ready to launch), such as ``lateness_mean_ns``. Medians are over all
    steps, or in long runs over an even sample of them.

    ``gaps`` has one row per rank: ``collectives`` recorded, ``collectives_missing`` (recorded by another rank of the
    group, matched by their position in its order), ``steps`` recorded, ``steps_incomplete`` (in which it lacks a
    bucket's launch or end).

    Attributes:
        steps: see above.
        buckets: see above.
        gaps: see above.
        problems: those of the run and those met on the way.
        step_count: distinct steps over all modules.
        warmup_steps: those that are warm-up.
        incomplete_steps: those that some rank taking part did not record completely.
        left_out: ranks left out of comparisons, and why.
    """

    steps: pl.DataFrame
    buckets: pl.DataFrame
    gaps: pl.DataFrame
    problems: tuple[Problem, ...]
    step_count: int
    warmup_steps: int
    incomplete_steps: int
    left_out: dict[int, str]


_cache: WeakKeyDictionary[Run, Facts] = WeakKeyDictionary()


def facts(run: Run, *, progress: Callable[[float], None] | None = None) -> Facts:
    """The facts of ``run``, computed once and kept as long as the run is.

    A step is warm-up if its number is below ``run.skip_warmup``; where that is None, if it is one of the first two of
    its module (numbers 0 and 1), or if it has DDP's first bucket layout and the buckets were rebuilt later. A rank
    without any time of its backward pass, or without a single collective, is left out of comparisons.

    Args:
        run: the run.
        progress: called with the share of the log that was read, 0 to 1.
    """
    known = _cache.get(run)
    if known is None:
        known = _cache[run] = _compute(run, progress)
    return known


def _compute(run: Run, progress: Callable[[float], None] | None) -> Facts:
    without: dict[tuple[int, int], str] = {}
    while True:
        reader = run.blocks(steps=STEP_COLUMNS, collectives=COLLECTIVE_COLUMNS, progress=progress)
        computed = [PeerFacts(peers, skip_warmup=run.skip_warmup) for peers in find_peers(run, without)]
        presence = Presence(run.metadata)
        for block in reader:
            presence.add(block.collectives)
            for one in computed:
                one.add(block)
            del block  # before the next is read
        silent = _silent(computed)
        if not silent:
            return _assemble(run, computed, presence, reader.problems)
        without |= silent


def _silent(computed: Sequence[PeerFacts]) -> dict[tuple[int, int], str]:
    """Ranks that take part but recorded no collective, where others have: they would spoil every comparison."""
    return {
        (one.peers.module, rank): "it has no collective with launch and end"
        for one in computed
        if one.recorded.any()
        for rank, recorded in zip(one.peers.ranks, one.recorded, strict=True)
        if not recorded and rank not in one.peers.left_out
    }


def _assemble(run: Run, computed: Sequence[PeerFacts], presence: Presence, damaged: Sequence[Problem]) -> Facts:
    steps = pl.concat([pl.DataFrame(schema=STEP_FACTS), *(f for one in computed for f in one.frames)], rechunk=False)
    if len(computed) > 1:
        steps = steps.sort("module", "step", "rank")
    buckets = pl.concat(
        [pl.DataFrame(schema=bucket_schema()), *(frame for one in computed for frame in one.bucket_frames())]
    )
    distinct = steps.lazy().group_by("module", "step").agg(pl.col("warmup").any(), pl.col("complete").all()).collect()
    left_out = {rank: why for one in computed for rank, why in one.peers.left_out.items()}
    gaps = _gaps(run, computed, presence, steps)
    return Facts(
        steps=steps,
        buckets=buckets.sort("module", "layout", "bucket", "rank"),
        gaps=gaps,
        problems=(*run.problems, *damaged, *_problems(run, computed, presence, gaps, left_out)),
        step_count=distinct.height,
        warmup_steps=int(distinct["warmup"].sum()),
        incomplete_steps=int((~distinct["complete"]).sum()),
        left_out=left_out,
    )


def _gaps(run: Run, computed: Sequence[PeerFacts], presence: Presence, steps: pl.DataFrame) -> pl.DataFrame:
    recorded = dict(steps.group_by("rank").len().iter_rows())
    incomplete = dict.fromkeys(run.ranks, 0)
    for one in computed:
        for rank, count in zip(one.peers.ranks, one.incomplete.tolist(), strict=True):
            incomplete[rank] += count
    return pl.DataFrame(
        {
            "rank": run.ranks,
            "collectives": [presence.recorded(rank) for rank in run.ranks],
            "collectives_missing": [presence.missing(rank) for rank in run.ranks],
            "steps": [recorded.get(rank, 0) for rank in run.ranks],
            "steps_incomplete": list(incomplete.values()),
        },
        schema={
            "rank": pl.UInt32,
            "collectives": pl.UInt64,
            "collectives_missing": pl.UInt64,
            "steps": pl.UInt64,
            "steps_incomplete": pl.UInt64,
        },
    )


def _is_whole(run: Run) -> bool:
    """Whether every collective was meant to be recorded, kept and read."""
    settings = [one["settings"] for one in run.metadata.values()]
    chosen = run.step_range is not None or any(one.get("steps") not in (None, "0:") for one in settings)
    return not chosen and not any(one.get("limit") for one in settings)


def _problems(
    run: Run, computed: Sequence[PeerFacts], presence: Presence, gaps: pl.DataFrame, left_out: dict[int, str]
) -> list[Problem]:
    found = [
        Problem("rank_left_out", f"rank {rank} is left out of comparisons: {why}", (rank,))
        for rank, why in sorted(left_out.items())
    ]
    for rank, recorded, missing in gaps.select("rank", "collectives", "collectives_missing").iter_rows():
        if missing:
            message = f"rank {rank} lacks {missing:,} of {recorded + missing:,} collectives of its groups"
            found.append(Problem("seq_gap", f"{message}; steps without them are left out of comparisons", (rank,)))
    for rank, step in sorted({pair for one in computed for pair in one.peers.joined.items()}):
        message = f"rank {rank} ran out of inputs after step {step:,} and joined: its numbers end there"
        found.append(Problem("joined", message, (rank,)))
    if _is_whole(run) and (lost := presence.lost_everywhere()):
        found.append(Problem("seq_gap", f"no rank's log has {lost:,} of the collectives"))
    if disputed := sum(one.disputed for one in computed):
        message = f"ranks disagree about which bucket a collective is; rows left out for that: {disputed:,}"
        found.append(Problem("seq_mismatch", message))
    return found
