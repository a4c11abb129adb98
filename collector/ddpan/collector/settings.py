"""Every ``DDPAN_*`` variable, parsed once into a frozen object. docs/collector.md describes each for users."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

__all__ = ["VARIABLES", "Settings", "Variable", "from_environment"]


@dataclass(frozen=True)
class Settings:
    """What the user chose.

    Attributes:
        log_dir: folder that receives the logs of all ranks; it must be shared, or be collected, to be read as one.
        segment_collectives: collectives that one segment of the spool, and so one Parquet part, holds.
        quiet: whether rank 0 leaves out its line on starting to record; warnings are always shown.
    """

    log_dir: Path
    segment_collectives: int = 32768
    quiet: bool = False

    @property
    def segment_steps(self) -> int:
        """Step rows that one segment holds; a step row is a forward, and most forwards have several buckets."""
        return max(64, self.segment_collectives // 4)

    def as_metadata(self) -> dict[str, Any]:
        """The settings as JSON values, for the log's metadata."""
        return {name: str(value) if isinstance(value, Path) else value for name, value in asdict(self).items()}


@dataclass(frozen=True)
class Variable:
    """One environment variable: the field that it sets and how its text is read."""

    name: str
    field: str
    parse: Callable[[str], Any]
    accepts: str


def _segment(text: str) -> int:
    value = int(text)
    if not 256 <= value <= 1 << 24:
        raise ValueError(text)
    return value


def _flag(text: str) -> bool:
    return {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}[text.lower()]


VARIABLES: Final[tuple[Variable, ...]] = (
    Variable("DDPAN_LOG_DIR", "log_dir", Path, "a folder"),
    Variable("DDPAN_SEGMENT_COLLECTIVES", "segment_collectives", _segment, "a number from 256 to 16777216"),
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
    return Settings(**chosen), warnings
