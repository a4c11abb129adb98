"""Metadata of a log: one JSON object, in every Parquet part under the key `METADATA_KEY` and in ``live.json``.

The file ``live.json`` of a rank's folder holds the newest metadata while the process runs, and stays after a crash.
"""

from __future__ import annotations

from typing import Any, Final, TypedDict

__all__ = [
    "LIVE_METADATA",
    "METADATA_KEY",
    "PART_PATTERN",
    "BucketInfo",
    "Clock",
    "Counters",
    "GroupInfo",
    "Job",
    "Metadata",
    "ModuleInfo",
    "part_name",
    "rank_folder",
]

METADATA_KEY: Final = "ddpan"
LIVE_METADATA: Final = "live.json"
PART_PATTERN: Final = "*-[0-9][0-9][0-9][0-9][0-9][0-9].parquet"


class Job(TypedDict):
    """The job a run belongs to: its id from the launcher or scheduler, and how often it was restarted before."""

    id: str | None
    restart: int


class Clock(TypedDict):
    """How the rank's monotonic clock was anchored to wall time, once, at the start.

    ``uncertainty_ns`` is half the time between the two readings of the wall clock around the anchor.
    """

    anchor_monotonic_ns: int
    anchor_epoch_ns: int
    uncertainty_ns: int


class GroupInfo(TypedDict):
    """A process group: c10d's name for it, its global ranks in group order, and its backend."""

    name: str
    ranks: list[int]
    backend: str


class ModuleInfo(TypedDict):
    """A module that is trained on several ranks: how it was built.

    ``kind`` says who reduces its gradients: ``ddp``, ``deepspeed`` (an engine), ``fsdp`` (``fully_shard``), or
    ``optimizer`` where nothing but an optimizer was seen. What only DDP knows is false or null elsewhere, and
    ``zero_stage`` is null but for DeepSpeed.

    ``comm_hook`` is null where the user registered none. ``joined_after_step`` is the rank's last step before it ran
    out of inputs under ``join()``, null where it never did; its steps are counted on while it only follows the others.
    """

    kind: str
    name: str
    group: int
    parameters: int
    parameter_bytes: int
    bucket_cap_mb: float | None
    find_unused_parameters: bool
    gradient_as_bucket_view: bool
    static_graph: bool
    comm_hook: str | None
    joined_after_step: int | None
    zero_stage: int | None


class BucketInfo(TypedDict):
    """A bucket of a layout; ``parameters`` is empty where the names are not known."""

    bytes: int
    parameters: list[str]


class Counters(TypedDict):
    """What was lost up to the end of this part, cumulative; what was recorded are the rows.

    ``dropped`` counts events by reason, ``errors`` exceptions inside the recorder, and ``late_ends`` times that became
    known after the row had gone into a part without them. ``removed_parts`` counts parts removed to keep the log within
    the limit that the user set. ``spool_repairs`` counts spool files that were damaged or removed from outside, and
    written anew from memory.
    """

    dropped: dict[str, int]
    errors: int
    late_ends: int
    removed_parts: int
    spool_repairs: int


class Metadata(TypedDict):
    """Everything a reader needs to know beside the rows.

    Keys of ``groups``, ``modules`` and ``layouts`` are the numbers used in the columns, as strings;
    ``layouts[module][layout]`` lists the buckets in index order. ``table`` and ``part`` are null in ``live.json``.
    ``closed`` is true in the last part of a recording that ended in order.
    """

    schema_version: int
    table: str | None
    part: int | None
    run: str
    rank: int
    local_rank: int
    world_size: int
    host: str
    pid: int
    device: str
    backend: str
    tap: str
    versions: dict[str, str]
    job: Job
    clock: Clock
    groups: dict[str, GroupInfo]
    modules: dict[str, ModuleInfo]
    layouts: dict[str, dict[str, list[BucketInfo]]]
    counters: Counters
    settings: dict[str, Any]
    closed: bool


def rank_folder(rank: int) -> str:
    """Name of a rank's folder inside its run's folder."""
    return f"rank-{rank:05d}"


def part_name(table: str, part: int) -> str:
    """Name of a Parquet part inside its rank's folder."""
    return f"{table}-{part:06d}.parquet"
