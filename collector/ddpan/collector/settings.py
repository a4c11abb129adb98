"""Every ``DDPAN_*`` variable, parsed once into a frozen object. docs/collector.md describes each for users."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Final

from .retention import Limit
from .selection import StepSelection

__all__ = ["VARIABLES", "Settings", "Variable", "from_environment"]

SMALLEST_SEGMENT: Final = 256
SEGMENTS_IN_LIMIT: Final = 16
BYTES_PER_COLLECTIVE: Final = 64 + 72 // 4
"""Bytes of the spool for each collective that a segment holds, its share of step rows included."""


@dataclass(frozen=True)
class Settings:
    """What the user chose.

    Attributes:
        log_dir: folder that receives the logs of all ranks; it must be shared, or be collected, to be read as one.
        segment_collectives: collectives that one segment of the spool, and so one Parquet part, holds.
        steps: the steps to record.
        limit: how much the log of a rank may take, None for no limit.
        quiet: whether rank 0 leaves out its line on starting to record; warnings are always shown.
    """

    log_dir: Path
    segment_collectives: int = 32768
    steps: StepSelection = field(default_factory=StepSelection)
    limit: Limit | None = None
    quiet: bool = False

    def fitting(self) -> Settings:
        """The settings with segments so small that several fit into the limit."""
        if self.limit is None:
            return self
        fit = self.limit.max_bytes // SEGMENTS_IN_LIMIT // BYTES_PER_COLLECTIVE
        return replace(self, segment_collectives=max(SMALLEST_SEGMENT, min(self.segment_collectives, fit)))

    @property
    def segment_steps(self) -> int:
        """Step rows that one segment holds; a step row is a forward, and most forwards have several buckets."""
        return max(64, self.segment_collectives // 4)

    def as_metadata(self) -> dict[str, Any]:
        """The settings as JSON values, for the log's metadata."""
        plain = (int, bool, type(None))
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: value if isinstance(value, plain) else str(value) for name, value in values.items()}


@dataclass(frozen=True)
class Variable:
    """One environment variable: the field that it sets and how its text is read."""

    name: str
    field: str
    parse: Callable[[str], Any]
    accepts: str


def _segment(text: str) -> int:
    value = int(text)
    if not SMALLEST_SEGMENT <= value <= 1 << 24:
        raise ValueError(text)
    return value


def _flag(text: str) -> bool:
    return {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}[text.lower()]


VARIABLES: Final[tuple[Variable, ...]] = (
    Variable("DDPAN_LOG_DIR", "log_dir", Path, "a folder"),
    Variable("DDPAN_SEGMENT_COLLECTIVES", "segment_collectives", _segment, "a number from 256 to 16777216"),
    Variable("DDPAN_STEPS", "steps", StepSelection.parse, "A:B, every=N or A:B,every=N"),
    Variable("DDPAN_MAX_BYTES", "limit", Limit.parse, "a size of at least 1M, such as 500M or 2G,sample"),
    Variable("DDPAN_QUIET", "quiet", _flag, "0 or 1"),
)


def from_environment(environ: Mapping[str, str], *, log_dir: Path | None = None) -> tuple[Settings, list[str]]:
    """Read the settings.

    Args:
        environ: the environment.
        log_dir: the folder, where it does not come from ``DDPAN_LOG_DIR``.

    Returns:
        the settings, and a line of warning for each variable that was not understood and so has its default.

    Raises:
        ValueError: neither ``log_dir`` nor ``DDPAN_LOG_DIR`` names a folder.
    """
    chosen: dict[str, Any] = {}
    warnings = []
    for variable in VARIABLES:
        text = environ.get(variable.name, "").strip()
        if not text:
            continue
        try:
            chosen[variable.field] = variable.parse(text)
        except (ValueError, KeyError):
            warnings.append(f"{variable.name}={text!r} is not {variable.accepts}: the default is used")
    if log_dir is not None:
        chosen["log_dir"] = log_dir
    if "log_dir" not in chosen:
        raise ValueError("no folder to record into: set DDPAN_LOG_DIR or pass log_dir")
    return Settings(**chosen).fitting(), warnings
