"""Ranks that are slow together: all those of a host, or of a process group within the one that is compared."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from ..run import Run
from ._arrivals import Arrivals

__all__ = ["Together", "find_together"]


@dataclass(frozen=True)
class Together:
    """Ranks that share something.

    Attributes:
        ranks: all the ranks of it that are compared, two or more, ascending.
        host: name of the host that they share, if it is that.
        group: name of the process group, if it is that.
    """

    ranks: tuple[int, ...]
    host: str | None = None
    group: str | None = None


def find_together(run: Run, arrivals: Arrivals, slow: Collection[int]) -> list[Together]:
    """Sets of ranks of which all are ``slow`` and of which no rank is in another, hosts before groups.

    At least as many ranks must be left to compare them with: where most are late, the others are early.

    Args:
        run: the run.
        arrivals: the ranks that are compared.
        slow: global ranks that are slow.
    """
    found: list[Together] = []
    taken: set[int] = set()
    for one in _candidates(run, arrivals):
        some = 2 <= len(one.ranks) <= len(arrivals.ranks) // 2
        if some and taken.isdisjoint(one.ranks) and set(one.ranks) <= set(slow):
            found.append(one)
            taken.update(one.ranks)
    return found


def _candidates(run: Run, arrivals: Arrivals) -> Iterator[Together]:
    hosts: defaultdict[str, list[int]] = defaultdict(list)
    groups: dict[tuple[int, ...], str] = {}
    for rank in arrivals.ranks:
        metadata = run.metadata[rank]
        hosts[metadata["host"]].append(rank)
        for group in metadata["groups"].values():
            compared = tuple(sorted(set(group["ranks"]) & set(arrivals.ranks)))
            groups.setdefault(compared, group["name"])
    yield from (Together(tuple(ranks), host=host) for host, ranks in sorted(hosts.items()))
    largest_first = sorted(groups.items(), key=lambda one: (-len(one[0]), one[0]))
    yield from (Together(ranks, group=name) for ranks, name in largest_first)
