"""Recording inside every rank of a distributed PyTorch training.

Set ``DDPAN_LOG_DIR`` and start the training as always, or call `start` and `stop`.
"""

from __future__ import annotations

import os

__all__ = ["start", "stop"]


def start(log_dir: str | os.PathLike[str] | None = None) -> None:
    """Begin to record this process; the same as setting ``DDPAN_LOG_DIR`` before the start of the program.

    Call it on every rank, best before ``init_process_group``. Started again while it runs, it changes nothing.

    Args:
        log_dir: folder that receives the logs of all ranks; the default is ``DDPAN_LOG_DIR``.

    Raises:
        ValueError: neither ``log_dir`` nor ``DDPAN_LOG_DIR`` names a folder.
        ImportError: torch is not installed.
    """
    from .session import start as start_session

    start_session(log_dir)


def stop() -> None:
    """End the recording: what is in memory goes to disk, and torch is as it was before."""
    from .session import stop as stop_session

    stop_session()
