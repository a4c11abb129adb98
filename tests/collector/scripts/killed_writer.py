"""Writers that are killed: each records as fast as a training would, and notes what returned in a file of its own.

The notes are one byte per event, kept by the kernel like the spool itself; `NOTES` says which byte means what. The
parent forks one writer per folder named on the command line and kills it after a random time. Segments are small and of
random size, and the metadata changes all the time, so that a kill meets a segment that is made, turned over, turned
into parts or removed, or metadata that is written.
"""

from __future__ import annotations

import mmap
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path

import pyarrow.parquet  # noqa: F401 - imported once here, not once in each writer

from ddpan.collector import messages
from ddpan.collector.clock import now_ns
from ddpan.collector.collectives import OP_CODES, Collectives
from ddpan.collector.parts import PartWriter
from ddpan.collector.schema import Metadata
from ddpan.collector.segments import Spool
from ddpan.collector.selection import StepSelection
from ddpan.collector.steps import StepRecorder

EVENTS = 1 << 16
NOTES = {"launched": 1, "dropped": 2, "ended": 3}
DESCRIBED: Metadata = {
    "schema_version": 1,
    "table": None,
    "part": None,
    "run": "r",
    "rank": 0,
    "local_rank": 0,
    "world_size": 1,
    "host": "h",
    "pid": 1,
    "device": "cpu",
    "backend": "gloo",
    "tap": "reducer_group",
    "versions": {},
    "job": {"id": None, "restart": 0},
    "clock": {"anchor_monotonic_ns": 0, "anchor_epoch_ns": 0, "uncertainty_ns": 0},
    "groups": {},
    "modules": {},
    "layouts": {},
    "counters": {"dropped": {}, "errors": 0, "late_ends": 0, "removed_parts": 0, "spool_repairs": 0},
    "settings": {},
    "closed": False,
}


def notes(path: Path) -> mmap.mmap:
    """A byte for each event that may come."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    os.ftruncate(descriptor, EVENTS)
    return mmap.mmap(descriptor, EVENTS)


def write(folder: Path) -> None:
    """Record steps of a few collectives each, until somebody ends this process."""
    collectives_noted, steps_noted = notes(folder / "collectives.notes"), notes(folder / "steps.notes")
    wake = threading.Event()
    spool = Spool(
        folder,
        epoch_offset_ns=0,
        identity={"rank": 0, "world_size": 1, "run": "r", "host": "h"},
        steps=random.randint(2, 40),
        collectives=random.randint(4, 200),
        clock=now_ns,
        wake=wake.set,
    )
    steps = StepRecorder(spool, selection=StepSelection())
    writer = PartWriter(
        spool,
        metadata=lambda table, part, closed: {**DESCRIBED, "table": table, "part": part, "closed": closed},
        closed_rows=steps.rows_closed,
        keep=steps.keep,
        retention=None,
        clock=now_ns,
        wake=wake,
    )
    writer.start()
    collectives = Collectives(spool)
    collectives.add_group(0)
    module = steps.add(group=0, names=[], reduced_bytes=0, on_device=False)
    pace, buckets = random.random(), random.randint(1, 12)
    for step in range(EVENTS // buckets):
        steps.begin_forward(module, synced=True)
        steps_noted[step] = NOTES["dropped" if module.row is None else "launched"]
        for event in range(step * buckets, (step + 1) * buckets):
            slot = collectives.launch(0, OP_CODES["all_reduce"], 1, now_ns())
            collectives_noted[event] = NOTES["dropped" if slot is None else "launched"]
            if slot is not None:
                collectives.end(slot, now_ns())
                collectives_noted[event] = NOTES["ended"]
            if random.random() < pace:
                time.sleep(0.0002)
        steps.begin_optimizer(module)
        steps.end_optimizer(module)
        if module.row is not None:
            steps_noted[step] = NOTES["ended"]
        writer.metadata_changed = True


def main() -> None:
    messages._said.add("no segment")  # It goes faster than any training, and would say so each time.
    for number, name in enumerate(sys.argv[1:]):
        child = os.fork()
        if child == 0:
            write(Path(name))
            os._exit(0)
        while number % 10 and not (Path(name) / "steps.notes").exists():
            time.sleep(0.001)  # One in ten may be killed before it has begun.
        time.sleep(random.uniform(0, 0.3))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()
