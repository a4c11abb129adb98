"""Whose work it is that somebody waits for, and whether the training stands still meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from ddpan.collector.clock import now_ns
from ddpan.collector.collectives import ALL_REDUCE, Collectives
from ddpan.collector.schema import read_spool
from ddpan.collector.segments import Slot, Spool
from ddpan.collector.session import Session
from ddpan.collector.settings import from_environment
from ddpan.collector.taps.others import Others
from ddpan.collector.taps.patching import Patches
from ddpan.collector.taps.reductions import Reductions


class Work:
    """What a backend hands out for a collective, as far as it concerns the collector."""

    def __init__(self) -> None:
        self.callbacks: list[Callable[[object], None]] = []

    def get_future(self) -> Any:
        return SimpleNamespace(add_done_callback=self.callbacks.append)

    def wait(self) -> None:
        for callback in self.callbacks:
            callback(None)


class Recorded:
    """A recording of collectives on the class of works above."""

    def __init__(self, spool: Spool, folder: Path, patches: Patches) -> None:
        self.collectives = Collectives(spool)
        self.collectives.add_group(0)
        settings, _ = from_environment({}, log_dir=folder)
        session: Any = Session(settings, environ={})
        session.recording = self
        self.others = Others(session, Reductions(session), look=lambda: None)
        self.others.install(patches)
        self.ender = self.collectives.ender
        self._folder = folder

    def runs_on_device(self, _slot: Slot) -> bool:
        return False

    def issue(self, work: Work) -> None:
        slot = self.collectives.launch(0, ALL_REDUCE, 8, now_ns())
        assert slot is not None
        self.others.issued(self, slot, work)  # type: ignore[arg-type]

    def rows(self) -> list[tuple[bool, bool]]:
        """Of each collective: whether it ended, and whether the rank stood still for it."""
        [path] = self._folder.glob("live-*.spool")
        columns = read_spool(path).columns("collectives")
        known = [~missing for _, missing in (columns["end_ns"], columns["wait_start_ns"]) if missing is not None]
        return list(zip(*(column.tolist() for column in known), strict=True))


@pytest.fixture
def recorded(make_spool: Callable[..., Spool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(dist, "Work", Work)
    patches = Patches()
    yield Recorded(make_spool(), tmp_path, patches)
    patches.restore()


def test_the_training_stands_still_where_it_waits(recorded: Recorded) -> None:
    work = Work()
    recorded.issue(work)
    assert recorded.rows() == [(False, False)]
    work.wait()
    assert recorded.rows() == [(True, True)]


def test_a_work_with_the_id_of_one_that_is_over_is_another(recorded: Recorded) -> None:
    """The first is never waited for, the second is not recorded."""
    first, second = Work(), Work()
    recorded.issue(first)
    for ended in first.callbacks:
        ended(None)
    awaited = recorded.others._awaited
    awaited[id(second)] = awaited.pop(id(first))
    second.wait()
    assert recorded.rows() == [(True, False)]


def test_another_thread_that_waits_does_not_hold_up_the_training(recorded: Recorded) -> None:
    work = Work()

    def beside() -> None:
        recorded.issue(work)
        work.wait()

    thread = threading.Thread(target=beside)
    thread.start()
    thread.join()
    assert recorded.rows() == [(True, False)]
