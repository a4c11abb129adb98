"""How fast `ddpan summarize` is: the whole process against the barest polars query over the same files.

    python benchmarks/throughput.py [--ranks 64] [--steps 2000] [--buckets 30] [--pairs 5]

The query reads launches and ends, takes the shortest duration of each bucket and averages the rest by rank, which is
the least that any answer needs. Both run in fresh processes, in turn; the ratio is the median over pairs. The same is
then done with four times the steps. Prints the figures and exits with 1 if one of them misses its limit.
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


@dataclass(frozen=True)
class Series:
    """Measurements of both processes over one log, in pairs."""

    summarize: list[Measurement]
    query: list[Measurement]

    @property
    def ratio(self) -> float:
        """Median over pairs of the ratio of times."""
        pairs = zip(self.summarize, self.query, strict=True)
        return statistics.median(ours.seconds / bare.seconds for ours, bare in pairs)

    @property
    def seconds(self) -> float:
        """Median time of `ddpan summarize`."""
        return statistics.median(one.seconds for one in self.summarize)

    @property
    def memory_gb(self) -> float:
        """Highest peak memory of `ddpan summarize`."""
        return max(one.memory_gb for one in self.summarize)


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


def compare(folder: Path, pairs: int) -> Series:
    """Measure both processes ``pairs`` times, the order within a pair drawn at random; one round before warms up."""
    commands = {
        "summarize": [sys.executable, "-m", "ddpan.analysis", "summarize", str(folder)],
        "query": [sys.executable, "-c", QUERY, str(folder)],
    }
    measured: dict[str, list[Measurement]] = {name: [] for name in commands}
    for number in range(pairs + 1):
        for name in random.sample(list(commands), 2):
            measurement = measure(commands[name])
            if number > 0:
                measured[name].append(measurement)
    return Series(**measured)


def report(small: Series, large: Series, rows: int) -> bool:
    """Print the figures; whether all are within their limits."""
    bare = statistics.median(one.seconds for one in small.query)
    print(f"{rows:,} collectives: summarize {small.seconds:.2f} s, query {bare:.2f} s (medians)")
    bare = statistics.median(one.seconds for one in large.query)
    print(f"{SCALE * rows:,} collectives: summarize {large.seconds:.2f} s, query {bare:.2f} s, ratio {large.ratio:.2f}")
    figures = [
        ("ratio to the query", small.ratio, RATIO_LIMIT),
        ("peak memory, GB", small.memory_gb, MEMORY_LIMIT_GB),
        (f"time for {SCALE} times the rows", large.seconds / small.seconds, TIME_SCALING_LIMIT),
        (f"memory for {SCALE} times the rows", large.memory_gb / small.memory_gb, MEMORY_SCALING_LIMIT),
    ]
    for name, value, limit in figures:
        print(f"  {name:<28} {value:6.2f}  limit {limit:.2f}  {'ok' if value <= limit else 'MISSED'}")
    return all(value <= limit for _, value, limit in figures)


def main() -> None:
    """Write both logs, measure, report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("ranks", 64), ("steps", 2000), ("buckets", 30), ("pairs", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        series = []
        for number, scale in enumerate((1, SCALE)):
            log = Path(folder) / str(number)
            shape = {"ranks": options.ranks, "steps": scale * options.steps, "buckets": options.buckets}
            # In a process of its own, so that this one stays small beside those that are measured.
            writer = multiprocessing.get_context("spawn").Process(target=write, args=(log,), kwargs=shape)
            writer.start()
            writer.join()
            series.append(compare(log, options.pairs))
    rows = options.ranks * options.steps * options.buckets
    raise SystemExit(0 if report(series[0], series[1], rows) else 1)


if __name__ == "__main__":
    main()
