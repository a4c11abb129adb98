"""What the tests of modes and frameworks share: the rows of a rank, and what the documentation says of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from .modes import Log

if TYPE_CHECKING:
    from .conftest import RankLog

__all__ = ["as_log", "tell"]


def as_log(log: RankLog, told: Mapping[str, Any]) -> Log:
    """The log of a rank as rows, with what the training of this rank told about itself."""
    return Log(
        rank=log.metadata["rank"],
        steps=log.steps.to_dicts(),
        collectives=log.collectives.to_dicts(),
        metadata=dict(log.metadata),
        told=dict(told),
    )


def tell(logs: Iterable[Log], record_property: Callable[[str, object], None]) -> None:
    """Put what the table in the documentation says into the report of the test."""
    logs = list(logs)
    record_property("tap", logs[0].metadata["tap"])
    record_property("torch", torch.__version__.partition("+")[0])
    record_property("forwards", sum(len(log.steps) for log in logs))
    record_property("backwards", sum(row["backward_end_ns"] is not None for log in logs for row in log.steps))
    record_property("buckets", sum(row["bucket"] is not None for log in logs for row in log.collectives))
