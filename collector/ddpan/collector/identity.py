"""Who this rank is, and which run it belongs to."""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from .schema import Job

__all__ = ["Identity", "agree_on_run", "job_of", "new_run_id"]


class Store(Protocol):
    """The part of a c10d store that is used here."""

    def compare_set(self, key: str, expected_value: str, desired_value: str) -> bytes:
        """Set ``key`` if it holds the expected value, or is not there and that is empty; return what it holds then."""


@dataclass(frozen=True)
class Identity:
    """This rank in its run.

    Attributes:
        run: id of the run, the same on all its ranks.
        rank: global rank.
        local_rank: rank on its host, as the launcher says; the global rank where no launcher does.
        world_size: ranks in the default process group.
        host: name of the host.
        pid: process id.
        backend: backend of the default process group.
        job: the job the run belongs to.
    """

    run: str
    rank: int
    local_rank: int
    world_size: int
    host: str
    pid: int
    backend: str
    job: Job

    @classmethod
    def of_process(cls, *, run: str, rank: int, world_size: int, backend: str, environ: Mapping[str, str]) -> Identity:
        """The identity of this process."""
        return cls(
            run=run,
            rank=rank,
            local_rank=_number(environ, "LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", default=rank),
            world_size=world_size,
            host=socket.gethostname(),
            pid=os.getpid(),
            backend=backend,
            job=job_of(environ),
        )


def new_run_id(epoch_seconds: float) -> str:
    """A fresh id such as ``20261130T205019-3f9a1c2e``: the time in UTC, and random hexadecimal digits."""
    return time.strftime("%Y%m%dT%H%M%S", time.gmtime(epoch_seconds)) + "-" + secrets.token_hex(4)


def agree_on_run(store: Store, *, attempt: str, proposal: str, is_taken: Callable[[str], bool]) -> str:
    """The id that all ranks of the default group share: that of whichever rank asks first.

    Nobody waits for anybody, and no collective is issued, so it works where only some ranks record.

    Args:
        store: the default group's store. A launcher's store outlives the group and the processes: what was agreed on
            for an earlier group, or in an earlier attempt of the job, is still there.
        attempt: the attempt of the job, the same on all its ranks.
        proposal: the id to use if no other rank has proposed one.
        is_taken: whether this rank has a log of a run already, so that the run is that of an earlier group.
    """
    key = f"ddpan/run/{attempt}"
    held = _text(store.compare_set(key, "", proposal))
    if held != proposal and is_taken(held):
        held = _text(store.compare_set(key, held, proposal))
    return held


def _text(held: Any) -> str:
    return held.decode() if isinstance(held, bytes) else str(held)


def job_of(environ: Mapping[str, str]) -> Job:
    """The job's id and restart count, from torchrun's or Slurm's variables; torchrun's ``none`` is no id."""
    names = [environ.get(name, "") for name in ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID")]
    known = [name for name in names if name not in ("", "none")]
    restart = _number(environ, "TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT", default=0)
    return Job(id=known[0] if known else None, restart=restart)


def _number(environ: Mapping[str, str], *names: str, default: int) -> int:
    for name in names:
        text = environ.get(name, "")
        if text.isdigit():
            return int(text)
    return default
