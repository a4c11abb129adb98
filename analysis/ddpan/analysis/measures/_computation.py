"""The computation of the facts of one module's peers, block by block."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import polars as pl

from ..run import Block
from ._buckets import BucketTotals
from ._comparison import Comparison, communication, compare, exposed_by_bucket
from ._frame import step_frame
from ._lattice import Floats, Integers, Lattice, LatticeBuilder
from ._peers import Peers
from ._windows import Previous, windows

__all__ = ["WARMUP_STEPS", "PeerFacts"]

WARMUP_STEPS: Final = 2
"""Steps at the start of a module that are warm-up under the automatic rule."""

_CHUNK_VALUES: Final = 1 << 16  # arrays of half a megabyte, which stay in the processor's cache
_COMPARED: Final = ("comm_ns", "hidden_ns", "lateness_ns", "first_lateness_ns", "wait_ns", "transfer_ns")


@dataclass(frozen=True)
class _Chunk:
    """Consecutive steps of a lattice with the same bucket layout and the same ranks taking part."""

    steps: slice
    layout: int
    buckets: int
    warmup: bool
    ranks: Integers


class PeerFacts:
    """Facts of one module's peers; feed it the blocks in order.

    Attributes:
        peers: the ranks that are compared.
        frames: the table of steps, a frame for each block.
        recorded: buckets with launch and end, by rank, shape (ranks,).
        incomplete: steps in which a rank that takes part lacks something, by rank, shape (ranks,).
        disputed: rows left out because ranks disagree about which bucket they are.
    """

    def __init__(self, peers: Peers, *, skip_warmup: int | None) -> None:
        ranks = len(peers.ranks)
        self.peers = peers
        self.frames: list[pl.DataFrame] = []
        self.recorded = np.zeros(ranks, np.int64)
        self.incomplete = np.zeros(ranks, np.int64)
        self.disputed = 0
        self._skip_warmup = skip_warmup
        self._builder = LatticeBuilder(peers)
        self._previous = Previous()
        self._totals: dict[int, BucketTotals] = {}

    def add(self, block: Block) -> None:
        """Compute the facts of the peers' steps in ``block``."""
        lattice = self._builder.build(block)
        if lattice is None:
            return
        columns = windows(lattice, self._previous)
        shape = columns["step_start_ns"].shape
        columns.update({name: np.full(shape, np.nan) for name in (*_COMPARED, "last", "complete", "ranks")})
        warmup = self._warmup(lattice)
        for chunk in self._chunks(lattice, warmup):
            self._add_chunk(lattice, chunk, columns)
        self.disputed += lattice.disputed
        self.frames.append(step_frame(self.peers, lattice, columns, warmup, self._builder.base_ns))

    def bucket_frames(self) -> Iterator[pl.DataFrame]:
        """The table of buckets, a frame for each layout."""
        for layout, totals in sorted(self._totals.items()):
            yield totals.frame(self.peers.module, layout, self.peers.ranks)

    def _warmup(self, lattice: Lattice) -> npt.NDArray[np.bool_]:
        if self._skip_warmup is not None:
            return np.asarray(lattice.steps < self._skip_warmup)
        rebuilt = max([*self.peers.bucket_counts, int(lattice.layout.max())], default=0) > 0
        return np.asarray((lattice.steps < WARMUP_STEPS) | ((lattice.layout == 0) & rebuilt))

    def _chunks(self, lattice: Lattice, warmup: npt.NDArray[np.bool_]) -> Iterator[_Chunk]:
        taking = self.peers.expected(lattice.steps)
        key = np.column_stack([lattice.layout, lattice.count, warmup, taking])
        cuts = np.flatnonzero((key[1:] != key[:-1]).any(axis=1)) + 1
        for begin, end in zip([0, *cuts], [*cuts, len(key)], strict=True):
            buckets = int(lattice.count[begin])
            size = max(1, _CHUNK_VALUES // max(1, buckets * len(self.peers.ranks)))
            for first in range(begin, end, size):
                steps = slice(first, min(first + size, end))
                ranks = np.flatnonzero(taking[begin])
                yield _Chunk(steps, int(lattice.layout[begin]), buckets, bool(warmup[begin]), ranks)

    def _add_chunk(self, lattice: Lattice, chunk: _Chunk, columns: Mapping[str, Floats]) -> None:
        steps = chunk.steps
        columns["ranks"][steps] = len(chunk.ranks)
        columns["complete"][steps] = 0
        if chunk.buckets == 0:
            return
        launch, end = lattice.launch[steps, : chunk.buckets], lattice.end[steps, : chunk.buckets]
        computing = lattice.times["forward_end_ns"][steps], lattice.times["compute_end_ns"][steps]
        stood = None if lattice.wait_start is None else lattice.wait_start[steps, : chunk.buckets]
        own = communication(launch, end, *computing, stood)
        columns["comm_ns"][steps], columns["hidden_ns"][steps] = own.comm, own.hidden
        whole = ~np.isnan(own.comm)
        self.recorded += (~np.isnan(end - launch)).sum(axis=(0, 1))
        self.incomplete[chunk.ranks] += (~whole[:, chunk.ranks]).sum(axis=0)
        if len(chunk.ranks) == 0:
            return
        all_take_part = len(chunk.ranks) == launch.shape[2]
        some = slice(None) if all_take_part else chunk.ranks
        still = None if stood is None else stood[:, :, some]
        compared = compare(launch[:, :, some], end[:, :, some], columns["step_start_ns"][steps][:, some], still)
        _note(columns, steps, some, compared, whole[:, some])
        if not chunk.warmup:
            exposed = exposed_by_bucket(launch, end, *computing, stood) + np.where(whole, 0.0, np.nan)[:, None]
            queue = launch - lattice.ready[steps, : chunk.buckets]
            self._add_buckets(lattice, chunk, {"duration": end - launch, "exposed": exposed, "queue": queue}, compared)

    def _add_buckets(self, lattice: Lattice, chunk: _Chunk, own: dict[str, Floats], compared: Comparison) -> None:
        ranks = len(self.peers.ranks)
        transfer = np.broadcast_to(compared.transfer[:, :, None], compared.wait.shape)
        values = {"lateness": compared.lateness, "wait": compared.wait, "transfer": transfer}
        if len(chunk.ranks) < ranks:
            values = {name: _widened(some, chunk.ranks, ranks, np.nan) for name, some in values.items()}
        latest = _widened(compared.latest, chunk.ranks, ranks, False)
        totals = self._totals.get(chunk.layout)
        if totals is None or totals.buckets < chunk.buckets:
            totals = self._totals[chunk.layout] = BucketTotals(chunk.buckets, ranks)
        if totals.buckets == chunk.buckets:
            payload = lattice.payload[chunk.steps, : chunk.buckets]
            totals.add(lattice.steps[chunk.steps], payload, values | own, latest)


def _widened(values: npt.NDArray[Any], ranks: Integers, width: int, missing: float | bool) -> npt.NDArray[Any]:
    """Spread the values of some ranks, the last axis, over all ``width`` of them."""
    wide = np.full((*values.shape[:-1], width), missing, values.dtype)
    wide[..., ranks] = values
    return wide


def _note(
    columns: Mapping[str, Floats], steps: slice, some: Any, compared: Comparison, whole: npt.NDArray[np.bool_]
) -> None:
    columns["complete"][steps] = whole.all(axis=1, keepdims=True)
    shape = whole.shape
    lateness = compared.lateness[:, -1]
    noted = {
        "lateness_ns": lateness,
        "first_lateness_ns": compared.lateness[:, 0],
        "wait_ns": compared.wait.sum(axis=1),
        "transfer_ns": np.broadcast_to(compared.transfer.sum(axis=1)[:, None], shape),
        "last": np.where(np.isnan(lateness), np.nan, compared.latest[:, -1]),
    }
    for name, values in noted.items():
        columns[name][steps, some] = values
