"""Reports: results in, text out. They compute nothing; a new one is a module here and a line in each dictionary."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from . import console, csv, json, markdown

if TYPE_CHECKING:
    from ddpan.analysis.measures.summary import Summary

    from .document import Document

__all__ = ["DOCUMENTS", "REPORTS"]

REPORTS: Final[dict[str, Callable[[Summary], str]]] = {
    "text": console.render,
    "json": json.render,
    "csv": csv.render,
    "markdown": markdown.render,
}
"""The report of ``ddpan summarize`` by the name of its format."""

DOCUMENTS: Final[dict[str, Callable[[Document], str]]] = {
    "text": console.render_document,
    "json": json.render_document,
    "csv": csv.render_document,
    "markdown": markdown.render_document,
}
"""Reports on a single measure by the name of their format."""
