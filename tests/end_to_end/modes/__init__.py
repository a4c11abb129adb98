"""Ways in which people use DDP: how each trains, and what its log must say."""

from __future__ import annotations

from . import accumulation, autograd, communication, compiled, construction, lifecycle, several
from ._mode import Log, Mode, Run, Trained, World

__all__ = ["MODES", "Log", "Mode", "Run", "Trained", "World"]

MODES = (
    *accumulation.MODES,
    *construction.MODES,
    *communication.MODES,
    *several.MODES,
    *autograd.MODES,
    *lifecycle.MODES,
    *compiled.MODES,
)
"""Every mode."""
