"""How fast `ddpan summarize` is: the whole process against the barest polars query over the same files.

    python benchmarks/throughput.py [--ranks 64] [--steps 2000] [--buckets 30] [--rounds 5]

The query reads launches and ends, takes the shortest duration of each bucket and averages the rest by rank, which is
the least that any answer needs. Both run in fresh processes, also over a log with four times the steps, all in turn;
ratios are taken within a round and are medians over rounds. Exits with 1 if a figure misses its limit.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import polars as pl

from ddpan.analysis.testing import Fault, Scenario, simulate, write_log
from ddpan.analysis.testing.log import records
from ddpan.collector.parts import write_part
from ddpan.collector.schema import Metadata

RATIO_LIMIT = 6.0
MEMORY_LIMIT_GB = 1.5
SCALE = 4
TIME_SCALING_LIMIT = 4.4
MEMORY_SCALING_LIMIT = 1.3
COLLECTIVES_PER_PART = 32768

QUERY = """
import sys
import polars as pl
rows = pl.scan_parquet(sys.argv[1] + "/*/*/collectives-*.parquet")
rows = rows.select("rank", "step", "bucket", duration=pl.col("end_ns") - pl.col("launch_ns"))
shortest = rows.group_by("step", "bucket").agg(shortest=pl.col("duration").min())
wait = rows.join(shortest, on=["step", "bucket"]).group_by("rank").agg((pl.col("duration") - pl.col("shortest")).mean())
print(wait.collect().height)
"""


@dataclass(frozen=True)
class Measurement:
    """One process: wall time in seconds and peak resident memory in GB."""

    seconds: float
    memory_gb: float


def write(folder: Path, *, ranks: int, steps: int, buckets: int) -> None:
    """Write the log that is measured, with the recorder's own writer."""
    fault = Fault(rank=ranks // 2, cause="backward", delay_ns=10_000_000)
    run = simulate(Scenario(ranks=ranks, steps=steps, buckets=buckets, noise=0.05, faults=(fault,)))

    def write_as_recorded(path: Path, table: str, rows: pl.DataFrame, metadata: Metadata) -> None:
        write_part(path, table, records(table, rows), metadata, epoch_offset_ns=0)

    write_log(run, folder, steps_per_part=COLLECTIVES_PER_PART // buckets, write=write_as_recorded)


def measure(command: list[str]) -> Measurement:
    """Run ``command`` to its end."""
    begin = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        raise SystemExit(f"{' '.join(command)} failed with exit code {process.returncode}")
    return Measurement(time.perf_counter() - begin, usage.ru_maxrss / 1e6)


def measure_in_turn(commands: dict[str, list[str]], rounds: int) -> dict[str, list[Measurement]]:
    """Run each command once per round, in an order drawn anew; one round before them warms up and does not count."""
    measured: dict[str, list[Measurement]] = {name: [] for name in commands}
    for number in range(rounds + 1):
        for name in random.sample(list(commands), len(commands)):
            measurement = measure(commands[name])
            if number > 0:
                measured[name].append(measurement)
    return measured


def median_ratio(above: list[Measurement], below: list[Measurement]) -> float:
    """Median over rounds of the ratio of times within the round."""
    return statistics.median(a.seconds / b.seconds for a, b in zip(above, below, strict=True))


def report(measured: dict[str, list[Measurement]], rows: int) -> bool:
    """Print the figures; whether all are within their limits."""
    print(f"{rows:,} collectives and {SCALE} times as many; medians over {len(measured['query'])} rounds")
    for name, measurements in measured.items():
        seconds = statistics.median(one.seconds for one in measurements)
        print(f"  {name:<28} {seconds:6.2f} s  peak {max(one.memory_gb for one in measurements):.2f} GB")
    ours, larger = measured["summarize"], measured["summarize, larger"]
    peak, larger_peak = (max(one.memory_gb for one in measurements) for measurements in (ours, larger))
    figures = [
        ("time against the query", median_ratio(ours, measured["query"]), RATIO_LIMIT),
        ("peak memory, GB", peak, MEMORY_LIMIT_GB),
        (f"time for {SCALE} times the rows", median_ratio(larger, ours), TIME_SCALING_LIMIT),
        (f"memory for {SCALE} times the rows", larger_peak / peak, MEMORY_SCALING_LIMIT),
    ]
    for name, value, limit in figures:
        print(f"  {name:<28} {value:6.2f}    limit {limit:.2f}  {'ok' if value <= limit else 'MISSED'}")
    return all(value <= limit for _, value, limit in figures)


def main() -> None:
    """Write both logs, measure, report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("ranks", 64), ("steps", 2000), ("buckets", 30), ("rounds", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder) / "log", Path(folder) / "larger"]
        for log, scale in zip(logs, (1, SCALE), strict=True):
            shape = {"ranks": options.ranks, "steps": scale * options.steps, "buckets": options.buckets}
            # In a process of its own, so that this one stays small beside those that are measured.
            writer = multiprocessing.get_context("spawn").Process(target=write, args=(log,), kwargs=shape)
            writer.start()
            writer.join()
        summarize = [sys.executable, "-m", "ddpan.analysis", "summarize"]
        commands = {
            "summarize": [*summarize, str(logs[0])],
            "query": [sys.executable, "-c", QUERY, str(logs[0])],
            "summarize, larger": [*summarize, str(logs[1])],
            "query, larger": [sys.executable, "-c", QUERY, str(logs[1])],
        }
        measured = measure_in_turn(commands, options.rounds)
    raise SystemExit(0 if report(measured, options.ranks * options.steps * options.buckets) else 1)


if __name__ == "__main__":
    main()
