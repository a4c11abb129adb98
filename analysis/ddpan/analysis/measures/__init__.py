"""Measures: functions from a run to a frozen dataclass whose tables are polars frames; they print and plot nothing."""
