"""DataLoader: the time that the training loop spends waiting for its next batch."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch.utils.data.dataloader import _BaseDataLoaderIter

from ..clock import now_ns
from .patching import Patches

if TYPE_CHECKING:
    from ..session import Session

__all__ = ["install"]


def install(session: Session, patches: Patches) -> None:
    """Time ``__next__`` of every DataLoader iterator, in the main thread."""
    patches.replace(_BaseDataLoaderIter, "__next__", lambda original: _timed(session, original))


def _timed(session: Session, original: Callable[..., Any]) -> Callable[..., Any]:
    main = threading.main_thread()

    @functools.wraps(original)
    def __next__(self: Any) -> Any:  # noqa: N807 - it takes the place of a method of that name
        start_ns = now_ns()
        try:
            return original(self)
        finally:
            recording = session.recording
            if recording is not None and threading.current_thread() is main:
                recording.steps.data_wait_ns += now_ns() - start_ns

    return __next__
