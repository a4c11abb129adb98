"""Entry point that torch calls at the end of ``import torch`` (group ``torch.backends``, torch >= 2.5).

Any exception that left `activate` would make ``import torch`` fail, so none does.
"""

from __future__ import annotations

import os

__all__ = ["activate"]


def activate() -> None:
    """Start the collector if ``DDPAN_LOG_DIR`` is set; otherwise do nothing at all."""
    if not os.environ.get("DDPAN_LOG_DIR"):
        return
    try:
        from .session import start

        start()
    except Exception as error:
        from .messages import say

        say(f"warning: cannot start: {error!r}. Training goes on without a log.")
