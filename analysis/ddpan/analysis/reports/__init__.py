"""Reports: results in, text out. They compute nothing; a new one is a module here and a line in `REPORTS`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from . import console, csv, json, markdown

if TYPE_CHECKING:
    from ddpan.analysis.measures.summary import Summary

__all__ = ["REPORTS"]

REPORTS: Final[dict[str, Callable[[Summary], str]]] = {
    "text": console.render,
    "json": json.render,
    "csv": csv.render,
    "markdown": markdown.render,
}
"""The reports by the name of their format."""
