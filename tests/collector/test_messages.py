"""What the collector says, on stderr."""

from __future__ import annotations

import io
import sys

import pytest

from ddpan.collector.messages import say, warn_once

pytestmark = pytest.mark.usefixtures("fresh_messages")


def test_say(capsys: pytest.CaptureFixture[str]) -> None:
    say("recording 4 ranks")
    assert capsys.readouterr() == ("", "ddpan: recording 4 ranks\n")


def test_each_kind_of_warning_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    for step in range(3):
        warn_once("disk", f"the disk is full at step {step}")
        warn_once("error", "something else")
    assert capsys.readouterr().err.splitlines() == [
        "ddpan: warning: the disk is full at step 0",
        "ddpan: warning: something else",
    ]


def test_stderr_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    say("nobody reads this")
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stderr", closed)
    say("nor this")


def test_stderr_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(io.StringIO):
        def write(self, _text: str) -> int:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(sys, "stderr", Full())
    warn_once("disk", "the disk is full")


def test_text_that_stderr_cannot_encode(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(raw, encoding="ascii", errors="strict"))
    say("cannot record into /daten/für/uns")


def test_a_line_is_one_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks share a stderr: what is written in two goes may have another rank's line between them."""
    written: list[str] = []

    class Stream(io.StringIO):
        def write(self, text: str) -> int:
            written.append(text)
            return len(text)

    monkeypatch.setattr(sys, "stderr", Stream())
    say("one thing")
    assert written == ["ddpan: one thing\n"]
