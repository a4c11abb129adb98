"""Facts of a chunk of steps: what each rank did in its own buckets, and how it compares with its peers.

Arrays are of shape (steps, ranks) or (steps, buckets, ranks), float64 nanoseconds, NaN where unknown.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ._lattice import Floats

__all__ = ["Communication", "Comparison", "communication", "compare", "exposed_by_bucket"]


@dataclass(frozen=True)
class Communication:
    """A rank's own buckets, each of shape (steps, ranks).

    Attributes:
        comm: length of the union of the buckets' spans from launch to end.
        hidden: the part of it within the backward computation, from the end of forward to the last gradient.
    """

    comm: Floats
    hidden: Floats


@dataclass(frozen=True)
class Comparison:
    """The ranks against one another.

    Attributes:
        lateness: launch since the start of the step, without the time for which the rank stood still in earlier
            buckets, less the median over ranks, shape (steps, buckets, ranks); NaN for all ranks where one of them is
            unknown.
        latest: whether no rank launched later, shape (steps, buckets, ranks); false where lateness is NaN.
        wait: duration less the transfer time, shape (steps, buckets, ranks).
        transfer: the shortest duration of any rank, shape (steps, buckets); NaN where one is unknown.
    """

    lateness: Floats
    latest: npt.NDArray[np.bool_]
    wait: Floats
    transfer: Floats


def communication(
    launch: Floats, end: Floats, forward_end: Floats, compute_end: Floats, wait_start: Floats | None = None
) -> Communication:
    """Communication of each step and rank and the part hidden behind computation; spans may overlap in any way.

    Args:
        launch: shape (steps, buckets, ranks), at least one bucket.
        end: the same shape.
        forward_end: shape (steps, ranks).
        compute_end: the same shape.
        wait_start: from when on to the end the rank stood still, the end where it did not, shape as of ``end``; None
            where no rank did. What a rank stands still for is not hidden.
    """
    begin, until = _laid_end_to_end(launch, end)
    comm = np.maximum(until - begin, 0).sum(axis=1)
    hidden = _within(begin, until, forward_end, compute_end)
    if wait_start is not None:
        hidden -= _within(*_laid_end_to_end(wait_start, end), forward_end, compute_end)
    return Communication(comm, hidden)


def _laid_end_to_end(begin: Floats, end: Floats) -> tuple[Floats, Floats]:
    """Spans in the order of their beginnings, each counted from where all earlier ones have ended."""
    if (begin[:, 1:] < begin[:, :-1]).any():
        order = np.argsort(begin, axis=1)
        begin, end = np.take_along_axis(begin, order, 1), np.take_along_axis(end, order, 1)
    begin = begin.copy()
    np.maximum(begin[:, 1:], np.maximum.accumulate(end, axis=1)[:, :-1], out=begin[:, 1:])
    return begin, end


def _within(begin: Floats, end: Floats, before: Floats, after: Floats) -> Floats:
    """Length of the spans between ``before`` and ``after``, shape (steps, ranks)."""
    np.maximum(begin, before[:, None], out=begin)
    return np.asarray(np.maximum(np.minimum(end, after[:, None]) - begin, 0).sum(axis=1))


def compare(launch: Floats, end: Floats, start: Floats, wait_start: Floats | None = None) -> Comparison:
    """Compare the ranks of each collective.

    Args:
        launch: shape (steps, buckets, ranks).
        end: the same shape.
        start: start of the step on each rank's clock, shape (steps, ranks).
        wait_start: as for `communication`. Where ranks stand still for one bucket they launch the next together, so
            the time that each stood still for earlier buckets does not count towards its arrival at later ones.
    """
    duration = end - launch
    transfer = duration.min(axis=2)
    arrival = launch - start[:, None]
    if wait_start is not None:
        arrival[:, 1:] -= np.cumsum((end - wait_start)[:, :-1], axis=1)
    latest = arrival.max(axis=2, keepdims=True)
    # The maximum is NaN where any rank is, so it marks the collectives that cannot be compared.
    median = np.where(np.isnan(latest), np.nan, _median(arrival))
    return Comparison(arrival - median, arrival >= latest, duration - transfer[:, :, None], transfer)


def exposed_by_bucket(
    launch: Floats, end: Floats, forward_end: Floats, compute_end: Floats, wait_start: Floats | None = None
) -> Floats:
    """Communication outside the backward computation, each moment split evenly among the buckets in flight.

    Args:
        launch: shape (steps, buckets, ranks).
        end: the same shape.
        forward_end: shape (steps, ranks).
        compute_end: the same shape.
        wait_start: as for `communication`.

    Returns:
        shape (steps, buckets, ranks); the sum over buckets is the exposed communication of the step.
    """
    before, after = forward_end[:, None], compute_end[:, None]
    usual = ~((launch < before) | (launch > after)).any(axis=1)
    if wait_start is not None:
        usual &= ~(wait_start < end).any(axis=1)
    exposed = _exposed_tail(np.maximum(end - after, 0))
    if not usual.all():
        steps, ranks = np.nonzero(~usual)
        exposed[steps, :, ranks] = _exposed_anywhere(
            launch[steps, :, ranks],
            end[steps, :, ranks],
            (end if wait_start is None else wait_start)[steps, :, ranks],
            forward_end[steps, ranks],
            compute_end[steps, ranks],
        )
    return exposed


def _exposed_tail(tail: Floats) -> Floats:
    """Shares of the buckets' ``tail`` behind the computation, where all are in flight when it ends."""
    buckets = tail.shape[1]
    exposed = np.zeros_like(tail)
    busy = np.flatnonzero((tail != 0).any(axis=(0, 2)))
    if len(busy) == 0:
        return exposed
    first = int(busy[0])
    tail = tail[:, first:]
    in_order = not (tail[:, 1:] < tail[:, :-1]).any()
    order = None if in_order else np.argsort(tail, axis=1)
    if order is not None:
        tail = np.take_along_axis(tail, order, axis=1)
    share = np.diff(tail, axis=1, prepend=0) / np.arange(buckets - first, 0, -1.0)[:, None]
    share = np.cumsum(share, axis=1)
    if order is None:
        exposed[:, first:] = share
    else:
        np.put_along_axis(exposed[:, first:], order, share, axis=1)
    return exposed


def _exposed_anywhere(launch: Floats, end: Floats, still: Floats, before: Floats, after: Floats) -> Floats:
    """Shares where a bucket is launched outside the computation, or the rank stands ``still`` from some moment on.

    Arrays are of shape (rows, buckets) and (rows,).
    """
    moments = np.sort(np.concatenate([launch, end, still, before[:, None], after[:, None]], axis=1), axis=1)
    begin, stop = moments[:, :-1, None], moments[:, 1:, None]
    flying = (launch[:, None] <= begin) & (stop <= end[:, None])
    computing = (before[:, None] <= begin[..., 0]) & (stop[..., 0] <= after[:, None])
    computing &= ~((still[:, None] <= begin) & (stop <= end[:, None])).any(axis=2)
    length = np.where(computing, 0.0, (stop - begin)[..., 0])
    share = length / np.maximum(flying.sum(axis=2), 1)
    return np.asarray((flying * share[..., None]).sum(axis=1))


def _median(values: Floats) -> Floats:
    """Median over the last axis, which is kept; any value where one is NaN."""
    n = values.shape[2]
    middle = [(n - 1) // 2, n // 2]
    parts = np.partition(values, middle, axis=2)
    return np.asarray((parts[:, :, middle[:1]] + parts[:, :, middle[1:]]) / 2)
