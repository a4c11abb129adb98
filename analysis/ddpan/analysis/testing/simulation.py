"""Simulation of a scenario: the two tables and the metadata that a recorder would have written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from ddpan.collector.schema import SCHEMA_VERSION, BucketInfo, Metadata

from .._tables import SCHEMAS
from .scenario import Fault, Scenario

__all__ = ["SyntheticRun", "simulate"]

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
_READY_BEFORE_LAUNCH_NS = 20_000


@dataclass(frozen=True)
class SyntheticRun:
    """A simulated run.

    Attributes:
        scenario: what was simulated; its faults are the known answer.
        steps: the table ``steps``, sorted by rank and time.
        collectives: the table ``collectives``, sorted by rank and time.
        metadata: metadata by rank.
    """

    scenario: Scenario
    steps: pl.DataFrame
    collectives: pl.DataFrame
    metadata: dict[int, Metadata]


@dataclass(frozen=True)
class _Durations:
    """Drawn durations, nanoseconds: (steps, micro-batches, ranks), ``gaps`` and ``transfer`` by bucket."""

    data: Integers
    other: Integers
    forward: Integers
    backward: Integers
    optimizer: Integers
    gaps: Integers
    transfer: Integers


@dataclass(frozen=True)
class _Moments:
    """When things happened on the true clock, since the start; (steps, ranks), collectives (steps, buckets, ranks)."""

    begin: Integers
    launch: Integers
    end: Integers
    backward_end: Integers


def simulate(scenario: Scenario) -> SyntheticRun:
    """Simulate ``scenario``; the same scenario always gives the same run."""
    random = np.random.default_rng(scenario.seed)
    durations = _draw(scenario, random)
    moments = _play(scenario, durations, random)
    steps, collectives = _steps(scenario, durations, moments), _collectives(scenario, moments)
    return SyntheticRun(
        scenario=scenario,
        steps=_without_lost(steps, scenario, random),
        collectives=_without_lost(collectives, scenario, random),
        metadata={rank: _metadata(scenario, rank) for rank in range(scenario.ranks)},
    )


def _draw(scenario: Scenario, random: np.random.Generator) -> _Durations:
    shape = (scenario.steps, scenario.micro_batches, scenario.ranks)
    by_bucket = (scenario.steps, scenario.buckets, scenario.ranks)

    def lognormal(median_ns: float | Floats, noise: Floats) -> Integers:
        return np.rint(median_ns * np.exp(noise)).astype(np.int64)

    def phase(median_ns: float | Floats, size: tuple[int, ...] = shape) -> Integers:
        return lognormal(median_ns, scenario.noise * _noise(scenario, random, size))

    pace = np.array([scenario.pace.get(rank, 1.0) for rank in range(scenario.ranks)])
    durations = _Durations(
        data=phase(scenario.data_ns),
        other=phase(scenario.other_ns),
        forward=phase(scenario.forward_ns * pace),
        backward=phase(scenario.backward_ns * pace),
        optimizer=phase(scenario.optimizer_ns, (scenario.steps, 1, scenario.ranks)),
        gaps=phase(scenario.backward_ns / scenario.buckets * pace, by_bucket),
        transfer=lognormal(scenario.transfer_ns, scenario.transfer_noise * random.standard_normal(by_bucket[:2])),
    )
    for fault in scenario.faults:
        _delay(scenario, durations, fault, random)
    return durations


def _noise(scenario: Scenario, random: np.random.Generator, size: tuple[int, ...]) -> Floats:
    """Noise of standard deviation 1 of the scenario's tail and correlation along the steps, the first axis."""
    tail, correlation = scenario.noise_tail, scenario.noise_correlation
    if tail is None:
        noise = random.standard_normal(size)
    else:
        noise = random.standard_t(tail, size) * np.sqrt(max(tail - 2, 1.0) / tail)
    if correlation:
        fresh = np.sqrt(1 - correlation**2)
        for step in range(1, len(noise)):
            noise[step] = correlation * noise[step - 1] + fresh * noise[step]
    return noise


def _delay(scenario: Scenario, durations: _Durations, fault: Fault, random: np.random.Generator) -> None:
    steps = np.arange(scenario.steps)[fault.first_step : fault.end_step]
    if fault.share < 1:
        steps = steps[random.random(len(steps)) < fault.share]
    delay_ns = np.full(len(steps), fault.delay_ns, np.int64)
    if fault.delay_noise:
        varied = 1 + fault.delay_noise * random.standard_normal(len(steps))
        delay_ns = np.rint(fault.delay_ns * np.maximum(varied, 0.0)).astype(np.int64)
    if fault.cause == "backward":
        bucket = scenario.buckets // 2 if fault.bucket is None else fault.bucket
        durations.gaps[steps, bucket, fault.rank] += delay_ns
    elif fault.cause == "collective":
        durations.transfer[steps, -1 if fault.bucket is None else fault.bucket] += delay_ns
    else:
        getattr(durations, fault.cause)[steps, 0, fault.rank] += delay_ns


def _play(scenario: Scenario, durations: _Durations, random: np.random.Generator) -> _Moments:
    launched = np.cumsum(durations.gaps, axis=1)
    transfer = durations.transfer
    if scenario.rebuilt:
        # One bucket under the first layout: it is launched when the whole backward is computed.
        launched[0, :-1] = launched[0, -1]
        transfer[0, :-1] = 0
    before = durations.data + durations.other + durations.forward
    lead = before.sum(axis=1) + durations.backward[:, :-1].sum(axis=1)
    sent = np.cumsum(transfer, axis=1)
    shape = (scenario.steps, scenario.ranks)
    noticed = np.zeros(launched.shape, np.int64)
    if scenario.exit_ns:
        noticed = np.rint(random.exponential(scenario.exit_ns, launched.shape)).astype(np.int64)
    begin, ended = np.zeros(shape, np.int64), np.zeros(sent.shape, np.int64)
    now = np.zeros(scenario.ranks, np.int64)
    for step in range(scenario.steps):
        begin[step] = now
        # Bucket k ends at max(last launch of k, end of k-1) + transfer of k; unrolled, that is a running maximum.
        last_launch = (now + lead[step] + launched[step]).max(axis=1)
        ended[step] = np.maximum.accumulate(last_launch - sent[step] + transfer[step]) + sent[step]
        now = ended[step, -1] + noticed[step, -1] + scenario.copy_ns
        now = now + durations.optimizer[step, 0]
    launch = (begin + lead)[:, None] + launched
    end = ended[:, :, None] + noticed
    return _Moments(begin, launch, end, end[:, -1] + scenario.copy_ns)


def _on_clock(scenario: Scenario, moments: Integers) -> Integers:
    """Epoch nanoseconds on each rank's own clock; the last axis is the rank."""
    hosts = [scenario.host(rank) for rank in range(scenario.ranks)]
    offset = np.array([scenario.clock_offset_ns.get(host, 0) for host in hosts], np.int64)
    drift = np.array([scenario.clock_drift_ppm.get(host, 0.0) for host in hosts]) * 1e-6
    shift = scenario.start_ns + offset
    return moments + shift + np.rint(moments * drift).astype(np.int64) if drift.any() else moments + shift


def _steps(scenario: Scenario, durations: _Durations, moments: _Moments) -> pl.DataFrame:
    n_steps, n_micro, n_ranks = durations.forward.shape
    whole = durations.data + durations.other + durations.forward + durations.backward
    earlier = np.cumsum(whole, axis=1) - whole
    forward_start = moments.begin[:, None] + earlier + durations.data + durations.other
    forward_end = forward_start + durations.forward
    compute_end = moments.launch[:, -1]
    last = np.arange(n_micro) == n_micro - 1

    def of_last(values: Integers) -> Integers:
        return np.broadcast_to(values[:, None], forward_start.shape)

    optimizer_end = moments.backward_end + durations.optimizer[:, 0]
    times = {
        "forward_start_ns": forward_start,
        "forward_end_ns": forward_end,
        "compute_end_ns": of_last(compute_end),
        "backward_end_ns": of_last(moments.backward_end),
        "optimizer_start_ns": of_last(moments.backward_end),
        "optimizer_end_ns": of_last(optimizer_end),
    }
    keys = {
        "rank": np.broadcast_to(np.arange(n_ranks), forward_start.shape),
        "step": np.broadcast_to(np.arange(n_steps)[:, None, None], forward_start.shape),
        "micro_batch": np.broadcast_to(np.arange(n_micro)[:, None], forward_start.shape),
        "synced": np.broadcast_to(last[:, None], forward_start.shape),
        "data_wait_ns": durations.data,
    }
    frame = _frame("steps", keys | {name: _on_clock(scenario, values) for name, values in times.items()})
    at_the_end = [name for name in times if name not in ("forward_start_ns", "forward_end_ns")]
    return frame.with_columns(pl.when("synced").then(pl.col(*at_the_end)))


def _collectives(scenario: Scenario, moments: _Moments) -> pl.DataFrame:
    n_steps, n_buckets, n_ranks = moments.launch.shape
    shape = moments.launch.shape
    step = np.broadcast_to(np.arange(n_steps)[:, None, None], shape)
    bucket = np.broadcast_to(np.arange(n_buckets)[:, None], shape)
    launch = _on_clock(scenario, moments.launch)
    columns: dict[str, Any] = {
        "rank": np.broadcast_to(np.arange(n_ranks), shape),
        "step": step,
        "bucket": bucket,
        "seq": step * n_buckets + bucket,
        "layout": np.full(shape, int(scenario.rebuilt)),
        "bytes": np.full(shape, scenario.bucket_bytes),
        "ready_ns": launch - _READY_BEFORE_LAUNCH_NS,
        "launch_ns": launch,
        "end_ns": _on_clock(scenario, moments.end),
    }
    frame = _frame("collectives", columns)
    return _with_first_layout(frame, scenario) if scenario.rebuilt else frame


def _with_first_layout(frame: pl.DataFrame, scenario: Scenario) -> pl.DataFrame:
    first = pl.col("step") == 0
    skipped = scenario.buckets - 1
    return frame.filter(~first | (pl.col("bucket") == skipped)).with_columns(
        bucket=pl.when(first).then(pl.lit(0, pl.UInt16)).otherwise("bucket"),
        layout=pl.when(first).then(pl.lit(0, pl.UInt16)).otherwise("layout"),
        bytes=pl.when(first).then(pl.col("bytes") * scenario.buckets).otherwise("bytes"),
        seq=pl.col("seq") - skipped,
    )


def _frame(table: str, columns: dict[str, Any]) -> pl.DataFrame:
    """Rows rank by rank from arrays whose last axis is the rank; group and module are 0, the op is all_reduce."""
    some = next(iter(columns.values()))
    columns = columns | {"group": np.zeros(some.shape, np.int64), "module": np.zeros(some.shape, np.int64)}
    series = []
    for name, kind in SCHEMAS[table].items():
        if name == "op":
            series.append(pl.repeat("all_reduce", some.size, dtype=kind, eager=True).alias(name))
        elif name not in columns:
            series.append(pl.repeat(None, some.size, dtype=kind, eager=True).alias(name))
        else:
            by_rank = np.moveaxis(columns[name], -1, 0).ravel()
            series.append(pl.Series(name, by_rank).cast(kind))
    return pl.DataFrame(series)


def _without_lost(frame: pl.DataFrame, scenario: Scenario, random: np.random.Generator) -> pl.DataFrame:
    if not scenario.lost:
        return frame
    share = np.array([scenario.lost.get(rank, 0.0) for rank in range(scenario.ranks)])
    kept = random.random(frame.height) >= share[frame["rank"].to_numpy()]
    return frame.filter(pl.Series(kept))


def _metadata(scenario: Scenario, rank: int) -> Metadata:
    sizes = [BucketInfo(bytes=scenario.bucket_bytes, parameters=[]) for _ in range(scenario.buckets)]
    whole = [BucketInfo(bytes=scenario.bucket_bytes * scenario.buckets, parameters=[])]
    return Metadata(
        schema_version=SCHEMA_VERSION,
        table=None,
        part=None,
        run=scenario.run,
        rank=rank,
        local_rank=rank % scenario.ranks_per_host,
        world_size=scenario.ranks,
        host=f"host-{scenario.host(rank):03d}",
        pid=1000 + rank,
        device="cpu",
        backend="gloo",
        tap="synthetic",
        versions={"ddpan": "synthetic"},
        job={"id": None, "restart": 0},
        clock={"anchor_monotonic_ns": 0, "anchor_epoch_ns": scenario.start_ns, "uncertainty_ns": 0},
        groups={"0": {"name": "0", "ranks": list(range(scenario.ranks)), "backend": "gloo"}},
        modules={
            "0": {
                "kind": "ddp",
                "name": "Synthetic",
                "group": 0,
                "parameters": scenario.buckets,
                "parameter_bytes": scenario.bucket_bytes * scenario.buckets,
                "bucket_cap_mb": None,
                "find_unused_parameters": False,
                "gradient_as_bucket_view": False,
                "static_graph": False,
                "comm_hook": None,
                "joined_after_step": None,
                "zero_stage": None,
            }
        },
        layouts={"0": {"0": whole, "1": sizes} if scenario.rebuilt else {"0": sizes}},
        counters={"dropped": {}, "errors": 0, "late_ends": 0, "removed_parts": 0, "spool_repairs": 0},
        settings={},
        closed=True,
    )
