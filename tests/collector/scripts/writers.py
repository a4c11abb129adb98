"""Ranks of one run that record at full speed, each a process of its own: FOLDER RANKS STEPS BUCKETS."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pyarrow.parquet  # noqa: F401 - imported once here, not once in each process

from ddpan.collector.clock import Anchor, now_ns
from ddpan.collector.collectives import ALL_REDUCE
from ddpan.collector.identity import Identity
from ddpan.collector.recording import Recording
from ddpan.collector.schema import Job
from ddpan.collector.settings import Settings


def record(folder: Path, *, rank: int, ranks: int, steps: int, buckets: int) -> None:
    """One rank: every step a forward, its buckets, an optimizer."""
    identity = Identity(
        run="20261130T205019-3f9a1c2e",
        rank=rank,
        local_rank=rank,
        world_size=ranks,
        host="node",
        pid=os.getpid(),
        backend="gloo",
        job=Job(id=None, restart=0),
    )
    settings = Settings(log_dir=folder)
    recording = Recording(
        settings, identity, anchor=Anchor.take(), tap="reducer_group", torch_version="none", device="cpu"
    )
    recording.start()
    group = recording.add_group(name="0", ranks=list(range(ranks)), backend="gloo")
    module = recording.steps.add(group=group, names=[], reduced_bytes=0, on_device=False)
    for step in range(steps):
        recording.steps.begin_forward(module, synced=True)
        recording.steps.end_forward(module, synced=True)
        for bucket in range(buckets):
            slot = recording.collectives.launch(group, ALL_REDUCE, 8, now_ns(), 0, step, bucket, 0)
            if slot is not None:
                recording.collectives.end(slot, now_ns())
        recording.steps.begin_optimizer(module)
        recording.steps.end_optimizer(module)
    recording.stop()


def main() -> None:
    folder = Path(sys.argv[1])
    ranks, steps, buckets = map(int, sys.argv[2:])
    children = []
    for rank in range(ranks):
        child = os.fork()
        if child == 0:
            record(folder, rank=rank, ranks=ranks, steps=steps, buckets=buckets)
            os._exit(0)
        children.append(child)
    sys.exit(max(os.waitpid(child, 0)[1] for child in children))


if __name__ == "__main__":
    main()
