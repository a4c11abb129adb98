"""Recording on a device, against a device that is simulated: no CUDA here, and none is claimed."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import polars as pl
import pytest
import torch

from ddpan.collector.clock import Anchor, now_ns
from ddpan.collector.collectives import ALL_REDUCE
from ddpan.collector.cuda import CudaEvents
from ddpan.collector.device_time import DeviceEvents
from ddpan.collector.identity import Identity
from ddpan.collector.parts import committed_records
from ddpan.collector.recording import Recording
from ddpan.collector.schema import read_spool
from ddpan.collector.settings import Settings


class StreamOnHostClock:
    """A device of one stream whose events are passed a fixed time after they were recorded; it counts what is asked."""

    def __init__(self) -> None:
        self.late_ns = 0
        self.stamps: list[int] = []
        self.capturing = False
        self.recorded_while_capturing = 0

    def ready(self) -> bool:
        return not self.capturing

    def record(self) -> int:
        self.recorded_while_capturing += self.capturing
        self.stamps.append(now_ns() + self.late_ns)
        return len(self.stamps) - 1

    def passed(self, event: int) -> bool:
        return self.stamps[event] <= now_ns()

    def elapsed_ns(self, first: int, second: int) -> int:
        return self.stamps[second] - self.stamps[first]

    def release(self, event: int) -> None:
        """Nothing to keep."""


def recording(folder: Path, *, backend: str) -> Recording:
    identity = Identity.of_process(run="run", rank=0, world_size=1, backend=backend, environ={})
    made = Recording(
        Settings(log_dir=folder), identity, anchor=Anchor.take(), tap="test", torch_version="0", device="cpu"
    )
    made.add_group(name="0", ranks=[0], backend=backend)
    return made


def close(told_ns: int, true_ns: int) -> bool:
    """Whether a time is the true one, less what passed between the reading of the clock and the event."""
    return 0 <= true_ns - told_ns < 50_000_000


def one_step(made: Recording) -> None:
    """A step of one module with two buckets: everything is issued at once, the device gets there later."""
    if not made.steps.modules:
        made.steps.add(group=0, names=["w"], reduced_bytes=8, on_device=True)
    [state] = made.steps.modules
    made.steps.begin_forward(state, synced=True)
    made.steps.end_forward(state, synced=True)
    slots = []
    for bucket in range(2):
        slot = made.collectives.launch(0, ALL_REDUCE, 4, 1, state.number, 0, bucket, 0)
        assert slot is not None
        slots.append(slot)
        made.launched(slot)
    for slot in slots:
        made.ender(slot)(None)
    made.steps.end_compute(state)
    made.steps.begin_optimizer(state)
    made.steps.end_optimizer(state)


def test_times_are_the_devices_and_come_later(tmp_path: Path) -> None:
    device = StreamOnHostClock()
    made = recording(tmp_path, backend="cpu:gloo,cuda:nccl")
    made.use_device("cuda", device)
    one_step(made)
    spool = read_spool(made.spool.current.path)
    assert (spool.collectives["end_ns"] == 0).all(), "nothing is known before it is asked for"
    made.steps.begin_forward(made.steps.modules[0], synced=True)
    spool = read_spool(made.spool.current.path)
    forward_start, forward_end, launch0, launch1, end0, end1, compute_end, optimizer_start, optimizer_end = (
        device.stamps[:9]
    )
    step = spool.steps[0]
    assert close(step["forward_start_ns"], forward_start)
    assert close(step["forward_end_ns"], forward_end)
    assert close(step["compute_end_ns"], compute_end)
    assert close(step["optimizer_start_ns"], optimizer_start)
    assert close(step["optimizer_end_ns"], optimizer_end)
    rows = spool.collectives
    assert close(rows["launch_ns"][0], launch0)
    assert close(rows["launch_ns"][1], launch1)
    assert close(rows["end_ns"][0], end0)
    assert close(rows["end_ns"][1], end1)
    np.testing.assert_array_equal(rows["ready_ns"], rows["launch_ns"])
    # The second was launched while the first ran: it starts when the first is over.
    np.testing.assert_array_equal(
        rows["start_ns"], [rows["launch_ns"][0], max(rows["launch_ns"][1], rows["end_ns"][0])]
    )
    assert rows["start_ns"][1] == rows["end_ns"][0]
    made.start()
    made.stop()


def test_a_segment_waits_for_the_device(tmp_path: Path) -> None:
    device = StreamOnHostClock()
    device.late_ns = 60_000_000_000
    made = recording(tmp_path, backend="nccl")
    made.use_device("cuda", device)
    one_step(made)
    assert not made.steps.rows_closed(made.spool.current)
    made.steps.modules[0].row = None
    assert not made.steps.rows_closed(made.spool.current)


def test_gloo_on_device_tensors_ends_on_the_host(tmp_path: Path) -> None:
    device = StreamOnHostClock()
    made = recording(tmp_path, backend="gloo")
    made.use_device("cuda", device)
    slot = made.collectives.launch(0, ALL_REDUCE, 4, 1)
    assert slot is not None
    made.launched(slot)
    made.ender(slot)(None)
    assert device.stamps == []
    assert committed_records(made.spool.current, "collectives")["end_ns"][0] > 0


def test_nothing_is_recorded_while_a_graph_is_captured(tmp_path: Path) -> None:
    device = StreamOnHostClock()
    made = recording(tmp_path, backend="nccl")
    made.use_device("cuda", device)
    device.capturing = True
    slot = made.collectives.launch(0, ALL_REDUCE, 4, 1)
    assert slot is not None
    made.launched(slot)
    made.ender(slot)(None)
    assert device.recorded_while_capturing == 0


class FakeEvent:
    """Stands for `torch.cuda.Event`: the device passes it a moment after its record. Calls that wait are counted."""

    LATE_NS = 3_000_000
    made: ClassVar[int] = 0
    calls: ClassVar[Counter[str]] = Counter()

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing
        FakeEvent.made += 1
        self.passed_ns = 0

    def record(self) -> None:
        FakeEvent.calls["record"] += 1
        self.passed_ns = now_ns() + self.LATE_NS

    def query(self) -> bool:
        return self.passed_ns <= now_ns()

    def elapsed_time(self, other: FakeEvent) -> float:
        if not (self.query() and other.query()):
            FakeEvent.calls["elapsed_time of an event that is not passed"] += 1
        return (other.passed_ns - self.passed_ns) / 1e6

    def synchronize(self) -> None:
        FakeEvent.calls["Event.synchronize"] += 1

    def wait(self) -> None:
        FakeEvent.calls["Event.wait"] += 1


def test_device_is_never_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real `CudaEvents`, on a fake clock of events, through 200 steps and the end of the recording."""
    FakeEvent.made, FakeEvent.calls = 0, Counter()

    def counts(name: str) -> Any:
        return lambda *_args, **_kwargs: FakeEvent.calls.update([name])

    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "synchronize", counts("synchronize"))
    monkeypatch.setattr(torch.cuda.Stream, "synchronize", counts("Stream.synchronize"))
    monkeypatch.setattr(torch.cuda.Stream, "wait_event", counts("Stream.wait_event"))
    made = recording(tmp_path, backend="nccl")
    events: DeviceEvents = CudaEvents()
    made.use_device("cuda", events)
    made.start()
    for _ in range(200):
        one_step(made)
    made.stop()
    assert FakeEvent.calls == {"record": 200 * 9}
    assert FakeEvent.made < FakeEvent.calls["record"], "events are used again"
    parts = [pl.read_parquet(path) for path in made.folder.glob("collectives-*.parquet")]
    rows = pl.concat(parts)
    assert rows.height == 400
    assert rows.select(pl.col("launch_ns", "start_ns", "end_ns").null_count()).row(0) == (0, 0, 0)
