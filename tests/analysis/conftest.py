"""Logs and runs for the tests of the analysis."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from ddpan.analysis.run import Run, load
from ddpan.analysis.testing import Scenario, SyntheticRun, simulate, write_log

OpenRun = Callable[..., Run]


@pytest.fixture
def open_run(tmp_path: Path) -> OpenRun:
    """Write a scenario, or a run made from one, as a log, and load it; keyword arguments go to `load`."""

    def opened(
        source: Scenario | SyntheticRun, *, steps_per_part: int = 1000, spool: bool = False, **options: Any
    ) -> Run:
        run = simulate(source) if isinstance(source, Scenario) else source
        folder = write_log(run, tmp_path / "logs", steps_per_part=steps_per_part, spool=spool)
        return load(folder, **options)

    return opened


@pytest.fixture
def small() -> SyntheticRun:
    """Three ranks, twelve steps of four buckets, the first of one bucket."""
    return simulate(Scenario(ranks=3, steps=12, buckets=4))


@pytest.fixture
def folder(tmp_path: Path, small: SyntheticRun) -> Path:
    """The log of ``small``, each rank in three parts."""
    return write_log(small, tmp_path / "logs", steps_per_part=4)


STEP_NS = 1000
CLOCK_NS = {0: 1_700_000_000_000_000_000, 1: 1_700_000_009_000_000_000}
BY_HAND = Scenario(ranks=2, steps=5, buckets=2, rebuilt=False, bucket_bytes=64)


@pytest.fixture
def by_hand() -> SyntheticRun:
    """Two ranks, five equal steps of 1000 ns, two buckets; rank 1 launches its buckets 200 and 300 ns later.

    Within a step, counted from the end of the last bucket of the step before: the optimizer of the step before from 10
    to 70, 50 ns of waiting for data, forward from 150 to 350; bucket 0 is launched at 400 by rank 0 and at 600 by
    rank 1 and ends at 700, bucket 1 is launched at 500 and 800 and ends at 1000; the last gradient is ready at 510 and
    810; the backward ends at 1005.
    """
    template = simulate(BY_HAND)
    launches = {0: (400, 500), 1: (600, 800)}
    steps, collectives = [], []
    for rank, clock in CLOCK_NS.items():
        for step in range(5):
            zero = clock + step * STEP_NS
            steps.append(
                {
                    "rank": rank,
                    "module": 0,
                    "step": step,
                    "micro_batch": 0,
                    "synced": True,
                    "data_wait_ns": 50,
                    "forward_start_ns": zero + 150,
                    "forward_end_ns": zero + 350,
                    "compute_end_ns": zero + launches[rank][1] + 10,
                    "backward_end_ns": zero + 1005,
                    "optimizer_start_ns": zero + 1010,
                    "optimizer_end_ns": zero + 1070,
                }
            )
            for bucket, end in enumerate((700, 1000)):
                collectives.append(
                    {
                        "rank": rank,
                        "group": 0,
                        "seq": 2 * step + bucket,
                        "op": "all_reduce",
                        "module": 0,
                        "step": step,
                        "bucket": bucket,
                        "layout": 0,
                        "bytes": 64 + bucket,
                        "ready_ns": zero + launches[rank][bucket] - 5 * (bucket + 1),
                        "launch_ns": zero + launches[rank][bucket],
                        "start_ns": None,
                        "end_ns": zero + end,
                    }
                )
    return dataclasses.replace(
        template,
        steps=pl.DataFrame(steps, schema=template.steps.schema),
        collectives=pl.DataFrame(collectives, schema=template.collectives.schema),
    )
