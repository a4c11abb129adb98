"""What every recorded training has in common, as assertions on its rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from ._mode import Log, Row, Run
from ._training import STEPS

__all__ = ["check_backward", "check_bucket_times", "check_buckets", "check_steps", "only", "ops"]

MICRO_BATCH_ENDS: Final = ("compute_end_ns", "backward_end_ns", "optimizer_start_ns", "optimizer_end_ns")
CALLBACK_NS: Final = 50_000_000
"""How much later than the reducer a callback of the backend may be told that a bucket is done."""


def only(runs: list[Run]) -> list[Log]:
    """The logs of the one run."""
    [run] = runs
    return list(run.values())


def ops(rows: Sequence[Row]) -> list[tuple[str, int]]:
    """Kind and bytes of each collective."""
    return [(row["op"], row["bytes"]) for row in rows]


def check_steps(
    log: Log, *, module: int = 0, steps: int = STEPS, cycle: int = 1, first: int = 0, optimizer: bool = True
) -> None:
    """Each step is ``cycle - 1`` forwards that reduce nothing, then one that does, with all its moments in order."""
    rows = log.steps_of(module)
    assert [(row["step"], row["micro_batch"]) for row in rows] == [
        (first + step, micro_batch) for step in range(steps) for micro_batch in range(cycle)
    ]
    for row in rows:
        assert row["synced"] == (row["micro_batch"] == cycle - 1)
        if row["synced"]:
            check_backward(row, optimizer=optimizer)
        else:
            assert row["forward_start_ns"] <= row["forward_end_ns"]
            assert all(row[name] is None for name in MICRO_BATCH_ENDS)


def check_backward(row: Row, *, optimizer: bool = True) -> None:
    """The moments of a forward and of the backward that reduces its gradients are known and in order."""
    names = ["forward_start_ns", "forward_end_ns", "compute_end_ns", "backward_end_ns"]
    names += ["optimizer_start_ns", "optimizer_end_ns"] if optimizer else []
    moments = [row[name] for name in names]
    assert None not in moments, dict(zip(names, moments, strict=True))
    assert moments == sorted(moments)


def check_buckets(
    log: Log,
    sizes: dict[str, list[int]],
    *,
    module: int = 0,
    steps: Sequence[int] = range(STEPS),
    rebuilt_at: int | None = 1,
    exact_bytes: bool = True,
) -> None:
    """The buckets of each of ``steps`` are those that DDP itself tells, each launched and ended once, in order.

    Args:
        log: of one rank.
        sizes: what `buckets_told` told.
        module: number of the module.
        steps: numbers of all its steps that have buckets.
        rebuilt_at: the first step with the rebuilt buckets, None if they are never rebuilt.
        exact_bytes: whether the collective has the bytes of the bucket, as it has unless a hook compresses them.
    """
    assert {row["step"] for row in log.buckets_of(module)} == set(steps)
    synced = {row["step"]: row for row in log.steps_of(module) if row["synced"]}
    for step in steps:
        rebuilt = rebuilt_at is not None and step >= rebuilt_at
        expected = sizes["rebuilt" if rebuilt else "first"]
        rows = log.buckets_of(module, step)
        assert [row["bucket"] for row in rows] == list(range(len(expected))), f"step {step}"
        assert {row["layout"] for row in rows} == {int(rebuilt)}
        if exact_bytes:
            assert [row["bytes"] for row in rows] == expected
        check_bucket_times(rows, synced[step])


def check_bucket_times(rows: Sequence[Row], step: Row) -> None:
    """All-reduces that were launched within the backward of ``step`` and ended by its end."""
    for row in rows:
        assert row["op"] == "all_reduce"
        assert row["end_ns"] is not None
        assert step["forward_end_ns"] <= row["launch_ns"] <= row["end_ns"]
        assert row["launch_ns"] <= step["compute_end_ns"]
        assert row["end_ns"] <= step["backward_end_ns"] + CALLBACK_NS
        assert row["ready_ns"] is None or step["forward_end_ns"] <= row["ready_ns"] <= row["launch_ns"]
