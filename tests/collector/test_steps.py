"""When what is known of a step reaches the file that survives a kill."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddpan.collector.clock import now_ns
from ddpan.collector.collectives import ALL_REDUCE, Collectives
from ddpan.collector.schema import read_spool
from ddpan.collector.segments import Spool
from ddpan.collector.selection import StepSelection
from ddpan.collector.steps import ModuleState, StepRecorder


class Backward:
    """A module in its backward, with two buckets launched of which the first has ended."""

    def __init__(self, folder: Path) -> None:
        identity = {"rank": 0, "world_size": 2, "run": "r", "host": "h"}
        self.spool = Spool(
            folder, epoch_offset_ns=0, identity=identity, steps=8, collectives=8, clock=now_ns, wake=lambda: None
        )
        self.steps = StepRecorder(self.spool, selection=StepSelection())
        collectives = Collectives(self.spool)
        collectives.add_group(0)
        self.module: ModuleState = self.steps.add(group=0, names=[], reduced_bytes=8, on_device=False)
        self.steps.begin_forward(self.module, synced=True)
        self.steps.end_forward(self.module, synced=True)
        for _ in range(2):
            slot = collectives.launch(0, ALL_REDUCE, 4, now_ns())
            assert slot is not None
            self.module.slots.append(slot)
        first = self.module.slots[0]
        assert first is not None
        collectives.ender(first)(None)

    def ended(self) -> list[bool]:
        """Which of the buckets the file says have ended."""
        return [end_ns != 0 for end_ns in read_spool(self.spool.current.path).collectives["end_ns"].tolist()]

    def step(self) -> dict[str, bool]:
        """Which times of the step are in the file."""
        row = read_spool(self.spool.current.path).steps[0]
        return {name: bool(row[f"{name}_ns"] != 0) for name in ("forward_end", "backward_end", "optimizer_end")}


@pytest.fixture
def backward(tmp_path: Path) -> Backward:
    return Backward(tmp_path)


def test_a_launch_is_kept_at_once_and_what_goes_on_by_the_background_thread(backward: Backward) -> None:
    assert backward.ended() == [False, False]
    backward.steps.keep()
    assert backward.ended() == [True, False]
    assert backward.step() == {"forward_end": True, "backward_end": False, "optimizer_end": False}


def test_the_end_of_the_backward_keeps_its_buckets(backward: Backward) -> None:
    backward.steps.end_backward(backward.module)
    assert backward.ended() == [True, True]
    assert backward.step() == {"forward_end": True, "backward_end": True, "optimizer_end": False}


def test_the_end_of_the_optimizer_is_kept(backward: Backward) -> None:
    backward.steps.end_backward(backward.module)
    backward.steps.begin_optimizer(backward.module)
    backward.steps.end_optimizer(backward.module)
    assert all(backward.step().values())
