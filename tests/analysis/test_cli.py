"""The command line: what it accepts, where its output goes, and which code it exits with."""

from __future__ import annotations

import errno
import json
import os
import pty
import stat
import subprocess
import sys
import time
from dataclasses import replace
from importlib import metadata
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from ddpan.analysis.cli import _progress, main
from ddpan.analysis.testing import Fault, Scenario, simulate, write_log

DDPAN = str(Path(sys.executable).with_name("ddpan"))
SLOW = Scenario(steps=60, noise=0.02, faults=(Fault(rank=2, cause="data", delay_ns=30_000_000),))
OLDER = replace(SLOW, ranks=2, faults=(), run="20250101T000000-00c0ffee", start_ns=1_735_689_600_000_000_000)


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one run, whose rank 2 is slow."""
    return write_log(simulate(SLOW), tmp_path_factory.mktemp("one")).parent


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two")
    for scenario in (SLOW, OLDER):
        write_log(simulate(scenario), folder)
    return folder


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A log of which every file was cut in half."""
    folder = tmp_path_factory.mktemp("damaged")
    for path in write_log(simulate(SLOW), folder).rglob("*.parquet"):
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    return folder


def ddpan(*words: str | Path) -> Result:
    return CliRunner().invoke(main, [str(word) for word in words], prog_name="ddpan")


def report(*words: str | Path) -> dict[str, Any]:
    result = ddpan("summarize", *words, "--format", "json")
    assert result.exit_code == 0, result.output
    parsed = json.loads(result.stdout)
    assert isinstance(parsed, dict)
    return parsed


def process(*words: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [DDPAN, *(str(word) for word in words)]
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)


def on_terminal(*words: str | Path, **variables: str) -> str:
    """What ``ddpan`` writes to a terminal of 80 columns on all its outputs."""
    ours, theirs = pty.openpty()
    environment = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    environment |= {"TERM": "xterm-256color", "COLUMNS": "80", **variables}
    command = [DDPAN, *(str(word) for word in words)]
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment):
        os.close(theirs)
        written = b""
        while piece := read_terminal(ours):
            written += piece
    os.close(ours)
    return written.decode()


def read_terminal(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:
        # So Linux reports that the last process on the terminal has ended.
        return b""


class TestOptions:
    def test_text_is_the_default(self, logs: Path) -> None:
        result = ddpan("summarize", logs)
        assert result.exit_code == 0
        assert result.stdout.startswith("Rank 2 (on host-000) is slow in loading its data: in nearly every step it is ")
        assert result.stderr == ""

    @pytest.mark.parametrize(
        ("form", "beginning"), [("json", "{\n"), ("csv", "table,"), ("markdown", "**Rank 2 "), ("text", "Rank 2 ")]
    )
    def test_formats(self, logs: Path, form: str, beginning: str) -> None:
        assert ddpan("summarize", logs, "--format", form).stdout.startswith(beginning)

    @pytest.mark.parametrize(
        ("steps", "used"), [("10:40", (10, 39)), ("30:", (30, 59)), (":40", (2, 39)), (" 10 : 40 ", (10, 39))]
    )
    def test_steps(self, logs: Path, steps: str, used: tuple[int, int]) -> None:
        (module,) = report(logs, "--steps", steps)["modules"]
        assert (module["first_step"], module["last_step"]) == used

    @pytest.mark.parametrize(("ranks", "used"), [("0,2-3", [0, 2, 3]), ("1", [1]), (" 3 , 0 - 1", [0, 1, 3])])
    def test_ranks(self, logs: Path, ranks: str, used: list[int]) -> None:
        assert report(logs, "--ranks", ranks)["run"]["ranks"] == used

    def test_skip_warmup(self, logs: Path) -> None:
        (module,) = report(logs, "--skip-warmup", "7")["modules"]
        assert (module["warmup_steps"], module["first_step"]) == (7, 7)

    def test_newest_run_unless_another_is_chosen(self, two_runs: Path) -> None:
        assert report(two_runs)["run"]["id"] == SLOW.run
        assert report(two_runs, "--run", "2025")["run"]["id"] == OLDER.run

    def test_runs(self, two_runs: Path) -> None:
        result = ddpan("runs", two_runs)
        assert result.exit_code == 0
        assert [line.split()[0] for line in result.stdout.splitlines()] == ["run", SLOW.run, OLDER.run]

    def test_version(self) -> None:
        assert ddpan("--version").stdout == f"ddpan {metadata.version('ddpan')}\n"

    @pytest.mark.parametrize("command", ["summarize", "runs"])
    def test_help_has_an_example(self, command: str) -> None:
        result = ddpan(command, "--help")
        assert result.exit_code == 0
        assert f"  ddpan {command} logs\n" in result.stdout


class TestUsageErrors:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (["--steps", "5"], "'5' is no range of steps; write A:B"),
            (["--steps", "-3:5"], "'-3:5' is no range of steps"),
            (["--steps", "9:3"], "'9:3' holds no step"),
            (["--steps", "1:2:3"], "'1:2:3' is no range of steps"),
            (["--ranks", "a"], "'a' is no list of ranks; write for example 0,3-7"),
            (["--ranks", "0,"], "'0,' is no list of ranks"),
            (["--ranks", "7-3"], "'7-3' is no range of ranks; write the lower rank first"),
            (["--ranks", "0-99999999999"], "'0-99999999999' is no range of ranks"),
            (["--ranks", "0,9"], "no log of rank 9; it has ranks 0-3"),
            (["--skip-warmup", "-1"], "-1 is not in the range"),
            (["--run", "nonesuch"], f"choose one of {SLOW.run}"),
            (["--format", "xml"], "'xml' is not one of 'text', 'json', 'csv', 'markdown'"),
            (["--output", "/nonesuch/report.txt"], "folder /nonesuch does not exist"),
            (["--output", "/tmp"], "'/tmp' is a directory"),
        ],
    )
    def test_exit_2_and_say_what_to_do(self, logs: Path, options: list[str], message: str) -> None:
        result = ddpan("summarize", logs, *options)
        assert result.exit_code == 2
        assert message in result.stderr
        assert result.stdout == ""

    def test_no_command_shows_the_help(self) -> None:
        result = ddpan()
        assert result.exit_code == 2
        assert "summarize" in result.output


class TestExitCodes:
    def test_answered(self, logs: Path) -> None:
        result = process("summarize", logs)
        assert (result.returncode, result.stderr) == (0, "")

    @pytest.mark.parametrize("command", ["summarize", "runs"])
    def test_no_log(self, tmp_path: Path, command: str) -> None:
        (tmp_path / "notes.txt").write_text("nothing of interest")
        for place in (tmp_path, tmp_path / "nonesuch", tmp_path / "notes.txt"):
            result = process(command, place)
            assert (result.returncode, result.stdout) == (3, "")
            assert result.stderr.startswith("Error: ")
            assert result.stderr.count("\n") == 1

    @pytest.mark.parametrize("command", ["summarize", "runs"])
    def test_damaged_log(self, damaged: Path, command: str) -> None:
        result = process(command, damaged)
        assert (result.returncode, result.stdout) == (4, "")
        assert result.stderr.startswith("Error: ")
        assert result.stderr.count("\n") == 1

    def test_usage(self, logs: Path) -> None:
        result = process("summarize", logs, "--ranks", "77")
        assert (result.returncode, result.stdout) == (2, "")
        assert result.stderr.count("\n") == 1

    def test_module_is_the_same_command(self, logs: Path) -> None:
        result = subprocess.run(
            [sys.executable, "-m", "ddpan.analysis", "runs", logs], capture_output=True, text=True, check=True
        )
        assert SLOW.run in result.stdout


class TestOutput:
    def test_file_holds_what_would_be_printed(self, logs: Path, tmp_path: Path) -> None:
        path = tmp_path / "report.txt"
        result = ddpan("summarize", logs, "--output", path)
        assert (result.exit_code, result.output) == (0, "")
        assert path.read_text() == ddpan("summarize", logs).stdout
        assert list(tmp_path.iterdir()) == [path]

    def test_dash_is_standard_output(self, logs: Path) -> None:
        assert ddpan("summarize", logs, "--output", "-").stdout == ddpan("summarize", logs).stdout

    def test_new_file_has_usual_permissions_and_an_old_one_keeps_its_own(self, logs: Path, tmp_path: Path) -> None:
        new, old = tmp_path / "new", tmp_path / "old"
        old.touch(0o600)
        (tmp_path / "reference").touch()
        for path in (new, old):
            assert ddpan("summarize", logs, "--output", path).exit_code == 0
        assert stat.S_IMODE(new.stat().st_mode) == stat.S_IMODE((tmp_path / "reference").stat().st_mode)
        assert stat.S_IMODE(old.stat().st_mode) == 0o600

    def test_link_is_followed(self, logs: Path, tmp_path: Path) -> None:
        target, link = tmp_path / "target", tmp_path / "link"
        link.symlink_to(target)
        assert ddpan("summarize", logs, "--output", link).exit_code == 0
        assert link.is_symlink()
        assert target.read_text().startswith("Rank 2 ")

    def test_failure_leaves_the_old_file_and_nothing_else(
        self, logs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def full(*_: object) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        path = tmp_path / "report.txt"
        path.write_text("yesterday's")
        monkeypatch.setattr(os, "fsync", full)
        result = ddpan("summarize", logs, "--output", path)
        assert result.exit_code == 2
        assert result.stderr == f"Error: cannot write {path}: No space left on device\n"
        assert path.read_text() == "yesterday's"
        assert list(tmp_path.iterdir()) == [path]

    @pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
    def test_folder_without_permission(self, logs: Path, tmp_path: Path) -> None:
        tmp_path.chmod(0o500)
        result = ddpan("summarize", logs, "--output", tmp_path / "report.txt")
        assert result.exit_code == 2
        assert "no permission to write" in result.stderr

    def test_device_is_written_to_and_not_replaced(self, logs: Path) -> None:
        assert process("summarize", logs, "--output", "/dev/null").returncode == 0
        assert stat.S_ISCHR(os.stat("/dev/null").st_mode)

    def test_full_disk_behind_standard_output(self, logs: Path) -> None:
        with Path("/dev/full").open("w") as full:
            result = subprocess.run(
                [DDPAN, "summarize", logs], stdout=full, stderr=subprocess.PIPE, text=True, check=False
            )
        assert result.returncode == 2
        assert result.stderr == "Error: cannot write standard output: No space left on device\n"

    @pytest.mark.parametrize("form", ["text", "json"])
    def test_reader_that_leaves_early_is_no_error(self, logs: Path, form: str) -> None:
        command = [DDPAN, "summarize", str(logs), "--format", form]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as writer:
            assert writer.stdout is not None
            assert writer.stderr is not None
            writer.stdout.close()
            assert writer.stderr.read() == b""
        assert writer.returncode == 0

    def test_encoding_that_lacks_a_letter(self, logs: Path, tmp_path: Path) -> None:
        link = tmp_path / "prüfung"
        link.symlink_to(logs)
        result = process("summarize", link, env={**os.environ, "PYTHONIOENCODING": "ascii"})
        assert result.returncode == 0
        assert "/pr?fung/" in result.stdout


class TestTerminal:
    def test_colour_and_tables_that_fit(self, logs: Path) -> None:
        written = on_terminal("summarize", logs)
        assert "\x1b[1;31mRank 2 " in written
        assert "──────" in written

    def test_no_colour_where_unwanted(self, logs: Path) -> None:
        assert "\x1b[1;3" not in on_terminal("summarize", logs, NO_COLOR="1")
        assert "\x1b[1;3" not in on_terminal("summarize", logs, TERM="dumb")

    def test_no_colour_in_a_pipe(self, logs: Path) -> None:
        environment = {**os.environ, "TERM": "xterm-256color", "FORCE_COLOR": "1"}
        result = process("summarize", logs, env=environment)
        assert "\x1b" not in result.stdout + result.stderr

    def test_file_written_from_a_terminal_is_plain(self, logs: Path, tmp_path: Path) -> None:
        on_terminal("summarize", logs, "--output", tmp_path / "report.txt")
        assert (tmp_path / "report.txt").read_text() == ddpan("summarize", logs).stdout


class Terminal(StringIO):
    """A stream that passes for a terminal."""

    def isatty(self) -> bool:
        return True


class TestProgress:
    def work(self, monkeypatch: pytest.MonkeyPatch, stream: StringIO, *, patience_s: float) -> str:
        """What is written to ``stream``, standard error, during work that takes half a second at most."""
        monkeypatch.setattr(sys, "stderr", stream)
        monkeypatch.setattr(_progress, "_PATIENCE_S", patience_s)
        monkeypatch.setenv("TERM", "xterm")
        with _progress.progress("Reading the log") as advance:
            for share in (0.2, 0.4, 0.6):
                advance(share)
                time.sleep(0.15)
        return stream.getvalue()

    def test_slow_work_at_a_terminal(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert "Reading the log" in self.work(monkeypatch, Terminal(), patience_s=0.0)

    def test_quick_work_at_a_terminal(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert self.work(monkeypatch, Terminal(), patience_s=5.0) == ""

    def test_slow_work_in_a_pipe(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert self.work(monkeypatch, StringIO(), patience_s=0.0) == ""

    def test_error_in_the_work_is_passed_on(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sys, "stderr", Terminal())
        with pytest.raises(KeyError), _progress.progress("Reading the log"):
            raise KeyError


class TestStart:
    @pytest.mark.parametrize("words", [["--help"], ["--version"], ["summarize", "--help"]])
    def test_help_loads_nothing_heavy(self, words: list[str]) -> None:
        statement = (
            "import sys\nfrom ddpan.analysis.cli import main\n"
            f"main({words!r}, standalone_mode=False)\n"
            "print(sorted({'polars', 'numpy', 'scipy', 'torch'} & sys.modules.keys()))"
        )
        result = subprocess.run([sys.executable, "-c", statement], capture_output=True, text=True, check=True)
        assert result.stdout.splitlines()[-1] == "[]"

    @pytest.mark.parametrize(
        ("words", "completions"),
        [
            ("ddpan summ", ["plain,summarize"]),
            ("ddpan summarize --sk", ["plain,--skip-warmup"]),
            ("ddpan summarize --format j", ["plain,json"]),
        ],
    )
    def test_completion(self, words: str, completions: list[str]) -> None:
        asked = {"_DDPAN_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
        assert process(env={**os.environ, **asked}).stdout.splitlines() == completions

    @pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
    def test_completion_script(self, shell: str) -> None:
        result = process(env={**os.environ, "_DDPAN_COMPLETE": f"{shell}_source"})
        assert result.returncode == 0
        assert "_DDPAN_COMPLETE" in result.stdout
