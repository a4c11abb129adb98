"""Values of command-line options that are more than a word or a number: ranges of steps, sets of ranks."""

from __future__ import annotations

import re
from typing import Final

import click

__all__ = ["rank_set", "step_range"]

_MOST_RANKS: Final = 1_000_000
"""More ranks than any job has: a slip of the finger in a range must not fill the memory."""


def step_range(ctx: click.Context, param: click.Parameter, value: str | None) -> slice | None:
    """Callback of ``--steps``: ``A:B`` as in Python, half open, either side may be left out.

    Raises:
        click.BadParameter: ``value`` is written otherwise, or holds no step.
    """
    if value is None:
        return None
    match = re.fullmatch(r"\s*(\d*)\s*:\s*(\d*)\s*", value, re.ASCII)
    if match is None:
        message = f"{value!r} is no range of steps; write A:B, for example 100:200, 100: or :200."
        raise click.BadParameter(message, ctx=ctx, param=param)
    start, stop = (int(side) if side else None for side in match.groups())
    if stop is not None and stop <= (start or 0):
        message = f"{value!r} holds no step; A:B takes the steps from A up to, but not including, B."
        raise click.BadParameter(message, ctx=ctx, param=param)
    return slice(start, stop)


def rank_set(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[int, ...] | None:
    """Callback of ``--ranks``: ranks and ranges of ranks, both ends included, as in ``0,3-7``.

    Raises:
        click.BadParameter: ``value`` is written otherwise.
    """
    if value is None:
        return None
    ranks: set[int] = set()
    for piece in value.split(","):
        match = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", piece, re.ASCII)
        if match is None:
            raise click.BadParameter(f"{value!r} is no list of ranks; write for example 0,3-7.", ctx=ctx, param=param)
        first, last = int(match[1]), int(match[2] or match[1])
        if not first <= last < _MOST_RANKS:
            message = f"{piece.strip()!r} is no range of ranks; write the lower rank first, below {_MOST_RANKS:,}."
            raise click.BadParameter(message, ctx=ctx, param=param)
        ranks.update(range(first, last + 1))
    return tuple(sorted(ranks))
