"""What could be found at all: an observer who is told what a user never knows, on the same faults as the verdict.

    python -m benchmarks.ideal_observer [--runs 500] [--seed 0]

The observer sees the arrivals of each rank at the last bucket of each step, as `stragglers` does, and is told the noise
(its size, tail, correlation, stalls and how much healthy ranks differ), the kind of the fault, its delay, and in how
many steps it acts. It is not told which rank is slow, nor when. For each rank it takes the logarithm of the likelihood
ratio of the fault to no fault, at the likeliest time for a stretch and over all times for one now and then, and names
the rank with the highest if that exceeds what the highest of all ranks does in 99 of 100 healthy runs of this noise,
which it draws. The likelihood is that of first-order autoregressive noise with the innovations' own distribution.

Judged are faults of one rank of at least 5 % of the step in runs of at least 50 steps.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from ddpan.analysis import stragglers
from ddpan.analysis.measures._arrivals import find_arrivals
from ddpan.analysis.measures._inference import MAD_TO_SIGMA, excess_over_others
from ddpan.analysis.measures.facts import facts
from ddpan.analysis.testing import Scenario, open_run, simulate

from . import population
from .diagnosis import LARGE, LONG, Rate, score
from .population import Case

__all__ = ["Noise", "find", "main", "ratios"]

Matrix = npt.NDArray[np.float64]

HEALTHY_RUNS: Final = 200
HEALTHY_RATE: Final = 0.01


@dataclass(frozen=True)
class Noise:
    """Noise of a rank's arrival, as shares of the step.

    Attributes:
        sigma: standard deviation.
        correlation: from a step to the next.
        tail: degrees of freedom of the innovations, None if normal.
        stall: length of the stalls that each rank has in 1 % of its steps.
    """

    sigma: float
    correlation: float
    tail: float | None
    stall: float

    def draw(self, random: np.random.Generator, shape: tuple[int, int]) -> Matrix:
        """Arrivals of healthy ranks, shape (steps, ranks)."""
        fresh = random.standard_normal(shape) if self.tail is None else random.standard_t(self.tail, shape) / 3**0.5
        noise = fresh.copy()
        for step in range(1, len(noise)):
            noise[step] = self.correlation * noise[step - 1] + (1 - self.correlation**2) ** 0.5 * fresh[step]
        stalls = self.stall * (random.random(shape) < 0.01)
        return np.asarray(self.sigma * noise + stalls + population.LASTING * random.uniform(-1, 1, shape[1]))


def noise_of(scenario: Scenario) -> tuple[Noise, float]:
    """The noise of a scenario, and its step in nanoseconds."""
    own, gaps = population._phases_ns(scenario)
    step_ns = float(own.sum()) + scenario.backward_ns + scenario.transfer_ns + scenario.copy_ns
    sigma = scenario.noise * math.sqrt(float((own**2).sum() + (gaps**2).sum())) / step_ns
    stall = max((fault.delay_ns for fault in scenario.faults if fault.share < 1), default=0) / step_ns
    return Noise(sigma, scenario.noise_correlation, scenario.noise_tail, stall), step_ns


def ratios(case: Case, noise: Noise, excess: Matrix, scale: float) -> Matrix:
    """Log-likelihood ratio of the fault of ``case`` to none for each rank, shape (ranks,).

    Args:
        case: what is known of the fault.
        noise: of a rank.
        excess: lateness of each rank as a share of the step, shape (steps, ranks), NaN where unknown.
        scale: its standard deviation.
    """
    late = sum((one.end_step or case.scenario.steps) - one.first_step for one in case.scenario.faults if one.share == 1)
    share = late / case.scenario.steps
    gain = _gains(case.size, noise, excess, scale)
    if case.kind == "intermittent":
        return _now_and_then(gain, share)
    # From the healthy state into the fault at some step, on in it, and out of it again.
    inside = np.vstack([np.zeros(excess.shape[1]), np.cumsum(gain[1, 1], axis=0)])
    steps = len(excess)
    if case.kind == "persistent":
        return np.asarray(inside[-1])
    length = round(share * steps)
    firsts = np.arange(1, steps - 2) if case.kind == "onset" else np.arange(1, max(2, steps - length))
    ends = np.full(len(firsts), steps) if case.kind == "onset" else firsts + length
    after = np.vstack([gain[1, 0], np.zeros(excess.shape[1])])[ends]
    return np.asarray((gain[0, 1][firsts] + inside[ends] - inside[firsts + 1] + after).max(axis=0))


def _gains(delay: float, noise: Noise, excess: Matrix, scale: float) -> Matrix:
    """What each step adds to the ratio, by whether the rank is late in the known step before, and in this one.

    Shape (2, 2, steps, ranks); zero where the step is unknown.
    """
    known = ~np.isnan(excess)
    index = np.arange(len(excess))[:, None]
    latest = np.maximum.accumulate(np.where(known, index, -1), axis=0)
    before = np.vstack([np.full(excess.shape[1], -1), latest[:-1]])
    previous = np.where(before >= 0, np.take_along_axis(excess, np.maximum(before, 0), axis=0), 0.0)
    kept = np.where(before >= 0, noise.correlation ** (index - before).astype(np.float64), 0.0)
    spread = scale * np.sqrt(1 - kept**2)
    innovations = (excess - kept * previous) / spread

    def density(values: Matrix) -> Matrix:
        if noise.tail is None:
            return np.asarray(-(values**2) / 2)
        return np.asarray(-(noise.tail + 1) / 2 * np.log1p(values**2 / (noise.tail - 2)))

    healthy = density(innovations)
    gain = [
        [density(innovations - (delay * now - kept * delay * earlier) / spread) - healthy for now in (0, 1)]
        for earlier in (0, 1)
    ]
    return np.where(known, np.array(gain), 0.0)


def _now_and_then(gain: Matrix, share: float) -> Matrix:
    """Over all sets of late steps, each late with chance ``share``, by the forward algorithm."""
    chance = np.log([1 - share, share])[:, None]
    state = np.repeat(chance, gain.shape[-1], axis=1)
    for step in range(gain.shape[2]):
        moved = gain[:, :, step]
        known = moved.any(axis=(0, 1))
        new = chance + np.logaddexp(state[0] + moved[0], state[1] + moved[1])
        state = np.where(known, new, state)
    return np.asarray(np.logaddexp(*state))


def find(case: Case, arrival_ns: Matrix, random: np.random.Generator, *, runs: int = HEALTHY_RUNS) -> int | None:
    """The column of the rank that the observer names, or None.

    Args:
        case: what it is told of.
        arrival_ns: shape (steps, ranks), NaN where unknown.
        random: draws the healthy runs.
        runs: how many.
    """
    noise, step_ns = noise_of(case.scenario)
    unknown = np.isnan(arrival_ns)
    drawn = [noise.draw(random, arrival_ns.shape) for _ in range(runs)]
    excesses = [excess_over_others(np.where(unknown, np.nan, one)) for one in drawn]
    middles = [one - np.nanmedian(one, axis=0) for one in excesses[:10]]
    scale = MAD_TO_SIGMA * float(np.nanmedian(np.abs(middles)))
    if noise.tail is not None:
        scale *= 1.32  # Student's t with three degrees: its standard deviation over that by its median
    highest = [ratios(case, noise, one, scale).max() for one in excesses]
    limit = np.quantile(highest, 1 - HEALTHY_RATE)
    found = ratios(case, noise, excess_over_others(arrival_ns) / step_ns, scale)
    return int(found.argmax()) if found.max() > limit else None


def main() -> None:
    """Compare the observer with the verdict."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=500, help="faulty runs to draw; about a third are judged")
    parser.add_argument("--seed", type=int, default=0, help="of the first run")
    parser.add_argument("--missed", action="store_true", help="ask the observer only where the verdict is silent")
    options = parser.parse_args()
    both: list[tuple[bool, bool]] = []
    for seed in range(options.seed, options.seed + options.runs):
        case = population.faulty(seed)
        if case.size < LARGE or case.scenario.steps < LONG or len(case.faults) != 1:
            continue
        run = open_run(simulate(case.scenario))
        arrivals = find_arrivals(run, facts(run))[0]
        verdict = score(seed, case, stragglers(run)).right_ranks
        rank = next(iter(case.faults))
        observer = verdict
        if not (options.missed and verdict):
            at = find(case, arrivals.arrival_ns, np.random.default_rng(seed))
            observer = at is not None and arrivals.ranks[at] == rank
        if observer != verdict or not verdict:
            print(f"  {seed} {case.kind}: verdict {verdict}, observer {observer}", flush=True)
        both.append((verdict, observer))
    print(Rate("the verdict names the right rank", sum(one for one, _ in both), len(both), None))
    print(Rate("the ideal observer does", sum(one for _, one in both), len(both), None))


if __name__ == "__main__":
    main()
