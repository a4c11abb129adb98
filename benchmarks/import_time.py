"""What an installed but unused collector adds to ``import torch``, without ``DDPAN_LOG_DIR``.

The end of the import, where torch looks for entry points and calls them, is all that an entry point can make longer.
It is timed in pairs of fresh processes, in random order: one as it is, one that does not see ddpan's entry point.
Printed is the median over pairs of the difference, in ms of processor time, with a bootstrap interval. The whole import
cannot be compared to a millisecond: it varies by tens of them.

    python benchmarks/import_time.py --pairs 20
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import sys

import numpy as np

PROGRAM = """
import importlib.metadata, os, time
os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
begin = time.process_time()
import torch
imported = time.process_time()
all_of_them = importlib.metadata.entry_points
def entry_points(**params):
    return importlib.metadata.EntryPoints(e for e in all_of_them(**params) if e.name not in HIDDEN)
importlib.metadata.entry_points = entry_points
called = time.process_time()
torch._import_device_backends()
print((imported - begin) * 1e3, (time.process_time() - called) * 1e3)
"""


def measure(*, visible: bool) -> tuple[float, float]:
    """Processor time in ms of a fresh process: the import of torch, and its end that calls the entry points."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("DDPAN_")}
    program = f"HIDDEN = {set() if visible else {'ddpan'}}\n{PROGRAM}"
    result = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    imported, called = result.stdout.split()
    return float(imported), float(called)


def interval(values: list[float], *, draws: int = 10_000) -> tuple[float, float]:
    """The 2.5 and 97.5 percentiles of the bootstrap distribution of the median."""
    drawn = np.random.default_rng(0).choice(np.array(values), (draws, len(values)))
    low, high = np.percentile(np.median(drawn, axis=1), [2.5, 97.5])
    return float(low), float(high)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Time that the unused collector adds to the import of torch.")
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    order = random.Random(options.seed)
    measure(visible=True)  # the first import reads torch from the disk
    imports, differences = [], []
    for _ in range(options.pairs):
        times = {visible: measure(visible=visible) for visible in order.sample([False, True], 2)}
        imports.append(times[True][0])
        differences.append(times[True][1] - times[False][1])
    low, high = interval(differences)
    print(
        f"import torch takes {statistics.median(imports):.0f} ms; the unused collector adds, {options.pairs} pairs: "
        f"median {statistics.median(differences):.2f} ms, 95% interval {low:.2f} to {high:.2f} ms; bar 2 ms"
    )


if __name__ == "__main__":
    main()
