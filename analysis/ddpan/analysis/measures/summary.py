"""Summary: everything that the reports show of a run, computed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import polars as pl

from ..run import Problem, Run, RunInfo
from ._own_time import own_time
from .changes import ChangePoints, change_points
from .facts import WARMUP_STEPS, Facts, facts
from .overlap import Overlap, overlap
from .statistics import Statistics, statistics
from .stragglers import Stragglers, stragglers

__all__ = ["PARTS", "Summary", "summarize"]

PARTS: Final = (
    "data",
    "forward",
    "before_first_bucket",
    "backward",
    "optimizer",
    "other",
    "wait",
    "transfer",
)
"""Parts of a step's time in ``Summary.step_split``; they add up to it."""


@dataclass(frozen=True)
class Summary:
    """The results for one run.

    ``modules`` has one row per DDP module: ``module``, ``name``, ``parameters``, ``parameter_bytes``; ``steps``
    recorded, of these ``warmup_steps``, and ``incomplete_steps`` that some rank did not record completely;
    ``first_step`` and ``last_step`` outside warm-up; ``micro_batches``, the most forwards of a step; ``layouts`` seen;
    ``buckets`` and ``bytes`` of a step under the last of them; ``step_time_mean_ns`` and ``step_time_median_ns``.

    ``step_split`` has one row per module and part of a step (`PARTS`): ``mean_ns`` over ranks and steps outside warm-up
    of which all is known, and ``share`` of the step time. Backward ends when a rank launches its last bucket; from then
    it waits for the last rank (``wait``) and for the transfer. Time in collectives that are no buckets, such as the
    broadcast of buffers, is wait or transfer too, not forward. ``before_first_bucket`` is what lies between the end of
    forward and the launch of the first bucket: the loss, code before ``backward()``, the layers of that bucket.

    Attributes:
        run: the run in short.
        ranks: global ranks that were read.
        missing_ranks: ranks of the run without a log.
        hosts: ranks by host, as far as read.
        versions: by name, the versions that the ranks report; more than one means that they differ.
        devices: devices that the ranks report.
        modules: see above.
        step_split: see above.
        gaps: what is missing of each rank's log, as in `Facts`.
        warmup_rule: which steps are left out as warm-up, in words.
        problems: what is wrong with the log.
        statistics: windows of PyTorch's DDP logger.
        overlap: communication and computation.
        stragglers: ranks against each other, and the verdict.
        changes: the steps at which the step time, or the lateness of a rank, goes to another level.
    """

    run: RunInfo
    ranks: tuple[int, ...]
    missing_ranks: tuple[int, ...]
    hosts: Mapping[str, tuple[int, ...]]
    versions: Mapping[str, tuple[str, ...]]
    devices: tuple[str, ...]
    modules: pl.DataFrame
    step_split: pl.DataFrame
    gaps: pl.DataFrame
    warmup_rule: str
    problems: tuple[Problem, ...]
    statistics: Statistics
    overlap: Overlap
    stragglers: Stragglers
    changes: ChangePoints


def summarize(run: Run, *, progress: Callable[[float], None] | None = None) -> Summary:
    """Compute everything that the reports show of ``run``.

    Args:
        run: the run.
        progress: called with the share of the log that was read, 0 to 1.
    """
    known = facts(run, progress=progress)
    hosts: defaultdict[str, list[int]] = defaultdict(list)
    versions: defaultdict[str, set[str]] = defaultdict(set)
    for rank, metadata in run.metadata.items():
        hosts[metadata["host"]].append(rank)
        for name, version in metadata["versions"].items():
            versions[name].add(version)
    return Summary(
        run=run.info,
        ranks=run.ranks,
        missing_ranks=tuple(rank for rank in range(run.world_size) if rank not in run.info.ranks),
        hosts={host: tuple(sorted(ranks)) for host, ranks in sorted(hosts.items())},
        versions={name: tuple(sorted(found)) for name, found in sorted(versions.items())},
        devices=tuple(sorted({metadata["device"] for metadata in run.metadata.values()})),
        modules=_modules(run, known),
        step_split=_step_split(own_time(run)),
        gaps=known.gaps,
        warmup_rule=_warmup_rule(run.skip_warmup),
        problems=known.problems,
        statistics=statistics(run),
        overlap=overlap(run),
        stragglers=stragglers(run),
        changes=change_points(run),
    )


def _modules(run: Run, known: Facts) -> pl.DataFrame:
    measured = ~pl.col("warmup")
    one_per_step = (
        known.steps.lazy()
        .group_by("module", "step")
        .agg(
            pl.col("warmup").any(),
            pl.col("complete").all(),
            pl.col("step_time_ns").mean(),
            *(pl.col(name).max() for name in ("micro_batches", "layout", "buckets", "bytes")),
        )
    )
    last_layout = pl.col("layout") == pl.col("layout").max()
    counts = one_per_step.group_by("module").agg(
        pl.len().alias("steps"),
        pl.col("warmup").sum().alias("warmup_steps"),
        (~pl.col("complete")).sum().alias("incomplete_steps"),
        pl.col("step").filter(measured).min().alias("first_step"),
        pl.col("step").filter(measured).max().alias("last_step"),
        pl.col("micro_batches").max(),
        pl.col("layout").n_unique().alias("layouts"),
        pl.col("buckets").filter(last_layout).max(),
        pl.col("bytes").filter(last_layout).max(),
        pl.col("step_time_ns").filter(measured).mean().alias("step_time_mean_ns"),
        pl.col("step_time_ns").filter(measured).median().alias("step_time_median_ns"),
    )
    return _named_modules(run).join(counts.collect(), on="module", how="full", coalesce=True).sort("module")


def _named_modules(run: Run) -> pl.DataFrame:
    infos: dict[int, Mapping[str, Any]] = {}
    for metadata in run.metadata.values():
        for number, info in metadata["modules"].items():
            infos.setdefault(int(number), info)
    columns = {"name": pl.String, "parameters": pl.UInt64, "parameter_bytes": pl.UInt64}
    rows = [{"module": number, **{name: info[name] for name in columns}} for number, info in infos.items()]
    return pl.DataFrame(rows, schema={"module": pl.UInt16, **columns})


def _step_split(steps: pl.DataFrame) -> pl.DataFrame:
    """Means of the parts of a step; rows without a known step time or phase are left out, so that they add up."""
    latest = pl.col("arrival_ns").max().over("module", "step")
    before_first = (pl.col("c10d_backward_compute_ns") - pl.col("c10d_overlap_ns")).fill_null(0)
    known = pl.all_horizontal(
        pl.col(name).is_not_null() for name in ("step_time_ns", "data_ns", "forward_ns", "backward_ns", "other_ns")
    )
    parts = steps.lazy().filter(~pl.col("warmup")).with_columns(wait=latest - pl.col("arrival_ns")).filter(known)
    means = parts.group_by("module").agg(
        data=pl.col("data_ns").mean(),
        forward=pl.col("forward_ns").mean(),
        before_first_bucket=before_first.mean(),
        backward=(pl.col("backward_ns") - before_first).mean(),
        optimizer=pl.col("optimizer_ns").fill_null(0).mean(),
        other=pl.col("other_ns").mean(),
        wait=pl.col("wait").mean(),
        transfer=(pl.col("step_time_ns") - pl.col("arrival_ns") - pl.col("wait")).mean(),
        step_time=pl.col("step_time_ns").mean(),
    )
    split = means.unpivot(on=PARTS, index=["module", "step_time"], variable_name="part", value_name="mean_ns")
    share = (pl.col("mean_ns") / pl.col("step_time")).alias("share")
    order = pl.col("part").cast(pl.Enum(PARTS))
    return split.select("module", "part", "mean_ns", share).sort("module", order).collect()


def _warmup_rule(skip_warmup: int | None) -> str:
    if skip_warmup is None:
        return (
            f"the first {WARMUP_STEPS} steps of each module, and every step before DDP rebuilt its buckets, "
            "are left out as warm-up"
        )
    return f"the first {skip_warmup} steps of each module are left out as warm-up, as asked"
