"""A writer that is killed: records as fast as a training would, and notes in a file of its own what returned.

The notes are one byte per event, mapped like the spool itself: 1 if the event was recorded, 2 if it was dropped.
The parent forks one writer per folder named on the command line and kills it after a random time.
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

from ddpan.collector.clock import now_ns
from ddpan.collector.collectives import OP_CODES, Collectives
from ddpan.collector.parts import PartWriter
from ddpan.collector.schema import Metadata
from ddpan.collector.segments import Spool

EVENTS = 1 << 16
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
    "tap": "comm_hook",
    "versions": {},
    "job": {"id": None, "restart": 0},
    "clock": {"anchor_monotonic_ns": 0, "anchor_epoch_ns": 0, "uncertainty_ns": 0},
    "groups": {},
    "modules": {},
    "layouts": {},
    "counters": {"dropped": {}, "errors": 0, "late_ends": 0, "removed_parts": 0},
    "settings": {},
    "closed": False,
}


def write(folder: Path) -> None:
    descriptor = os.open(folder / "notes", os.O_RDWR | os.O_CREAT, 0o644)
    os.ftruncate(descriptor, EVENTS)
    notes = mmap.mmap(descriptor, EVENTS)
    wake = threading.Event()
    spool = Spool(
        folder,
        epoch_offset_ns=0,
        identity={"rank": 0, "world_size": 1, "run": "r", "host": "h"},
        steps=4,
        collectives=64,
        clock=now_ns,
        wake=wake.set,
    )
    writer = PartWriter(
        spool,
        metadata=lambda table, part, closed: {**DESCRIBED, "table": table, "part": part, "closed": closed},
        closed_rows=lambda _segment: True,
        retention=None,
        clock=now_ns,
        wake=wake,
    )
    writer.start()
    collectives = Collectives(spool)
    collectives.add_group(0)
    pace = random.random()
    for event in range(EVENTS):
        slot = collectives.launch(0, OP_CODES["all_reduce"], 1, now_ns())
        notes[event] = 2 if slot is None else 1
        if slot is not None:
            collectives.end(slot, now_ns())
        if random.random() < pace:
            time.sleep(0.0002)


def main() -> None:
    for name in sys.argv[1:]:
        child = os.fork()
        if child == 0:
            write(Path(name))
            os._exit(0)
        time.sleep(random.uniform(0.02, 0.4))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()
