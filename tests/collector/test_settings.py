"""The environment variables: each is read once, a bad one is a warning and the default."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpan.collector.retention import Limit
from ddpan.collector.schema import spool_bytes
from ddpan.collector.selection import StepSelection
from ddpan.collector.settings import VARIABLES, Settings, from_environment

LOGS = {"DDPAN_LOG_DIR": "/tmp/logs"}


def test_defaults() -> None:
    settings, warnings = from_environment(LOGS)
    assert settings == Settings(
        log_dir=Path("/tmp/logs"), segment_collectives=32768, steps=StepSelection(), limit=None, quiet=False
    )
    assert warnings == []


def test_every_setting_has_its_variable() -> None:
    assert sorted(v.field for v in VARIABLES) == sorted(f.name for f in dataclasses.fields(Settings))
    assert all(v.name.startswith("DDPAN_") for v in VARIABLES)
    assert len({v.name for v in VARIABLES}) == len(VARIABLES)


def test_settings_cannot_be_changed() -> None:
    settings, _ = from_environment(LOGS)
    with pytest.raises(dataclasses.FrozenInstanceError):
        settings.quiet = True  # type: ignore[misc]  # that is the point


@pytest.mark.parametrize("text", ["1", "true", "yes", "TRUE", " 1 "])
def test_quiet(text: str) -> None:
    settings, warnings = from_environment(LOGS | {"DDPAN_QUIET": text})
    assert settings.quiet
    assert warnings == []


@pytest.mark.parametrize("text", ["0", "false", "no"])
def test_not_quiet(text: str) -> None:
    settings, warnings = from_environment(LOGS | {"DDPAN_QUIET": text})
    assert not settings.quiet
    assert warnings == []


@pytest.mark.parametrize(
    ("name", "text", "accepted"),
    [
        ("DDPAN_SEGMENT_COLLECTIVES", "many", "256 to 16777216"),
        ("DDPAN_SEGMENT_COLLECTIVES", "255", "256 to 16777216"),
        ("DDPAN_SEGMENT_COLLECTIVES", "16777217", "256 to 16777216"),
        ("DDPAN_SEGMENT_COLLECTIVES", "-5", "256 to 16777216"),
        ("DDPAN_SEGMENT_COLLECTIVES", "1e4", "256 to 16777216"),
        ("DDPAN_STEPS", "100", "A:B, every=N"),
        ("DDPAN_STEPS", "200:100", "A:B, every=N"),
        ("DDPAN_STEPS", "every=0", "A:B, every=N"),
        ("DDPAN_MAX_BYTES", "10K", "at least 1M"),
        ("DDPAN_MAX_BYTES", "500M,newest", "at least 1M"),
        ("DDPAN_MAX_BYTES", "half", "at least 1M"),
        ("DDPAN_QUIET", "perhaps", "0 or 1"),
        ("DDPAN_QUIET", "2", "0 or 1"),
    ],
)
def test_bad_value_is_one_warning_and_the_default(name: str, text: str, accepted: str) -> None:
    settings, warnings = from_environment(LOGS | {name: text})
    assert settings == Settings(log_dir=Path("/tmp/logs"))
    [warning] = warnings
    assert name in warning
    assert repr(text) in warning
    assert accepted in warning
    assert "\n" not in warning


@given(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])))
def test_no_text_is_an_error(text: str) -> None:
    settings, warnings = from_environment(LOGS | {v.name: text for v in VARIABLES if v.name != "DDPAN_LOG_DIR"})
    assert 256 <= settings.segment_collectives <= 1 << 24
    assert len(warnings) <= 4
    assert all(len(w.splitlines()) == 1 for w in warnings)


@given(st.integers(256, 1 << 24))
def test_segment_size(size: int) -> None:
    settings, warnings = from_environment(LOGS | {"DDPAN_SEGMENT_COLLECTIVES": str(size)})
    assert settings.segment_collectives == size
    assert settings.segment_steps >= 64
    assert warnings == []


@pytest.mark.parametrize("environ", [{}, {"DDPAN_LOG_DIR": ""}, {"DDPAN_LOG_DIR": "  "}])
def test_without_a_folder(environ: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="DDPAN_LOG_DIR"):
        from_environment(environ)


def test_argument_goes_before_variable() -> None:
    settings, _ = from_environment(LOGS, log_dir=Path("elsewhere"))
    assert settings.log_dir == Path("elsewhere")


def test_choices_of_the_user() -> None:
    chosen = {"DDPAN_STEPS": "100:200,every=50", "DDPAN_MAX_BYTES": "2G,sample"}
    settings, warnings = from_environment(LOGS | chosen)
    assert warnings == []
    assert settings.steps == StepSelection(first=100, stop=200, every=50)
    assert settings.limit == Limit(max_bytes=2_000_000_000, policy="sample")
    written = settings.as_metadata()
    assert (written["steps"], written["limit"]) == ("100:200,every=50", "2000000000,sample")


def test_several_segments_fit_into_the_limit() -> None:
    settings, _ = from_environment(LOGS | {"DDPAN_MAX_BYTES": "10M"})
    bytes_of_a_segment = spool_bytes(settings.segment_steps, settings.segment_collectives)
    assert bytes_of_a_segment * 10 < 10_000_000
    smallest, _ = from_environment(LOGS | {"DDPAN_MAX_BYTES": "1M"})
    assert spool_bytes(smallest.segment_steps, smallest.segment_collectives) * 10 < 1_000_000


def test_metadata_is_json() -> None:
    settings, _ = from_environment(LOGS)
    assert json.loads(json.dumps(settings.as_metadata())) == {
        "log_dir": "/tmp/logs",
        "segment_collectives": 32768,
        "steps": "0:",
        "limit": None,
        "quiet": False,
    }
