"""The rows of a block of steps, laid out so that numpy can compare ranks: arrays of step by bucket by rank.

All times are float64 nanoseconds since a moment chosen once for each rank, which keeps them exact for a hundred days;
NaN stands for what is missing and spreads through all arithmetic, so that it can never pass for a zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import polars as pl

from ..run import Block
from ._peers import Peers
from ._slots import Slots, match

__all__ = ["COLLECTIVE_COLUMNS", "STEP_COLUMNS", "Floats", "Integers", "Lattice", "LatticeBuilder"]

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]

STEP_COLUMNS: Final = (
    "rank",
    "module",
    "step",
    "micro_batch",
    "synced",
    "data_wait_ns",
    "forward_start_ns",
    "forward_end_ns",
    "compute_end_ns",
    "backward_end_ns",
    "optimizer_start_ns",
    "optimizer_end_ns",
)
COLLECTIVE_COLUMNS: Final = (
    "rank",
    "group",
    "seq",
    "op",
    "module",
    "step",
    "bucket",
    "layout",
    "bytes",
    "ready_ns",
    "launch_ns",
    "end_ns",
    "wait_start_ns",
)
_MOMENTS: Final = (
    "first_forward_start_ns",
    "forward_start_ns",
    "forward_end_ns",
    "compute_end_ns",
    "backward_end_ns",
    "optimizer_start_ns",
    "optimizer_end_ns",
)
_AMOUNTS: Final = ("data_ns", "forward_ns", "earlier_backward_ns", "micro_batches")


@dataclass(frozen=True)
class Lattice:
    """A block of steps of one module over the ranks that are its peers.

    Attributes:
        steps: step numbers, ascending, shape (steps,).
        layout: bucket layout of each step, -1 where it has no bucket, shape (steps,).
        count: buckets that each step should have, shape (steps,).
        payload: bytes of each bucket on one rank, 0 where unknown, shape (steps, buckets).
        ready, launch, end: times of the collectives, shape (steps, buckets, ranks).
        wait_start: from when on to the end a rank stood still, of the same shape; the end itself where it did not. None
            where no rank did for any bucket.
        times: of each step's synchronised micro-batch, moments as in the table ``steps``; of the whole step
            ``first_forward_start_ns``, ``data_ns``, ``forward_ns``, ``earlier_backward_ns`` (from the end of each
            earlier forward to the start of the next, without the wait for data) and ``micro_batches``; each of shape
            (steps, ranks).
        rows: bucket rows of each rank, shape (ranks,).
        disputed: rows left out because ranks disagree about which bucket they are.
    """

    steps: Integers
    layout: Integers
    count: Integers
    payload: Integers
    ready: Floats
    launch: Floats
    end: Floats
    wait_start: Floats | None
    times: Mapping[str, Floats]
    rows: Integers
    disputed: int


class LatticeBuilder:
    """Lays out the blocks of one module's peers, one after the other.

    Attributes:
        base_ns: the moment from which each rank's times count, nanoseconds since the epoch, shape (ranks,).
    """

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._based = np.zeros(len(peers.ranks), np.bool_)
        self.base_ns = np.zeros(len(peers.ranks), np.int64)
        self._index = np.full(max(peers.ranks) + 1, -1, np.int64)
        self._index[list(peers.ranks)] = np.arange(len(peers.ranks))

    def build(self, block: Block) -> Lattice | None:
        """Lay out the peers' rows of ``block``; None if it has none."""
        steps = _synchronised(self._own(block.steps))
        slots = match(self._own(block.collectives.lazy().drop_nulls(["step", "bucket"]).collect()))
        if steps.height + slots.rows.height == 0:
            return None
        numbers = np.union1d(steps["step"].unique().to_numpy(), slots.steps).astype(np.int64)
        return self._with_buckets(numbers, self._times(numbers, steps), slots)

    def _times(self, numbers: Integers, steps: pl.DataFrame) -> dict[str, Floats]:
        ranks = self._index[steps["rank"].to_numpy()]
        self._set_base(ranks, steps["forward_start_ns"])
        shape = (len(numbers), len(self._peers.ranks))
        where = np.searchsorted(numbers, steps["step"].to_numpy()) * shape[1] + ranks
        base = self.base_ns[ranks]
        times = {name: _spread(_floats(steps[name], base), where, shape) for name in _MOMENTS}
        return times | {name: _spread(_floats(steps[name]), where, shape) for name in _AMOUNTS}

    def _with_buckets(self, numbers: Integers, times: dict[str, Floats], slots: Slots) -> Lattice:
        ranks = self._index[slots.rows["rank"].to_numpy()]
        self._set_base(ranks, slots.rows["launch_ns"])
        at = np.searchsorted(numbers, slots.steps)
        layout = np.full(len(numbers), -1, np.int64)
        layout[at] = slots.layouts
        count = self._counts(layout, at, slots)
        payload = np.zeros((len(numbers), int(count.max())), np.int64)
        payload[at, slots.buckets] = slots.payloads
        shape = (*payload.shape, len(self._peers.ranks))
        where = (at * shape[1] + slots.buckets)[slots.of_row] * shape[2] + ranks
        base = self.base_ns[ranks]
        ready, launch, end = (
            _spread(_floats(slots.rows[name], base), where, shape) for name in ("ready_ns", "launch_ns", "end_ns")
        )
        wait_start = None
        if slots.rows["wait_start_ns"].null_count() < slots.rows.height:
            stood_still = slots.rows.select(pl.coalesce("wait_start_ns", "end_ns")).to_series()
            wait_start = _spread(_floats(stood_still, base), where, shape)
        rows = np.bincount(ranks, minlength=shape[2])
        return Lattice(numbers, layout, count, payload, ready, launch, end, wait_start, times, rows, slots.disputed)

    def _counts(self, layout: Integers, at: Integers, slots: Slots) -> Integers:
        """Buckets that each step should have: as the metadata says, but no fewer than some rank has seen."""
        count = np.zeros(len(layout), np.int64)
        np.maximum.at(count, at, slots.buckets + 1)
        for number, known in self._peers.bucket_counts.items():
            count[layout == number] = np.maximum(count[layout == number], known)
        return count

    def _own(self, frame: pl.DataFrame) -> pl.DataFrame:
        mine = (pl.col("module") == self._peers.module) & pl.col("rank").is_in(self._peers.ranks)
        everything = frame.select(mine.all(ignore_nulls=False)).item()
        return frame if everything else frame.filter(mine)

    def _set_base(self, ranks: Integers, moments: pl.Series) -> None:
        if self._based[ranks].all():
            return
        first = self.base_ns.copy()
        # Of several values for one place numpy keeps the last, so this leaves each rank's first moment.
        first[ranks[::-1]] = moments.to_numpy()[::-1]
        self.base_ns = np.where(self._based, self.base_ns, first)
        self._based[ranks] = True


def _spread(values: Floats, where: Integers, shape: tuple[int, ...]) -> Floats:
    flat = np.full(int(np.prod(shape)), np.nan)
    flat[where] = values
    return flat.reshape(shape)


def _floats(values: pl.Series, base_ns: Integers | None = None) -> Floats:
    """As float64, NaN where null; ``base_ns`` is subtracted first, while whole numbers are still exact."""
    numbers = (values.fill_null(0) if values.null_count() else values).to_numpy()
    floats = (numbers if base_ns is None else numbers - base_ns).astype(np.float64)
    if values.null_count():
        floats[values.is_null().to_numpy()] = np.nan
    return floats


def _synchronised(rows: pl.DataFrame) -> pl.DataFrame:
    """One row per (rank, step) that has a synchronised micro-batch, with the sums over all its micro-batches."""
    forward = pl.col("forward_end_ns") - pl.col("forward_start_ns")
    if rows["synced"].all() and rows["micro_batch"].max() in (None, 0):
        return rows.with_columns(
            first_forward_start_ns=pl.col("forward_start_ns"),
            data_ns=pl.col("data_wait_ns"),
            forward_ns=forward,
            earlier_backward_ns=pl.lit(0, pl.Int64),
            micro_batches=pl.lit(1, pl.Int64),
        )
    return _accumulated(rows, forward)


def _accumulated(rows: pl.DataFrame, forward: pl.Expr) -> pl.DataFrame:
    """`_synchronised` under gradient accumulation; sums are null where a micro-batch is missing."""
    steps = rows.lazy().sort("rank", "step", "micro_batch").group_by("rank", "step", maintain_order=True)
    summed = steps.agg(
        pl.col("synced", "micro_batch", *_MOMENTS[1:]).last(),
        rows=pl.len(),
        first=pl.col("forward_start_ns").first(),
        data=pl.col("data_wait_ns").sum(),
        later_data=pl.col("data_wait_ns").slice(1).sum(),
        forward=pl.when(forward.is_not_null().all()).then(forward.sum()),
        last_forward=forward.last(),
    ).filter("synced")
    whole = pl.col("rows") == pl.col("micro_batch") + 1
    earlier_forward = pl.col("forward") - pl.col("last_forward")
    earlier_backward = pl.col("forward_start_ns") - pl.col("first") - earlier_forward - pl.col("later_data")
    return summed.with_columns(
        first_forward_start_ns=pl.when(whole).then("first"),
        data_ns=pl.when(whole).then("data"),
        forward_ns=pl.when(whole).then("forward"),
        earlier_backward_ns=pl.when(whole).then(earlier_backward),
        micro_batches=pl.col("micro_batch").cast(pl.Int64) + 1,
    ).collect()
