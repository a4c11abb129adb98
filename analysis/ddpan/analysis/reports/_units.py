"""Numbers as people read them: with a unit, and with no more digits than they carry."""

from __future__ import annotations

import math
from collections.abc import Iterable
from datetime import datetime, timezone
from typing import Final

__all__ = [
    "UNKNOWN",
    "duration",
    "fine_milliseconds",
    "hours",
    "interval",
    "listed",
    "milliseconds",
    "moment",
    "percent",
    "plural",
    "rank_list",
    "shown",
    "size",
]

UNKNOWN: Final = "-"
"""What is shown where a value is not known."""

_SECOND_NS: Final = 1_000_000_000


def shown(value: float | None) -> bool:
    """Whether there is a value to show; no number has come out as NaN, but a reader must never see one."""
    return value is not None and math.isfinite(value)


def duration(value_ns: float | None) -> str:
    """A duration for a sentence: "18.4 ms", "1.25 s", "31.0 min"."""
    if value_ns is None or not shown(value_ns):
        return "an unknown time"
    scale, unit = _unit(value_ns)
    return f"{_digits(value_ns / scale)} {unit}"


def interval(low_ns: float | None, high_ns: float | None) -> str:
    """Both ends of an interval in one unit, "17.1 to 19.6 ms"; empty where an end is unknown."""
    if low_ns is None or high_ns is None or not (shown(low_ns) and shown(high_ns)):
        return ""
    scale, unit = _unit(max(abs(low_ns), abs(high_ns)))
    return f"{_digits(low_ns / scale)} to {_digits(high_ns / scale)} {unit}"


def milliseconds(value_ns: float | None) -> str:
    """A cell of a table whose heading says ms: "18.4"."""
    return UNKNOWN if value_ns is None or not shown(value_ns) else _digits(value_ns / 1e6)


def fine_milliseconds(value_ns: float | None) -> str:
    """A cell of a table about clocks whose heading says ms, to the microsecond: "18,000,000.353"."""
    return UNKNOWN if value_ns is None or not shown(value_ns) else f"{value_ns / 1e6:,.3f}"


def percent(ratio: float | None) -> str:
    """A ratio as a percentage: "14 %", "2.5 %", "0 %"."""
    if ratio is None or not shown(ratio):
        return UNKNOWN
    if 0 < abs(ratio) < 0.0005:
        return "< 0.1 %"
    return f"{ratio * 100:.1f} %" if 0 < abs(ratio) < 0.0995 else f"{ratio * 100:.0f} %"


def size(value_bytes: float | None) -> str:
    """A number of bytes: "25.0 MiB"."""
    if value_bytes is None or not shown(value_bytes):
        return UNKNOWN
    if value_bytes < 1024:
        return f"{value_bytes:.0f} B"
    power = min(4, int(math.log2(value_bytes) // 10))
    value = value_bytes / 1024**power
    return f"{value:.{0 if value >= 99.95 else 1}f} {'KMGT'[power - 1]}iB"


def hours(value: float) -> str:
    """A number of hours, without its unit, which is that of whatever is counted: "0.0018", "3.42", "1,250"."""
    return f"{value:.2g}" if 0 < abs(value) < 1 else _digits(value)


def moment(epoch_ns: int) -> str:
    """A moment: "2026-11-30 20:50:19 UTC"; 0 stands for unknown."""
    if epoch_ns <= 0:
        return UNKNOWN
    return datetime.fromtimestamp(epoch_ns // _SECOND_NS, tz=timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")


def plural(number: int, noun: str) -> str:
    """A number and its noun: "1 rank", "64 ranks"."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def listed(names: Iterable[str], *, most: int) -> str:
    """Names with commas, the first ``most`` of them and how many more there are."""
    all_names = list(names)
    more = len(all_names) - most
    return ", ".join(all_names[:most]) + (f" and {more:,} more" if more > 0 else "")


def rank_list(ranks: Iterable[int]) -> str:
    """Ranks as the option ``--ranks`` reads them: "0,3-7"."""
    spans: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)


def _unit(largest_ns: float) -> tuple[float, str]:
    if abs(largest_ns) < _SECOND_NS:
        return 1e6, "ms"
    return (1e9, "s") if abs(largest_ns) < 600 * _SECOND_NS else (60e9, "min")


def _digits(value: float) -> str:
    """Three digits that carry something, two decimals at the most."""
    decimals = 0 if abs(value) >= 99.95 else 1 if abs(value) >= 9.995 else 2
    text = f"{value:,.{decimals}f}"
    return text.removeprefix("-") if float(text.replace(",", "")) == 0 else text
