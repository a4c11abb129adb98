"""Replacing attributes of torch, and putting them back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["Patches"]


class Patches:
    """The attributes replaced so far, with what they were."""

    def __init__(self) -> None:
        self._undo: list[tuple[Any, str, Any]] = []

    def replace(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """Replace ``owner.name`` by ``make(original)``; nothing happens where there is no such attribute."""
        original = getattr(owner, name, None)
        if original is None:
            return
        replacement = make(original)
        self._undo.append((owner, name, original))
        setattr(owner, name, replacement)

    def restore(self) -> None:
        """Put everything back, the latest first."""
        while self._undo:
            owner, name, original = self._undo.pop()
            setattr(owner, name, original)
