"""Many trainings in one process, one after the other, each in a process group of its own.

Called as ``run_modes.py OUT START LOGS NAME...``. START is ``torchrun`` where this is one rank of several, or a start
method of torch.multiprocessing, with which two ranks are started. LOGS is the folder for a recording that begins late,
``-`` for none.
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
import torch.multiprocessing.spawn as multiprocessing

sys.path.insert(0, str(Path(__file__).parents[3]))

from tests.end_to_end.modes import MODES, Mode, World

RANKS = 2


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


def recorder(logs: str) -> tuple[Callable[[], None], Callable[[], None]]:
    """What starts and stops a recording by hand, where there is a folder for it."""
    if logs == "-":
        return (lambda: None), (lambda: None)
    from ddpan import collector

    return (lambda: collector.start(logs)), collector.stop


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
        dist.destroy_process_group()
    return tensors, told


def train_all(rank: int, size: int, out: str, logs: str, names: list[str]) -> None:
    """Train all modes and write down how each ended."""
    torch.set_num_threads(1)
    start, stop = recorder(logs)
    facts: dict[str, Any] = {}
    for name in names:
        [mode] = [mode for mode in MODES if mode.name == name]
        listening = sys.stderr = Listening(sys.__stderr__)
        begin_ns, begin_cpu = time.time_ns(), time.process_time()
        tensors, told = run(mode, World(rank=rank, size=size, out=Path(out), start=start))
        stop()
        facts[name] = {
            "tensors": tensors,
            "told": told,
            "begin_ns": begin_ns,
            "end_ns": time.time_ns(),
            "cpu_s": time.process_time() - begin_cpu,
            "said": [line for line in listening.text.splitlines() if line.startswith("ddpan:")],
        }
    Path(out, f"facts-{rank}.json").write_text(json.dumps(facts))


def digest(tensor: torch.Tensor) -> str:
    """A digest of all bits of a tensor, with its type and shape."""
    dense = (tensor.to_dense() if tensor.is_sparse else tensor).contiguous()
    content = bytes(dense.flatten().view(torch.uint8).numpy().data) if dense.numel() else b""
    return hashlib.sha256(f"{dense.dtype} {tuple(dense.shape)}".encode() + content).hexdigest()[:16]


def main() -> None:
    out, method, logs, *names = sys.argv[1:]
    if method == "torchrun":
        train_all(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), out, logs, names)
    else:
        arguments = (RANKS, out, logs, names)
        start_processes: Callable[..., None] = multiprocessing.start_processes
        start_processes(train_all, arguments, nprocs=RANKS, start_method=method)


if __name__ == "__main__":
    main()
