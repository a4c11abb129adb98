"""How often the verdict is right: confusion tables and rates on runs whose answer is known.

    python -m benchmarks.diagnosis [--runs 2000] [--seed 0] [--quick]     synthetic runs, healthy and faulty
    python -m benchmarks.diagnosis --real 50 [--first 0]                  real trainings on this machine, 10 healthy

`population` says how the synthetic runs are drawn and which of their faults anybody could find. A rate is printed with
its 95 % interval (Wilson). Exits with 1 if a rate misses its bar.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from ddpan.analysis import Run, Stragglers, stragglers
from ddpan.analysis.testing import open_run, simulate

from . import population
from .population import Case

__all__ = ["Outcome", "Rate", "judge", "main", "print_confusion", "report", "score"]

VERDICTS: Final = ("persistent", "onset", "transient", "intermittent", "rotating", "none", "insufficient_data")
LARGE: Final = 0.05
SMALL: Final = 0.01
LONG: Final = 50


@dataclass(frozen=True)
class Outcome:
    """What was put into a run and what the verdict says.

    Attributes:
        seed: of the run.
        kind: kind of the fault.
        size: the fault's share of a step that it delays.
        cost: its share of the step, averaged over the run.
        steps: steps of the run.
        visible: whether anybody could find it.
        faults: slow ranks and their causes.
        found: kind of the verdict.
        named: named ranks and their causes.
        covered: for each rank that is named rightly, whether the true delay lies in the interval.
    """

    seed: int
    kind: str
    size: float
    cost: float
    steps: int
    visible: bool
    faults: dict[int, str]
    found: str
    named: dict[int, str | None]
    covered: tuple[bool, ...]

    @property
    def right_ranks(self) -> bool:
        """Whether the slow ranks are named and no others."""
        return set(self.named) == set(self.faults)

    @property
    def right_kind(self) -> bool:
        """Whether the verdict is of the fault's kind; for several slow ranks, that they are slow in all steps."""
        return self.found == ("persistent" if self.kind == "several" else self.kind)

    @property
    def wrong(self) -> bool:
        """Whether a rank is named that is not slow."""
        return not set(self.named) <= set(self.faults)


@dataclass(frozen=True)
class Rate:
    """A rate with its bar, if it has one; ``least`` if it must not be lower, otherwise it must not be higher."""

    name: str
    hits: int
    runs: int
    bar: float | None
    least: bool = True

    @property
    def met(self) -> bool:
        """Whether the rate meets the bar."""
        rate = self.hits / max(1, self.runs)
        return self.bar is None or (rate >= self.bar if self.least else rate <= self.bar)

    def __str__(self) -> str:
        low, high = wilson(self.hits, self.runs)
        count = f"{self.hits} of {self.runs}"
        rate = self.hits / max(1, self.runs)
        text = f"{self.name:<68} {count:>13} {rate:7.2%}  [{low:.2%}, {high:.2%}]"
        if self.bar is None:
            return text
        return f"{text}  bar {'>=' if self.least else '<='} {self.bar:.0%}  {'ok' if self.met else 'MISSED'}"


def wilson(hits: int, runs: int, z: float = 1.96) -> tuple[float, float]:
    """The 95 % interval of a rate (Wilson 1927)."""
    if runs == 0:
        return 0.0, 1.0
    rate, weight = hits / runs, z * z / runs
    middle = (rate + weight / 2) / (1 + weight)
    half = z / (1 + weight) * (rate * (1 - rate) / runs + weight / (4 * runs)) ** 0.5
    return max(0.0, middle - half), min(1.0, middle + half)


def judge(case: Case) -> Outcome:
    """Simulate a run and ask for the verdict."""
    run: Run = open_run(simulate(case.scenario))
    return score(case.scenario.seed, case, stragglers(run))


def score(seed: int, case: Case, found: Stragglers) -> Outcome:
    """Compare the verdict with the answer."""
    named = {rank: one for one in found.named for rank in one.ranks}
    covered = tuple(
        bool((named[rank].delay_low_ns or 0.0) <= lateness <= (named[rank].delay_high_ns or 0.0))
        for rank, lateness in case.lateness_ns.items()
        if rank in named
    )
    causes: dict[int, str | None] = {rank: one.cause for rank, one in named.items()}
    return Outcome(
        seed=seed,
        kind=case.kind,
        size=case.size,
        cost=case.cost,
        steps=case.scenario.steps,
        visible=case.visible,
        faults=case.faults,
        found=found.verdict.kind,
        named=causes,
        covered=covered,
    )


def _judge(draw: Callable[[int], Case], seed: int) -> Outcome:
    try:
        return judge(draw(seed))
    except Exception as error:
        raise RuntimeError(f"run of seed {seed} failed: {traceback.format_exc()}") from error


def _healthy(seed: int) -> Outcome:
    return _judge(population.healthy, seed)


def _faulty(seed: int) -> Outcome:
    return _judge(population.faulty, seed)


def _all(judging: Callable[[int], Outcome], seeds: Iterable[int]) -> Iterator[Outcome]:
    """Judge all, on all cores."""
    # A fresh interpreter for each worker: polars' threads do not survive a fork.
    os.environ.setdefault("POLARS_MAX_THREADS", "1")
    with multiprocessing.get_context("spawn").Pool(os.cpu_count()) as pool:
        yield from pool.imap_unordered(judging, seeds, chunksize=4)


def print_confusion(outcomes: Sequence[Outcome]) -> None:
    """Kinds of faults against kinds of verdicts; ``wrong`` counts runs in which a rank is named that is not slow."""
    counts = Counter((one.kind, one.found) for one in outcomes)
    wrong = Counter(one.kind for one in outcomes if one.wrong)
    print(f"  {'':<14}" + "".join(f"{verdict[:12]:>14}" for verdict in VERDICTS) + f"{'wrong':>8}")
    for kind in ("none", *population.KINDS):
        row = [counts[kind, verdict] for verdict in VERDICTS]
        if any(row):
            print(f"  {kind:<14}" + "".join(f"{count or '.':>14}" for count in row) + f"{wrong[kind] or '.':>8}")


def report(outcomes: Sequence[Outcome]) -> list[Rate]:
    """The rates of all outcomes, healthy and faulty, against their bars."""
    healthy = [one for one in outcomes if one.kind == "none"]
    faults = [one for one in outcomes if one.kind != "none"]
    large = [one for one in faults if one.size >= LARGE and one.visible]
    small = [one for one in faults if one.size < SMALL]
    between = [one for one in faults if one not in large and one not in small]
    long = [one for one in faults if one.size >= LARGE and one.steps >= LONG]
    costly = [one for one in long if one.cost >= LARGE]
    rates = [
        _rate("healthy runs: a rank is named", (bool(one.named) for one in healthy), 0.01, least=False),
        *_rates("visible faults >= 5 % of the step", large, bars=True),
        *(
            _rate(f"  right kind of {kind} ones", (one.right_kind for one in large if one.kind == kind), 0.95)
            for kind in population.KINDS
        ),
        *_rates("all that cost >= 5 % of the step on average, 50 steps", costly, bars=True),
        *_rates("all that delay a step by >= 5 %, 50 steps", long, bars=False),
        _rate("  silence or right", (not one.wrong for one in long), 0.99),
        _rate("faults < 1 % of the step: silence or right", (not one.wrong for one in small), 0.99),
        _rate("all other faults: silence or right", (not one.wrong for one in between), 0.99),
    ]
    return [rate for rate in rates if rate.runs]


def _rates(name: str, runs: Sequence[Outcome], *, bars: bool) -> Iterator[Rate]:
    """The four rates of faults, visible or not."""
    found = [one for one in runs if one.faults and one.right_ranks]
    yield _rate(f"{name}: right ranks", (one.right_ranks for one in runs), 0.99 if bars else None)
    yield _rate("  right kind", (one.right_kind for one in runs), 0.95 if bars else None)
    causes = (one.named == one.faults for one in found)
    yield _rate("  right causes, of runs with the right ranks", causes, 0.97 if bars else None)
    covered = (hit for one in runs for hit in one.covered)
    yield _rate("  true delay inside the interval, of named ranks", covered, 0.93 if bars else None)


def _rate(name: str, hits: Iterable[bool], bar: float | None, *, least: bool = True) -> Rate:
    all_hits = list(hits)
    return Rate(name, sum(all_hits), len(all_hits), bar, least)


def _synthetic(runs: int, seed: int, failures: str | None) -> list[Rate]:
    began = time.monotonic()
    seeds = range(seed, seed + runs)
    outcomes = [*_all(_healthy, seeds), *_all(_faulty, seeds)]
    print(f"{runs} healthy and {runs} faulty synthetic runs, in {time.monotonic() - began:.0f} s\n")
    visible = [one for one in outcomes if one.kind == "none" or (one.visible and one.size >= LARGE)]
    print(f"Healthy runs, and faults >= 5 % of the step that are visible ({len(visible)}):")
    print_confusion(visible)
    print(f"\nAll other faults ({len(outcomes) - len(visible)}):")
    print_confusion([one for one in outcomes if one not in visible])
    if failures is not None:
        for one in outcomes:
            bad = one.wrong or (one in visible and not (one.right_ranks and one.right_kind and one.named == one.faults))
            if bad or not all(one.covered):
                print(f"  {failures} {one}")
    return report(outcomes)


def main() -> None:
    """Judge, print, and exit with 1 if a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=2000, help="healthy and as many faulty synthetic runs")
    parser.add_argument("--seed", type=int, default=0, help="of the first run; others give other runs")
    parser.add_argument("--quick", action="store_true", help="200 and 200 runs: a minute")
    parser.add_argument("--real", type=int, metavar="N", help="N real trainings instead; 25 are all cases")
    parser.add_argument("--first", type=int, default=0, metavar="N", help="number of the first real training, to go on")
    parser.add_argument("--failures", action="store_true", help="print every run that is not judged rightly")
    options = parser.parse_args()
    if options.real is not None:
        from .real_runs import judge_real

        rates = judge_real(range(options.first, options.first + options.real), options.seed)
    else:
        runs = 200 if options.quick else options.runs
        rates = _synthetic(runs, options.seed, "failed:" if options.failures else None)
    print("\nRates, with 95 % intervals:")
    for rate in rates:
        print(f"  {rate}")
    raise SystemExit(0 if all(rate.met for rate in rates) else 1)


if __name__ == "__main__":
    main()
