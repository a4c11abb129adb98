"""Off means off: without the variable a process is as if the collector were not installed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.end_to_end.conftest import Outcome

RunPython = Callable[..., "Outcome"]


@pytest.fixture(scope="module")
def off(run_python: RunPython) -> Any:
    """A process without ``DDPAN_LOG_DIR``."""
    outcome = run_python("attributes")
    assert outcome.said == []
    return outcome.facts(0)


@pytest.fixture(scope="module")
def without(run_python: RunPython) -> Any:
    """A process in which torch calls no entry point at all."""
    return run_python("attributes", env={"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}).facts(0)


@pytest.fixture(scope="module")
def on(run_python: RunPython, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A process that is recorded."""
    return run_python("attributes", log_dir=tmp_path_factory.mktemp("logs")).facts(0)


def test_no_attribute_of_torch_is_changed(off: Any, without: Any) -> None:
    assert len(off["attributes"]) > 1000
    assert off["attributes"] == without["attributes"]
    assert off["optimizer_hooks"] == without["optimizer_hooks"] == 0


def test_the_comparison_sees_a_recorder(on: Any, without: Any) -> None:
    changed = {name for name, origin in on["attributes"].items() if origin != without["attributes"].get(name)}
    assert "torch.distributed.init_process_group" in changed
    assert "DistributedDataParallel._pre_forward" in changed
    assert on["optimizer_hooks"] == 1
    assert "ddpan.collector.session" in on["modules"]
    assert len(on["threads"]) == len(without["threads"]) + 1


def test_no_thread_is_started(off: Any, without: Any) -> None:
    assert off["threads"] == without["threads"]


def test_only_the_entry_point_is_imported(off: Any) -> None:
    assert off["modules"] == ["ddpan", "ddpan.collector", "ddpan.collector.autoload"]
    assert off["heavy"] == []


def test_no_file_is_made(off: Any, without: Any) -> None:
    assert off["files"] == without["files"] == []


def test_a_recorded_process_does_not_import_polars(on: Any) -> None:
    """Its thread pool would hang the forked workers of a DataLoader."""
    assert "polars" not in on["heavy"]
    assert not any(name.startswith("ddpan.analysis") for name in on["modules"])


def test_torch_without_a_process_group_leaves_no_file(run_python: RunPython, tmp_path: Path) -> None:
    """Every program that imports torch in a shell with the variable set, torchrun itself included."""
    logs = tmp_path / "logs"
    outcome = run_python("nothing", log_dir=logs)
    assert not logs.exists()
    assert outcome.said == []
