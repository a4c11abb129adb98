"""Making callbacks on foreign threads cheap.

A callback on a thread that Python did not start, such as gloo's, gets a thread state made for it and destroyed again
each time, which costs about 70 µs: most of what recording a collective costs. Where the thread calls back again and
again, one state can stay: `keep_thread_state` takes one reference to it, once per thread, and does not give it back.
It lives until the interpreter ends, some 20 KB for each thread that a process group's backend starts.
"""

from __future__ import annotations

import ctypes
from _thread import get_ident
from typing import Final

__all__ = ["keep_thread_state", "kept_threads"]

kept_threads: Final[set[int]] = set()
"""Ids of the threads whose state is kept."""

_ensure = ctypes.pythonapi.PyGILState_Ensure


def keep_thread_state() -> None:
    """Keep this thread's Python state alive; nothing where that was done before."""
    ident = get_ident()
    if ident not in kept_threads:
        kept_threads.add(ident)
        _ensure()
