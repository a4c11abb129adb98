"""Frameworks that may be imported at any time: watched once they are, and never imported for it."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

from .patching import Patches
from .reductions import Reductions

if TYPE_CHECKING:
    from ..session import Session

__all__ = ["LateTap"]


class LateTap(ABC):
    """Watches the models of a framework whose gradients are reduced by others than DDP.

    Args:
        session: in whose service they are watched.
        reductions: learns of their backwards.
        patches: holds what is replaced.

    Attributes:
        place: module and name of the class that is watched.
    """

    place: ClassVar[tuple[str, str]]

    def __init__(self, session: Session, reductions: Reductions, patches: Patches) -> None:
        self._session = session
        self._reductions = reductions
        self._patches = patches
        self._installed = False

    def install(self) -> None:
        """Watch the class once it is imported; called whenever a process group comes to be, and at collectives."""
        if self._installed:
            return
        module, name = self.place
        watched = getattr(sys.modules.get(module), name, None)
        if watched is not None:
            self._installed = True
            self._watch(watched)

    @abstractmethod
    def _watch(self, watched: Any) -> None:
        """Wrap the methods of the class."""
