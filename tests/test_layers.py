"""The import contracts of pyproject.toml do break when a layer is crossed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
COLLECTOR = "collector/ddpan/collector"
ANALYSIS = "analysis/ddpan/analysis"
LINT_IMPORTS = Path(sys.executable).with_name("lint-imports")


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    for name in ("collector", "analysis"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(str(folder / name) for name in ("collector", "analysis"))
    environment = os.environ | {"PYTHONPATH": path, "COLUMNS": "200"}
    command = [str(LINT_IMPORTS), "--no-cache", "--no-logo"]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_contracts_are_kept(sources: Path) -> None:
    result = lint(sources)
    assert result.returncode == 0, result.stdout
    assert "0 broken" in result.stdout


@pytest.mark.parametrize(
    ("folder", "statement", "contract"),
    [
        (COLLECTOR, "import ddpan.analysis.run", "the collector imports neither the analysis nor polars"),
        (COLLECTOR, "import polars", "the collector imports neither the analysis nor polars"),
        (f"{COLLECTOR}/schema", "import torch", "the schema stands alone"),
        (f"{COLLECTOR}/schema", "import ddpan.collector.settings", "the schema stands alone"),
        (f"{ANALYSIS}/measures", "import ddpan.collector.settings", "the analysis knows the schema"),
        (f"{ANALYSIS}/reports", "def late():\n    import torch", "the analysis knows the schema"),
        (f"{ANALYSIS}/measures", "import ddpan.analysis.reports", "cli, then reports"),
        (f"{ANALYSIS}/reports", "from ddpan.analysis import cli", "cli, then reports"),
    ],
)
def test_crossing_a_layer_breaks_its_contract(sources: Path, folder: str, statement: str, contract: str) -> None:
    (sources / folder / "intruder.py").write_text(f"{statement}\n")
    result = lint(sources)
    assert result.returncode == 1, result.stdout
    broken = [line for line in result.stdout.splitlines() if "BROKEN" in line]
    assert len(broken) == 1
    assert broken[0].startswith(contract)
