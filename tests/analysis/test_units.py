"""Numbers with their units, as the reports write them."""

from __future__ import annotations

import math

import pytest

from ddpan.analysis.reports._units import duration, hours, interval, milliseconds, moment, percent, rank_list, size

MS = 1_000_000


class TestUnits:
    @pytest.mark.parametrize(
        ("value_ns", "text"),
        [
            (0, "0.00 ms"),
            (1_500, "0.00 ms"),
            (18_412_345, "18.4 ms"),
            (9_996_000, "10.0 ms"),
            (999_600_000, "1,000 ms"),
            (1_250_000_000, "1.25 s"),
            (-18_412_345, "-18.4 ms"),
            (1_860_000_000_000, "31.0 min"),
            (None, "an unknown time"),
            (math.nan, "an unknown time"),
        ],
    )
    def test_duration(self, value_ns: float | None, text: str) -> None:
        assert duration(value_ns) == text

    @pytest.mark.parametrize(
        ("ratio", "text"),
        [(0.0, "0 %"), (0.0001, "< 0.1 %"), (0.034, "3.4 %"), (0.0996, "10 %"), (0.137, "14 %"), (1.0, "100 %")],
    )
    def test_percent(self, ratio: float, text: str) -> None:
        assert percent(ratio) == text

    @pytest.mark.parametrize(
        ("value", "text"),
        [(512, "512 B"), (1024, "1.0 KiB"), (26_214_400, "25.0 MiB"), (209_715_200, "200 MiB"), (2**40, "1.0 TiB")],
    )
    def test_size(self, value: int, text: str) -> None:
        assert size(value) == text

    def test_interval_has_one_unit(self) -> None:
        assert interval(900_000_000, 1_200_000_000) == "0.90 to 1.20 s"
        assert interval(None, 1.0) == ""

    def test_unknown_values(self) -> None:
        assert [milliseconds(None), percent(math.nan), size(None), moment(0)] == ["-"] * 4

    def test_small_and_large_hours(self) -> None:
        assert [hours(0.00183), hours(3.42), hours(1250.4), hours(0)] == ["0.0018", "3.42", "1,250", "0.00"]

    def test_ranks_are_written_as_the_command_line_reads_them(self) -> None:
        assert rank_list([5, 0, 3, 4, 4, 9]) == "0,3-5,9"
