"""Which steps are recorded."""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = ["StepSelection"]

_FORM = re.compile(r"(?:(\d*):(\d*))?(?:(?:^|,)every=(\d+))?")


@dataclass(frozen=True)
class StepSelection:
    """Steps ``first`` up to, but not including, ``stop``, and of each ``every`` of them the first two.

    Two, because a step is measured from the end of the step before it.

    Attributes:
        first: the first step.
        stop: the step at which recording ends, None for never.
        every: length of the cycle; 1 records all steps.
    """

    first: int = 0
    stop: int | None = None
    every: int = 1

    @classmethod
    def parse(cls, text: str) -> StepSelection:
        """Read ``A:B``, ``every=N`` or ``A:B,every=N``; either side of the colon may be left out.

        Raises:
            ValueError: ``text`` is written otherwise or selects nothing.
        """
        match = _FORM.fullmatch(text)
        if match is None or not text:
            raise ValueError(text)
        first, stop, every = (int(group) if group else None for group in match.groups())
        selection = cls(first=first or 0, stop=stop, every=1 if every is None else every)
        if selection.every < 1 or (stop is not None and stop <= selection.first):
            raise ValueError(text)
        return selection

    def __contains__(self, step: int) -> bool:
        if step < self.first or (self.stop is not None and step >= self.stop):
            return False
        return (step - self.first) % self.every < 2

    def __str__(self) -> str:
        steps = f"{self.first}:{'' if self.stop is None else self.stop}"
        return steps if self.every == 1 else f"{steps},every={self.every}"
