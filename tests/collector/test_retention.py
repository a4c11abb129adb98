"""Keeping a rank's log within a number of bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpan.collector.retention import POLICIES, Limit, Retention
from ddpan.collector.schema import TABLES, part_name
from ddpan.collector.segments import segment_name

PART_BYTES = 100_000


@pytest.mark.parametrize(
    ("text", "limit"),
    [
        ("1000000", Limit(1_000_000)),
        ("500M", Limit(500_000_000)),
        ("2G,sample", Limit(2_000_000_000, "sample")),
        ("2g,oldest", Limit(2_000_000_000)),
        ("1T", Limit(10**12)),
        ("1000K", Limit(1_000_000)),
    ],
)
def test_size(text: str, limit: Limit) -> None:
    assert Limit.parse(text) == limit


@pytest.mark.parametrize("text", ["", "M", "999999", "10K", "-5M", "1.5G", "500MB", "500M,newest", "500M,", "five"])
def test_not_a_size(text: str) -> None:
    with pytest.raises(ValueError, match=r".*"):
        Limit.parse(text)


@given(st.integers(10**6, 10**15), st.sampled_from(POLICIES))
def test_text_form_reads_back(max_bytes: int, policy: str) -> None:
    limit = Limit(max_bytes, policy)
    assert Limit.parse(str(limit)) == limit


def write(folder: Path, retention: Retention, parts: int) -> list[int]:
    """Add ``parts`` parts of `PART_BYTES` each; the numbers of those that are kept."""
    for part in range(parts):
        for table in TABLES:
            (folder / part_name(table, part)).write_bytes(bytes(PART_BYTES // len(TABLES)))
        retention.added(part)
        assert sum(path.stat().st_size for path in folder.iterdir()) <= 1_000_000
    kept = {table: sorted(int(p.stem[-6:]) for p in folder.glob(f"{table}-*.parquet")) for table in TABLES}
    assert kept["steps"] == kept["collectives"], "both tables of a part go together"
    return kept["steps"]


def test_oldest_parts_go_first(tmp_path: Path) -> None:
    retention = Retention(tmp_path, Limit(1_000_000))
    assert write(tmp_path, retention, 25) == list(range(15, 25))
    assert retention.removed == 15


def test_sample_keeps_stretches_of_the_whole_run(tmp_path: Path) -> None:
    retention = Retention(tmp_path, Limit(1_000_000, "sample"))
    kept = write(tmp_path, retention, 64)
    assert kept == list(range(0, 64, 8))
    assert retention.removed == 64 - len(kept)


def test_spool_counts(tmp_path: Path) -> None:
    (tmp_path / segment_name(99)).write_bytes(bytes(450_000))
    assert write(tmp_path, Retention(tmp_path, Limit(1_000_000)), 20) == list(range(15, 20))


def test_below_the_limit_all_is_kept(tmp_path: Path) -> None:
    retention = Retention(tmp_path, Limit(1_000_000))
    assert write(tmp_path, retention, 10) == list(range(10))
    assert retention.removed == 0


def test_last_part_stays(tmp_path: Path) -> None:
    """It tells that the recording ended in order, and what was lost until then."""
    retention = Retention(tmp_path, Limit(1_000_000, "sample"))
    write(tmp_path, retention, 33)
    for table in TABLES:
        (tmp_path / part_name(table, 33)).write_bytes(bytes(PART_BYTES // len(TABLES)))
    retention.added(33, last=True)
    assert all((tmp_path / part_name(table, 33)).exists() for table in TABLES)
    assert retention.removed == 33 - len(list(tmp_path.glob("steps-*"))) + 1


def test_room_for_the_spool_is_left_free(tmp_path: Path) -> None:
    """A spare segment may be made at any time, and the log must not outgrow its limit then."""
    retention = Retention(tmp_path, Limit(1_000_000), segment_bytes=100_000)
    assert write(tmp_path, retention, 25) == list(range(18, 25))
