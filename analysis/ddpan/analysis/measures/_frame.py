"""From arrays of (steps, ranks) to the table of step facts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import polars as pl

from ._lattice import Floats, Integers, Lattice
from ._peers import Peers

__all__ = ["STEP_FACTS", "step_frame"]

STEP_FACTS: Final[dict[str, Any]] = {
    "module": pl.UInt16,
    "step": pl.UInt32,
    "rank": pl.UInt32,
    "micro_batches": pl.UInt16,
    "warmup": pl.Boolean,
    "layout": pl.UInt16,
    "forward_start_ns": pl.Int64,
    "step_start_ns": pl.Int64,
    "step_end_ns": pl.Int64,
    "step_time_ns": pl.Int64,
    "data_ns": pl.Int64,
    "forward_ns": pl.Int64,
    "backward_ns": pl.Int64,
    "backward_compute_ns": pl.Int64,
    "optimizer_ns": pl.Int64,
    "other_ns": pl.Int64,
    "c10d_forward_ns": pl.Int64,
    "c10d_backward_compute_ns": pl.Int64,
    "c10d_backward_comm_ns": pl.Int64,
    "c10d_overlap_ns": pl.Int64,
    "comm_ns": pl.Int64,
    "hidden_ns": pl.Int64,
    "exposed_ns": pl.Int64,
    "tail_ns": pl.Int64,
    "buckets": pl.UInt16,
    "bytes": pl.UInt64,
    "arrival_ns": pl.Int64,
    "lateness_ns": pl.Int64,
    "first_arrival_ns": pl.Int64,
    "first_lateness_ns": pl.Int64,
    "wait_ns": pl.Int64,
    "transfer_ns": pl.Int64,
    "ranks": pl.UInt32,
    "last": pl.Boolean,
    "complete": pl.Boolean,
}
"""Columns and types of `Facts.steps`."""

_MOMENTS: Final = ("forward_start_ns", "step_start_ns", "step_end_ns")


def step_frame(
    peers: Peers,
    lattice: Lattice,
    columns: Mapping[str, Floats],
    warmup: npt.NDArray[np.bool_],
    base_ns: Integers,
) -> pl.DataFrame:
    """One row per (step, rank) that recorded anything of the step.

    Args:
        peers: the ranks.
        lattice: the block.
        columns: facts by name, shape (steps, ranks), moments relative to ``base_ns``, NaN where unknown.
        warmup: whether each step is warm-up, shape (steps,).
        base_ns: moment that each rank's times count from, shape (ranks,).
    """
    step, rank = np.nonzero(_present(peers, lattice))
    facts = {**columns, "exposed_ns": columns["comm_ns"] - columns["hidden_ns"]}
    layout = np.where(lattice.layout < 0, np.nan, lattice.layout)[step]
    data: dict[str, Any] = {
        "module": np.full(len(step), peers.module),
        "step": lattice.steps[step],
        "rank": np.asarray(peers.ranks)[rank],
        "warmup": warmup[step],
        "layout": _integers(layout),
        "buckets": lattice.count[step],
        "bytes": lattice.payload.sum(axis=1)[step],
    }
    for name, values in facts.items():
        data[name] = _integers(values[step, rank], base_ns[rank] if name in _MOMENTS else None)
    # The same numbers under two names need no memory twice.
    data["c10d_backward_compute_ns"] = data["backward_compute_ns"]
    return pl.DataFrame([pl.Series(name, data[name]).cast(kind) for name, kind in STEP_FACTS.items()])


def _present(peers: Peers, lattice: Lattice) -> npt.NDArray[np.bool_]:
    stepped = ~np.isnan(lattice.times["forward_start_ns"])
    if stepped.all():
        return stepped
    present = np.asarray(stepped | ~np.isnan(lattice.launch).all(axis=1))
    for index, rank in enumerate(peers.ranks):
        if rank in peers.joined:
            present[lattice.steps > peers.joined[rank], index] = False
    return present


def _integers(values: Floats, base_ns: Integers | None = None) -> pl.Series:
    """Whole numbers, null where NaN; ``base_ns`` is added after rounding, so that epoch times stay exact."""
    unknown = np.isnan(values)
    rounded = np.rint(np.where(unknown, 0.0, values)).astype(np.int64)
    series = pl.Series(rounded if base_ns is None else rounded + base_ns)
    if not unknown.any():
        return series
    return series.to_frame("x").select(pl.when(pl.Series(~unknown)).then(pl.col("x"))).to_series()
