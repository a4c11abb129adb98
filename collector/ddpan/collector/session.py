"""The collector as a whole: it patches torch when started, keeps the present recording, and undoes all when stopped.

Taps call into the `Session` through guarded functions: whatever goes wrong in here is counted and training goes on.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import ParamSpec

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, distributed_c10d

from .clock import Anchor
from .identity import Identity, agree_on_run, job_of, new_run_id
from .messages import say, warn_once
from .recording import Recording
from .schema import rank_folder
from .settings import Settings, from_environment
from .taps import Taps, install_taps, tap_name

__all__ = ["Session", "current_session", "start", "stop"]

P = ParamSpec("P")


class _Inside(threading.local):
    """How many collectives that are recorded as a whole this thread is in."""

    depth = 0


class Session:
    """The collector of this process.

    Attributes:
        settings: the user's choices.
        recording: the present recording, None while there is no default process group, and after a failure.
        inside: its ``depth`` is above zero while this thread issues collectives as part of something that is recorded
            as a whole.
    """

    def __init__(self, settings: Settings, *, environ: Mapping[str, str]) -> None:
        self.settings = settings
        self.recording: Recording | None = None
        self.inside = _Inside()
        self._environ = environ
        self._groups: dict[int, int] = {}
        self._failed = False
        self._taps: Taps | None = None
        self._training_thread = threading.get_ident()

    def is_training_thread(self) -> bool:
        """Whether this thread trains: it joined the default group, or the autograd engine runs a backward on it."""
        return threading.get_ident() == self._training_thread or torch._C._current_graph_task_id() != -1

    def guard(self, function: Callable[P, object]) -> Callable[P, None]:
        """``function``, made safe: an exception in it is counted and said once, and never leaves."""

        def guarded(*args: P.args, **kwargs: P.kwargs) -> None:
            try:
                function(*args, **kwargs)
            except Exception as error:
                self.failed(error)

        return guarded

    def failed(self, error: Exception) -> None:
        """Count an exception of ours and say so once."""
        if self.recording is not None:
            self.recording.spool.count("errors")
        warn_once("error", f"internal error: {error!r}. Training goes on; parts of the log will be missing.")

    def install(self) -> None:
        """Put the taps in place; a default group that exists already is recorded from now on."""
        self._taps = install_taps(self)
        self.open()

    def uninstall(self) -> None:
        """Close the recording and take all taps out."""
        self.guard(self.close)()
        if self._taps is not None:
            self._taps.forget()
            self._taps.remove()
            self._taps = None

    def open(self) -> None:
        """Begin a recording if there is a default process group and none is recorded yet."""
        if self.recording is not None or self._failed or not dist.is_initialized():
            return
        try:
            self.recording = self._new_recording()
        except Exception as error:
            # One warning, then nothing more is tried: training goes on unrecorded.
            self._failed = True
            why = error.strerror if isinstance(error, OSError) and error.strerror else repr(error)
            warn_once("open", f"cannot record into {self.settings.log_dir}: {why}. Training goes on without a log.")

    def close(self) -> None:
        """End the present recording: what is left goes to disk."""
        recording, self.recording = self.recording, None
        self._groups.clear()
        self._failed = False
        if recording is not None:
            if self._taps is not None:
                self._taps.forget()
            recording.stop()

    def group_number(self, group: ProcessGroup) -> int:
        """The number of a process group, given when its first collective is seen."""
        number = self._groups.get(id(group))
        if number is None:
            number = self._groups[id(group)] = self._add_group(group)
        return number

    def listen_to(self, group: ProcessGroup) -> None:
        """Hang the taps on a process group."""
        if self._taps is not None:
            self._taps.listen_to(group)

    def leave(self, group: ProcessGroup) -> None:
        """A process group is about to be destroyed."""
        self._groups.pop(id(group), None)
        if self._taps is not None:
            self._taps.leave(group)

    def _add_group(self, group: ProcessGroup) -> int:
        if self.recording is None:
            raise RuntimeError("no recording")
        return self.recording.add_group(
            name=group.group_name, ranks=dist.get_process_group_ranks(group), backend=dist.get_backend(group)
        )

    def _new_recording(self) -> Recording:
        self._training_thread = threading.get_ident()
        store = distributed_c10d._get_default_store()
        anchor = Anchor.take()
        rank, world_size = dist.get_rank(), dist.get_world_size()
        log_dir = self.settings.log_dir.absolute()
        run = agree_on_run(
            store,
            attempt=f"{world_size}-{job_of(self._environ)['restart']}",
            proposal=new_run_id(anchor.epoch_ns / 1e9),
            is_taken=lambda run: (log_dir / run / rank_folder(rank)).exists(),
        )
        identity = Identity.of_process(
            run=run,
            rank=rank,
            world_size=world_size,
            backend=dist.get_backend(),
            environ=self._environ,
        )
        self.recording = recording = Recording(
            self.settings,
            identity,
            anchor=anchor,
            tap=tap_name(),
            torch_version=str(torch.__version__),
            device="cpu",
        )
        if self._taps is not None:
            recording.steps.on_pause = self.guard(self._taps.pause)
        self.group_number(distributed_c10d._get_default_group())
        for group in list(distributed_c10d._world.pg_map):
            self.listen_to(group)
        recording.start()
        if identity.rank == 0 and not self.settings.quiet:
            say(
                f"recording {identity.world_size} ranks into {recording.folder.parent}; "
                f"read it with: ddpan summarize {self.settings.log_dir}"
            )
        return recording


_session: Session | None = None
_lock = threading.Lock()


def current_session() -> Session | None:
    """The session of this process, None while the collector is off."""
    return _session


def start(log_dir: str | os.PathLike[str] | None = None) -> None:
    """Begin to record this process; the same as setting ``DDPAN_LOG_DIR`` before the start of the program.

    Call it on every rank, best before ``init_process_group``. Started again while it runs, it changes nothing.

    Args:
        log_dir: folder that receives the logs of all ranks; the default is ``DDPAN_LOG_DIR``.

    Raises:
        ValueError: neither ``log_dir`` nor ``DDPAN_LOG_DIR`` names a folder.
    """
    global _session  # noqa: PLW0603 - one collector per process, as there is one default process group
    settings, warnings = from_environment(os.environ, log_dir=None if log_dir is None else Path(log_dir))
    for warning in warnings:
        warn_once(warning, warning)
    with _lock:
        if _session is not None:
            return
        _session = Session(settings, environ=os.environ)
        _session.guard(_session.install)()
    atexit.register(stop)
    os.register_at_fork(after_in_child=_leave_child)


def stop() -> None:
    """End the recording: what is in memory goes to disk, and torch is as it was before."""
    global _session
    with _lock:
        session, _session = _session, None
    if session is not None:
        session.guard(session.uninstall)()
    atexit.unregister(stop)


def _leave_child() -> None:
    """A forked child shares the parent's mapped files: it must not write into them."""
    if _session is not None:
        _session.recording = None
