"""Many trainings in one process, one after the other, each in a process group of its own.

Called as ``run_modes.py OUT NAME...`` on each rank of torchrun, or with nobody else, to start ranks of its own for each
mode with torch.multiprocessing.
"""

from __future__ import annotations

import gc
import hashlib
import io
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.multiprocessing.spawn import start_processes

sys.path.insert(0, str(Path(__file__).parents[3]))

from tests.end_to_end.modes import MODES, Mode, World

RECORDED = "DDPAN_LOG_DIR" in os.environ

KEPT: list[dist.ProcessGroup] = []
"""Groups that were destroyed. Where a callback on a thread of gloo's held the last reference, the thread would wait for
itself, and torch abort the process, recorded or not."""


class Listening(io.TextIOBase):
    """stderr, which also remembers what passes."""

    def __init__(self, behind: Any) -> None:
        self.behind = behind
        self.text = ""

    def write(self, text: str) -> int:
        self.text += text
        return int(self.behind.write(text))

    def flush(self) -> None:
        self.behind.flush()

    def fileno(self) -> int:
        return int(self.behind.fileno())


def starter(mode: Mode) -> Callable[[], None]:
    """What begins to record, in a mode that begins unrecorded: the collector is stopped now, if there is one."""
    if not (mode.late and RECORDED):
        return lambda: None
    from ddpan import collector

    collector.stop()
    return collector.start


def run(mode: Mode, world: World) -> tuple[list[str], dict[str, Any]]:
    """One training and its default process group: digests of what it leaves behind, and what it tells."""
    torch.manual_seed(world.rank)
    if not mode.makes_group:
        place = f"file://{world.out}/{mode.name.replace(' ', '-')}"
        dist.init_process_group("gloo", init_method=place, rank=world.rank, world_size=world.size)
    trained = mode.train(world)
    tensors, told = [digest(tensor) for tensor in trained.tensors], trained.told
    # A reducer that outlives its group ends gloo's threads while it holds the interpreter, for which they may wait.
    del trained
    gc.collect()
    if not mode.makes_group:
        KEPT.extend(distributed_c10d._world.pg_map)
        dist.destroy_process_group()
    return tensors, told


def facts_of(mode: Mode, rank: int, out: Path) -> dict[str, Any]:
    """Train one mode; how it ended."""
    listening = sys.stderr = Listening(sys.__stderr__)
    begin_ns, begin_cpu = time.time_ns(), time.process_time()
    tensors, told = run(mode, World(rank=rank, size=mode.ranks, out=out, start=starter(mode)))
    return {
        "tensors": tensors,
        "told": told,
        "begin_ns": begin_ns,
        "end_ns": time.time_ns(),
        "cpu_s": time.process_time() - begin_cpu,
        "said": [line for line in listening.text.splitlines() if line.startswith("ddpan:")],
    }


def train_all(rank: int, out: Path, names: list[str]) -> None:
    """Train all modes that have this rank, and write down how each ended."""
    torch.set_num_threads(1)
    # What torch's import leaves behind need not be searched for garbage after each mode.
    gc.freeze()
    file = out / f"facts-{rank}.json"
    facts = json.loads(file.read_text()) if file.exists() else {}
    facts |= {mode.name: facts_of(mode, rank, out) for mode in modes_of(names) if rank < mode.ranks}
    file.write_text(json.dumps(facts))
    # The groups must not end with the interpreter either.
    os._exit(0)


def modes_of(names: list[str]) -> list[Mode]:
    """The modes with these names."""
    by_name = {mode.name: mode for mode in MODES}
    return [by_name[name] for name in names]


def digest(tensor: torch.Tensor) -> str:
    """A digest of all bits of a tensor, with its type and shape."""
    dense = (tensor.to_dense() if tensor.is_sparse else tensor).contiguous()
    content = bytes(dense.flatten().view(torch.uint8).numpy().data) if dense.numel() else b""
    return hashlib.sha256(f"{dense.dtype} {tuple(dense.shape)}".encode() + content).hexdigest()[:16]


def main() -> None:
    out, names = Path(sys.argv[1]), sys.argv[2:]
    if "RANK" in os.environ:
        train_all(int(os.environ["RANK"]), out, names)
        return
    start: Callable[..., None] = start_processes
    for mode in modes_of(names):
        start(train_all, (out, [mode.name]), nprocs=mode.ranks, start_method=mode.launch)


if __name__ == "__main__":
    main()
