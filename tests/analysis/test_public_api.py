"""The package's names: light to import, complete, and where they should be."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import ddpan.analysis
from ddpan.analysis import errors


def loaded_by(statement: str) -> set[str]:
    code = f"import sys; {statement}; print(*sorted(sys.modules))"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(output.stdout.split())


def test_import_is_light() -> None:
    modules = loaded_by("import ddpan.analysis")
    assert not modules & {"torch", "plotly", "polars", "scipy", "numpy", "rich", "click", "pyarrow"}


def test_analysis_needs_neither_torch_nor_plotly_nor_pyarrow() -> None:
    modules = loaded_by("from ddpan.analysis import facts, load, testing")
    assert not modules & {"torch", "plotly", "pyarrow"}


@pytest.mark.parametrize("name", ddpan.analysis.__all__)
def test_every_public_name_can_be_imported(name: str) -> None:
    assert getattr(ddpan.analysis, name).__name__ == name


def test_unknown_name() -> None:
    name = "nonsense"
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        getattr(ddpan.analysis, name)


def test_names_are_listed() -> None:
    assert set(ddpan.analysis.__all__) <= set(dir(ddpan.analysis))


def test_tree_of_errors_is_the_one_drawn() -> None:
    for name in errors.__all__:
        assert name in (errors.__doc__ or "")
    codes = {name: getattr(errors, name).exit_code for name in ("UsageError", "NoLogError", "DamagedLogError")}
    assert codes == {"UsageError": 2, "NoLogError": 3, "DamagedLogError": 4}
    assert all(issubclass(getattr(errors, name), errors.DdpanError) for name in errors.__all__)


def test_package_is_marked_as_typed() -> None:
    assert (Path(ddpan.analysis.__file__).parent / "py.typed").exists()
