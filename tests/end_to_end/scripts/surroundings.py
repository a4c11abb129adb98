"""Trains under a recorder whose surroundings break in one way after the other, and are mended again in most."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddpan import collector
from ddpan.collector import messages
from ddpan.collector.session import current_session

STEPS = 300
BREAKS, MENDED = 100, 200
"""Steps before which the surroundings break and are mended; segments are so small that several are full between."""

DELAY_S = 2.0
RANK = int(os.environ["RANK"])


@dataclass
class Fault:
    """Something that happens to the recorder of this rank.

    Attributes:
        folder: folder of the rank.
        undo: what ends it.
    """

    folder: Path
    undo: list[Callable[[], object]] = field(default_factory=list)

    def nothing(self) -> None:
        """A recorder left in peace."""

    def truncated(self) -> None:
        """Somebody empties the spool."""
        for spool in self.folder.glob("live-*.spool"):
            os.truncate(spool, 0)

    def rank_removed(self) -> None:
        """Somebody removes what was recorded so far, and leaves the folder that the user named."""
        shutil.rmtree(self.folder)

    def log_removed(self) -> None:
        """Somebody removes all of it."""
        shutil.rmtree(self.folder.parents[1], ignore_errors=True)

    def permission_lost(self) -> None:
        """A folder in which not even root may make files takes the place of the rank's."""
        aside = self.folder.rename(self.folder.with_name(f"aside-{RANK}"))
        self.folder.symlink_to("/sys")
        self.undo = [self.folder.unlink, lambda: aside.rename(self.folder)]

    def read_only(self) -> None:
        """A file system that cannot be written takes the place of the rank's folder."""
        subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "none", str(self.folder)], check=True)
        self.undo = [lambda: subprocess.run(["umount", str(self.folder)], check=True)]

    def no_room(self) -> None:
        """No file may grow beyond a page any more."""
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
        self.undo = [lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))]

    def clock_set_back(self) -> None:
        """Wall time goes back by an hour."""
        seconds, nanoseconds = time.time, time.time_ns
        time.time = lambda: seconds() - 3600
        time.time_ns = lambda: nanoseconds() - 3600 * 10**9
        self.undo = [lambda: setattr(time, "time", seconds), lambda: setattr(time, "time_ns", nanoseconds)]

    def slow(self) -> None:
        """Each call that changes the file system takes long; only the thread in the background may make any."""
        for name in ("fsync", "posix_fallocate", "rename", "unlink", "open"):
            self._delay(name)

    def _delay(self, name: str) -> None:
        original = getattr(os, name)

        def delayed(*args: Any, **kwargs: Any) -> Any:
            if threading.current_thread() is threading.main_thread():
                BY_TRAINING.append(name)
            time.sleep(DELAY_S)
            return original(*args, **kwargs)

        setattr(os, name, delayed)
        self.undo.append(lambda: setattr(os, name, original))


BY_TRAINING: list[str] = []
"""Calls of the file system by the training's thread."""

KINDS: list[Callable[[Fault], None]] = [
    Fault.nothing,
    Fault.truncated,
    Fault.rank_removed,
    Fault.log_removed,
    Fault.permission_lost,
    Fault.no_room,
    Fault.clock_set_back,
    Fault.slow,
]


class Training:
    """Training in a process group of its own, with the time that each step took."""

    def __init__(self, name: str) -> None:
        self._store = f"file://{sys.argv[1]}/{name}"
        self.steps_s: list[float] = []

    def run(self, before_step: Callable[[int], object]) -> torch.Tensor:
        """The trained weight."""
        world_size = int(os.environ["WORLD_SIZE"])
        timeout = timedelta(seconds=150)
        dist.init_process_group("gloo", init_method=self._store, timeout=timeout, rank=RANK, world_size=world_size)
        torch.manual_seed(0)
        model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)), bucket_cap_mb=0.001)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        torch.manual_seed(1 + RANK)
        for step in range(STEPS):
            before_step(step)
            begun = time.perf_counter()
            optimizer.zero_grad()
            model(torch.randn(4, 16)).square().mean().backward()
            optimizer.step()
            self.steps_s.append(time.perf_counter() - begun)
        weight: torch.Tensor = model.module[0].weight.detach().clone()
        # As in the other scripts: a group that is destroyed under gloo's threads hangs torch now and then.
        time.sleep(0.05)
        dist.destroy_process_group()
        return weight


def under(kind: Callable[[Fault], None], reference: torch.Tensor, logs: Path) -> dict[str, Any]:
    """What came of a training under a fault."""
    name = kind.__name__
    said: list[str] = []
    messages._said.clear()
    messages.say = said.append  # type: ignore[assignment]
    (logs / name).mkdir(exist_ok=True)
    collector.start(logs / name)
    training = Training(name)
    faults: list[Fault] = []

    def before_step(step: int) -> None:
        if step == BREAKS:
            session = current_session()
            assert session is not None
            assert session.recording is not None
            faults.append(Fault(session.recording.folder))
            kind(faults[0])
        elif step == MENDED:
            for undo in faults[0].undo:
                undo()

    same = torch.equal(training.run(before_step), reference)
    collector.stop()
    by_training, BY_TRAINING[:] = list(BY_TRAINING), []
    return {"same": same, "said": said, "longest_step_s": max(training.steps_s), "calls_by_training": by_training}


def main() -> None:
    torch.set_num_threads(1)
    reference = Training("reference").run(lambda _step: None)
    logs = Path(sys.argv[2])
    kinds = [*KINDS, Fault.read_only] if os.environ.get("MAY_MOUNT") else KINDS
    outcome = {kind.__name__: under(kind, reference, logs) for kind in kinds}
    Path(sys.argv[1], f"facts-{RANK}.json").write_text(json.dumps(outcome))


if __name__ == "__main__":
    main()
