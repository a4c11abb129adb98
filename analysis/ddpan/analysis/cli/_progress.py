"""Progress of longer work, shown to a person at a terminal and to nobody else."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

__all__ = ["progress"]

_PATIENCE_S: Final = 1.0
"""Work that is done within this time shows nothing."""

_REFRESH_S: Final = 0.1


class _Bar:
    """What is done and what there is to do, written by the worker and read by the thread that draws."""

    def __init__(self, what: str) -> None:
        self.what = what
        self.share: float | None = None
        self.finished = threading.Event()

    def advance(self, share: float) -> None:
        """Take note that this share of the work is done, 0 to 1."""
        self.share = share

    def draw(self) -> None:
        """Draw on standard error until the work is finished; leave nothing behind."""
        if self.finished.wait(_PATIENCE_S):
            return
        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True, redirect_stdout=False) as display:
            task = display.add_task(self.what, total=None)
            while not self.finished.wait(_REFRESH_S):
                display.update(task, completed=self.share or 0, total=None if self.share is None else 1)


@contextmanager
def progress(what: str) -> Iterator[Callable[[float], None]]:
    """Show how far the work in the ``with`` block is, if it takes long and standard error is a terminal.

    Args:
        what: what is being done, such as "reading logs".

    Yields:
        a function to call with the share of the work that is done, 0 to 1, from the thread that works.
    """
    bar = _Bar(what)
    thread = threading.Thread(target=bar.draw, name="ddpan-progress", daemon=True)
    if sys.stderr is not None and sys.stderr.isatty():
        thread.start()
    try:
        yield bar.advance
    finally:
        bar.finished.set()
        if thread.is_alive():
            thread.join()
