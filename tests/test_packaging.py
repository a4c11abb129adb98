"""What is installed: both halves of the namespace package, typed, with its commands, and no more than is needed."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path, PurePosixPath

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
HALVES = {"ddpan.collector": ROOT / "collector", "ddpan.analysis": ROOT / "analysis"}
HEAVY = {"dask", "distributed", "plotly", "pyarrow", "torch"}


def run(*command: str | Path, cwd: Path | None = None) -> str:
    """What ``command`` prints; only what is installed can be imported in it."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    words = [str(word) for word in command]
    result = subprocess.run(words, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def modules_after(python: str | Path, statement: str) -> set[str]:
    """Names of all modules that a fresh interpreter has after ``statement``."""
    out = run(python, "-c", f"{statement}\nimport json, sys\nprint(json.dumps(sorted(sys.modules)))")
    return set(json.loads(out.splitlines()[-1]))


def requirements(name: str, extras: Iterable[str] = ()) -> set[str]:
    """All that ``name`` needs, needs of needs included, as the metadata of the installed packages say."""
    found: set[tuple[str, str]] = set()
    queue = [(canonicalize_name(name), extra) for extra in ("", *extras)]
    while queue:
        package, extra = queue.pop()
        for requirement in map(Requirement, metadata.requires(package) or []):
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                needed = {(canonicalize_name(requirement.name), e) for e in ("", *requirement.extras)}
                queue.extend(needed - found)
                found |= needed
    return {package for package, _ in found}


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist and the wheel that was built from the sdist."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT)
    return folder


@pytest.fixture(scope="module")
def wheel(archives: Path) -> Path:
    return next(archives.glob("*.whl"))


@pytest.fixture(scope="module")
def bare(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The ``bin`` of an environment with the wheel and what it requires without extras, linked from this one."""
    folder = tmp_path_factory.mktemp("bare")
    run(sys.executable, "-m", "venv", "--without-pip", folder)
    python = folder / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index", wheel)
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    for name in requirements("ddpan"):
        distribution = metadata.distribution(name)
        for top in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
            (site / top).symlink_to(Path(str(distribution.locate_file(top))).resolve())
    return folder / "bin"


@pytest.mark.parametrize("half", HALVES)
def test_editable_install_finds_both_halves_in_the_checkout(half: str) -> None:
    package = importlib.import_module(half)
    assert package.__file__ is not None
    assert Path(package.__file__).is_relative_to(HALVES[half])


def test_namespace_has_no_file_of_its_own() -> None:
    assert not list(ROOT.glob("*/ddpan/__init__.py"))
    assert importlib.import_module("ddpan").__file__ is None


def test_sdist_holds_sources_and_nothing_built(archives: Path) -> None:
    with tarfile.open(next(archives.glob("*.tar.gz"))) as sdist:
        names = {PurePosixPath(*PurePosixPath(name).parts[1:]) for name in sdist.getnames()}
    assert {PurePosixPath(name) for name in ("LICENSE", "README.md", "Makefile", "tests/test_packaging.py")} <= names
    assert not [name for name in names if name.parts and name.parts[0].startswith((".venv", ".git/", "dist"))]


def test_wheel_holds_every_module_and_type_marker(wheel: Path) -> None:
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    expected = {
        str(path.relative_to(root))
        for root in HALVES.values()
        for path in root.rglob("*")
        if path.suffix == ".py" or path.name == "py.typed"
    }
    assert expected <= names
    assert {"ddpan/analysis/py.typed", "ddpan/collector/py.typed"} <= names
    assert "ddpan/__init__.py" not in names
    assert {PurePosixPath(name).parts[0] for name in names} == {"ddpan"}


def test_wheel_declares_commands_and_licence(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    info = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA")).rpartition("/")[0]
    sections = re.findall(r"\[(.+)\]\n(.+)", archive.read(f"{info}/entry_points.txt").decode())
    assert dict(sections) == {
        "console_scripts": "ddpan = ddpan.analysis.cli:main",
        "torch.backends": "ddpan = ddpan.collector.autoload:activate",
    }
    assert b"Apache License" in archive.read(f"{info}/licenses/LICENSE")


@pytest.mark.parametrize("module", ["ddpan.analysis", "ddpan.analysis.cli", "ddpan.collector.schema"])
def test_import_loads_nothing_heavy(module: str) -> None:
    loaded = modules_after(sys.executable, f"import {module}")
    assert module in loaded
    assert not loaded & HEAVY


def test_schema_loads_no_polars() -> None:
    assert "polars" not in modules_after(sys.executable, "import ddpan.collector.schema")


@pytest.mark.parametrize("module", sorted(HEAVY))
def test_bare_environment_lacks(bare: Path, module: str) -> None:
    found = run(bare / "python", "-c", f"import importlib.util; print(importlib.util.find_spec({module!r}))")
    assert found.strip() == "None"


def test_analysis_imports_without_extras(bare: Path) -> None:
    assert "ddpan.analysis" in modules_after(bare / "python", "from ddpan.analysis import load, summarize")


@pytest.mark.parametrize("half", HALVES)
def test_bare_environment_uses_the_wheel(bare: Path, half: str) -> None:
    found = Path(run(bare / "python", "-c", f"import {half}; print({half}.__file__)").strip())
    assert found.is_relative_to(bare.parent)


def test_commands_work_without_extras(bare: Path, tmp_path: Path) -> None:
    version = metadata.version("ddpan")
    assert version in run(bare / "ddpan", "--version", cwd=tmp_path)
    assert "--format" in run(bare / "ddpan", "summarize", "--help", cwd=tmp_path)


def test_constraints_pin_all_that_make_installs() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {canonicalize_name(re.split("[= ]", line)[0]) for line in lines if not line.startswith("#")}
    needed = {name for name in requirements("ddpan", ["dev"]) if not name.startswith(("cuda-", "nvidia-", "triton"))}
    assert needed - {"ddpan"} <= pinned
