"""Replacing attributes of torch, and putting them back."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

import torch

__all__ = ["Patches", "observed"]

_INHERITED: Final = object()


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
        # What a class hands out is not what it holds: of a method of a compiled class it is a function that no longer
        # binds to an instance, and what a base class holds is not the owner's at all.
        self._undo.append((owner, name, vars(owner).get(name, _INHERITED)))
        setattr(owner, name, replacement)

    def restore(self) -> None:
        """Put everything back, the latest first."""
        while self._undo:
            owner, name, held = self._undo.pop()
            if held is _INHERITED:
                delattr(owner, name)
            else:
                setattr(owner, name, held)


def observed(
    original: Callable[..., Any],
    *,
    before: Callable[[Any], object] | None = None,
    after: Callable[[Any], object] | None = None,
) -> Callable[..., Any]:
    """The method ``original``, with functions called around it that are given its object; not in compiled code."""

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return original(self, *args, **kwargs)
        if before is not None:
            before(self)
        result = original(self, *args, **kwargs)
        if after is not None:
            after(self)
        return result

    return method
