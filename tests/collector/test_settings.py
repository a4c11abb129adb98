"""The environment variables: each is read once, a bad one is a warning and the default."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpan.collector.settings import VARIABLES, Settings, from_environment

LOGS = {"DDPAN_LOG_DIR": "/tmp/logs"}


def test_defaults() -> None:
    settings, warnings = from_environment(LOGS)
    assert settings == Settings(log_dir=Path("/tmp/logs"), segment_collectives=32768, quiet=False)
    assert warnings == []


def test_every_setting_has_its_variable() -> None:
    assert sorted(v.field for v in VARIABLES) == sorted(f.name for f in dataclasses.fields(Settings))
    assert all(v.name.startswith("DDPAN_") for v in VARIABLES)
    assert len({v.name for v in VARIABLES}) == len(VARIABLES)


def test_settings_cannot_be_changed() -> None:
    settings, _ = from_environment(LOGS)
    with pytest.raises(dataclasses.FrozenInstanceError):
        settings.quiet = True  # type: ignore[misc] - that is the point


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
    settings, warnings = from_environment(LOGS | {"DDPAN_SEGMENT_COLLECTIVES": text, "DDPAN_QUIET": text})
    assert 256 <= settings.segment_collectives <= 1 << 24
    assert len(warnings) <= 2
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


def test_metadata_is_json() -> None:
    settings, _ = from_environment(LOGS)
    assert json.loads(json.dumps(settings.as_metadata())) == {
        "log_dir": "/tmp/logs",
        "segment_collectives": 32768,
        "quiet": False,
    }
