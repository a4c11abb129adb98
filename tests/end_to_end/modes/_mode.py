"""What a mode is: a training, and what the log must say of it.

The training processes import this package as well as the tests do, so that it needs neither pytest nor polars.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

__all__ = ["Expectation", "Log", "Mode", "Row", "Run", "Trained", "World"]

Row = dict[str, Any]
"""A row of a table by column."""


@dataclass(frozen=True)
class World:
    """What a training is told about its surroundings.

    Attributes:
        rank: global rank.
        size: number of ranks.
        out: folder that all ranks of the launch share.
        start: begins to record, in a launch that is not recorded from the beginning; nothing otherwise.
    """

    rank: int
    size: int
    out: Path
    start: Callable[[], None]


@dataclass
class Trained:
    """What a training leaves behind.

    Attributes:
        modules: whose parameters, buffers and gradients must not depend on the collector.
        told: what the training says about itself, as JSON values.
    """

    modules: Sequence[nn.Module]
    told: dict[str, Any] = field(default_factory=dict)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All parameters, buffers and gradients."""
        states = [tensor for module in self.modules for tensor in module.state_dict().values()]
        gradients = [p.grad for module in self.modules for p in module.parameters() if p.grad is not None]
        return [tensor.detach().clone() for tensor in [*states, *gradients]]


@dataclass(frozen=True)
class Log:
    """The log of one rank of one run.

    Attributes:
        rank: global rank.
        steps: rows of the table ``steps``, in order.
        collectives: rows of the table ``collectives``, in order.
        metadata: the newest metadata.
        told: what the training of this rank told about itself.
    """

    rank: int
    steps: list[Row]
    collectives: list[Row]
    metadata: dict[str, Any]
    told: dict[str, Any]

    @property
    def hooked(self) -> bool:
        """Whether the collectives were seen by the hooks of the process group."""
        return bool(self.metadata["tap"] == "process_group_hooks")

    def steps_of(self, module: int) -> list[Row]:
        """The step rows of a module."""
        return [row for row in self.steps if row["module"] == module]

    def buckets_of(self, module: int, step: int | None = None) -> list[Row]:
        """The buckets of a module, of all steps or of one, in the order of their launch."""
        rows = [row for row in self.collectives if row["module"] == module and row["bucket"] is not None]
        return sorted((row for row in rows if step in (None, row["step"])), key=lambda row: int(row["launch_ns"]))

    def others(self) -> list[Row]:
        """The collectives that are no buckets, in the order of their launch."""
        return sorted((row for row in self.collectives if row["bucket"] is None), key=lambda row: int(row["launch_ns"]))


Run = dict[int, Log]
"""The logs of one run by rank."""

Expectation = Callable[[list[Run]], None]
"""Asserts that the runs of a mode, in order, are what the mode did."""


@dataclass(frozen=True)
class Mode:
    """One way of using DDP.

    Attributes:
        name: for the test's id and the table in the documentation.
        train: the training, called on each rank of a fresh default process group.
        expect: what the log must say.
        ranks: how many there are.
        launch: who starts them: torchrun, or torch.multiprocessing by one of its methods.
        late: whether the training itself begins the recording, in a process that is not recorded before.
        makes_group: whether the training initialises and destroys the default process group itself.
        option: option of DDP that the mode is about, where not every torch has it.
    """

    name: str
    train: Callable[[World], Trained]
    expect: Expectation
    ranks: int = 3
    launch: str = "torchrun"
    late: bool = False
    makes_group: bool = False
    option: str = ""
