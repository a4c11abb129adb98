"""Per bucket and rank: means over all steps, medians over a sample of them, in bounded memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import polars as pl

from ._lattice import Floats, Integers

__all__ = ["QUANTITIES", "BucketTotals", "bucket_schema"]

QUANTITIES: Final = ("lateness", "wait", "transfer", "duration", "exposed", "queue")
_SAMPLE_VALUES: Final = 500_000
_MIN_SAMPLED_STEPS: Final = 64


def bucket_schema() -> pl.Schema:
    """Columns and types of the table of buckets."""
    keys = {"module": pl.UInt16, "layout": pl.UInt16, "bucket": pl.UInt16, "rank": pl.UInt32, "n": pl.UInt32}
    values = {f"{name}_{kind}_ns": pl.Float64 for name in QUANTITIES for kind in ("mean", "median")}
    return pl.Schema({**keys, "bytes": pl.UInt64, **values, "last_share": pl.Float64})


class BucketTotals:
    """Sums over the steps of one bucket layout.

    Means are over all steps. Medians are over a sample of steps, drawn evenly by a hash of the step's number so that
    no rhythm of the training can fall in with it; it holds every step as long as that is at most half a million
    values (steps by buckets by ranks), and at least 64 steps.

    Attributes:
        buckets: number of buckets.
    """

    def __init__(self, buckets: int, ranks: int) -> None:
        shape = (buckets, ranks)
        self.buckets = buckets
        self._sums = {name: np.zeros(shape) for name in QUANTITIES}
        self._counts = {name: np.zeros(shape, np.int64) for name in QUANTITIES}
        self._latest = np.zeros(shape, np.int64)
        self._bytes = np.zeros(buckets, np.int64)
        self._room = max(_MIN_SAMPLED_STEPS, _SAMPLE_VALUES // max(1, buckets * ranks))
        self._limit = 1 << 32
        self._sampled: list[tuple[Integers, dict[str, Floats]]] = []

    def add(
        self,
        steps: Integers,
        payload: Integers,
        values: Mapping[str, Floats],
        latest: npt.NDArray[np.bool_],
    ) -> None:
        """Add a chunk of steps.

        Args:
            steps: step numbers, shape (steps,).
            payload: bytes, shape (steps, buckets).
            values: each quantity, shape (steps, buckets, ranks), NaN where unknown.
            latest: whether the rank was the last to launch, of the same shape.
        """
        self._latest += latest.sum(axis=0)
        self._bytes = np.maximum(self._bytes, payload.max(axis=0))
        for name, value in values.items():
            total = value.sum(axis=0)
            if np.isnan(total).any():
                known = ~np.isnan(value)
                total = np.where(known, value, 0).sum(axis=0)
                self._counts[name] += known.sum(axis=0)
            else:
                self._counts[name] += len(steps)
            self._sums[name] += total
        self._sample(steps, values)

    def frame(self, module: int, layout: int, ranks: Sequence[int]) -> pl.DataFrame:
        """One row per (bucket, rank)."""
        buckets = self.buckets
        columns: dict[str, Any] = {
            "module": np.full(buckets * len(ranks), module),
            "layout": np.full(buckets * len(ranks), layout),
            "bucket": np.repeat(np.arange(buckets), len(ranks)),
            "rank": np.tile(np.asarray(ranks), buckets),
            "n": self._counts["lateness"].ravel(),
            "bytes": np.repeat(self._bytes, len(ranks)),
        }
        for name in QUANTITIES:
            columns[f"{name}_mean_ns"] = _ratio(self._sums[name], self._counts[name]).ravel()
            columns[f"{name}_median_ns"] = self._median(name).ravel()
        columns["last_share"] = _ratio(self._latest, self._counts["lateness"]).ravel()
        return pl.DataFrame(columns).with_columns(pl.col(pl.Float64).fill_nan(None)).cast(bucket_schema())

    def _sample(self, steps: Integers, values: Mapping[str, Floats]) -> None:
        drawn = _hash(steps) < self._limit
        if drawn.any():
            self._sampled.append((steps[drawn], {name: value[drawn] for name, value in values.items()}))
        while sum(len(numbers) for numbers, _ in self._sampled) > self._room:
            self._limit //= 2
            self._sampled = [_thinned(numbers, kept, self._limit) for numbers, kept in self._sampled]

    def _median(self, name: str) -> Floats:
        shape = self._sums[name].shape
        if not self._sampled:
            return np.full(shape, np.nan)
        values = np.concatenate([kept[name] for _, kept in self._sampled])
        by_cell = np.ascontiguousarray(values.reshape(len(values), -1).T)
        known = (~np.isnan(by_cell)).sum(axis=1)
        if (known == len(values)).all():
            return np.asarray(np.median(by_cell, axis=1)).reshape(shape)
        by_cell.sort(axis=1)  # what is unknown goes last
        cells, last = np.arange(len(by_cell)), np.maximum(known - 1, 0)
        median = (by_cell[cells, last // 2] + by_cell[cells, (last + 1) // 2]) / 2
        return np.where(known > 0, median, np.nan).reshape(shape)


def _thinned(steps: Integers, values: dict[str, Floats], limit: int) -> tuple[Integers, dict[str, Floats]]:
    kept = _hash(steps) < limit
    return steps[kept], {name: value[kept] for name, value in values.items()}


def _hash(steps: Integers) -> Integers:
    """Multiplicative hash to 32 bits: the fractional parts of multiples of the golden ratio, which spread evenly."""
    return (steps * 2654435769) % (1 << 32)


def _ratio(total: npt.NDArray[Any], count: Integers) -> Floats:
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)
