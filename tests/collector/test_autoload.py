"""The entry point that torch calls at its import."""

from __future__ import annotations

import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from ddpan.collector import autoload, session

pytestmark = pytest.mark.usefixtures("fresh_messages")


def test_entry_point_is_declared() -> None:
    [entry] = [e for e in entry_points(group="torch.backends") if e.name == "ddpan"]
    assert entry.value == "ddpan.collector.autoload:activate"
    assert entry.load() is autoload.activate


@pytest.mark.parametrize("value", [None, ""])
def test_off(value: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if value is None:
        monkeypatch.delenv("DDPAN_LOG_DIR", raising=False)
    else:
        monkeypatch.setenv("DDPAN_LOG_DIR", value)
    monkeypatch.delitem(sys.modules, "ddpan.collector.session")
    autoload.activate()
    assert "ddpan.collector.session" not in sys.modules


def test_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    started = []
    monkeypatch.setenv("DDPAN_LOG_DIR", str(tmp_path))
    monkeypatch.setattr(session, "start", lambda: started.append(True))
    autoload.activate()
    assert started == [True]


@pytest.mark.parametrize("error", [OSError("no space"), RuntimeError("a bug"), ImportError("no numpy")])
def test_no_exception_leaves(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setenv("DDPAN_LOG_DIR", str(tmp_path))
    monkeypatch.setattr(session, "start", fail)
    autoload.activate()
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("ddpan: warning: cannot start")
    assert str(error) in line
    assert "Training goes on" in line
