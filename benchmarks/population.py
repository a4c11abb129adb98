"""The synthetic runs on which `diagnosis` judges the verdict: what is drawn, and what could be found at all.

**Noise.** Every rank's data loading, forward, backward, optimizer and other code vary from step to step. Together they
move the rank's arrival at the last bucket by a standard deviation of 0.3 to 3 % of the step (log-uniform): 0.3 % is a
quiet GPU node, 3 % a shared CPU machine. The noise is autoregressive of first order with a correlation of 0 to 0.9 from
step to step, half of the runs have none; its innovations are normal or, in half of the runs, Student's t with three
degrees of freedom, scaled to the same standard deviation. In a quarter of the runs every rank stalls alike in 1 % of
its steps for 10 to 50 % of a step, as garbage collection and the operating system do. Healthy ranks differ lastingly by
up to 0.3 % of the step in either direction. Ranks notice the end of a collective after 20 µs on average, drawn from an
exponential distribution.

**Faults.** A delay of 1 to 50 % of the step (log-uniform; in a tenth of the runs 0.2 to 1 %) in data, forward,
backward, optimizer or other code; in half of the runs it varies from step to step by a fifth. Kinds:

- persistent: all steps;
- onset: from a step in 20 to 80 % of the run to the end;
- transient: 20 to 60 % of the run, which ends before the last tenth;
- intermittent: 5 to 35 % of the steps, drawn one by one;
- rotating: in nine of ten steps one rank, drawn anew each time: nobody is to be named;
- several: two or three ranks, at most a third of all, each in all steps, each with its own cause and size.

**Logs.** Ranks are 2 to 64, steps 20 to 2,000, buckets 1 to 8; hosts' clocks are off by hours and drift by 100 ppm; in
a third of the faulty runs every rank lost 1 to 30 % of its rows at random.

**What could be found.** Some faults nobody could find: 5 % of a step, in fifty steps of noise of 3 % that lasts for
twenty steps, is one of two or three independent fluctuations of its own size. The bars hold for faults that are
*visible* to an observer who knows the noise, its correlation time t = (1 + c) / (1 - c) and when the fault acts:

- at least 50 steps can be compared, and they are worth at least 30 independent ones (steps / t);
- the delay costs at least 1 % of the time of the run;
- acting in all steps or in a stretch: the delay, averaged over the steps inside and outside, is eight times its own
  standard error: sigma * sqrt(t / inside + t / outside). Eight is what an error of 1 % over all ranks and all possible
  stretches (about 5), and being right in 99 % (2.3), add up to;
- now and then, or in turn: a single step tells, so the delay is six standard deviations of the noise, and it acts in
  at least twelve steps that can be compared (where rows are lost, twelve even if two standard deviations more of them
  are than to be expected), since a fair coin falls twelve times on one side in 1 of 4,096 tries. In turn, it needs
  three ranks to tell from a persistent one.

All other runs are judged too: there a rank may be named or not, but not a wrong one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Final, Literal

import numpy as np

from ddpan.analysis.testing import CAUSES, Fault, Scenario

__all__ = ["KINDS", "LASTING", "Case", "faulty", "healthy"]

Kind = Literal["none", "persistent", "onset", "transient", "intermittent", "rotating", "several"]
KINDS: Final[tuple[Kind, ...]] = ("persistent", "onset", "transient", "intermittent", "rotating", "several")

_HOUR_NS: Final = 3_600_000_000_000
_ROTATING_SHARE: Final = 0.9

LASTING: Final = 0.003
"""Largest lasting difference of a healthy rank, as a share of the step."""


@dataclass(frozen=True)
class Case:
    """A synthetic run and its answer.

    Attributes:
        scenario: what is simulated.
        kind: kind of its fault.
        faults: the ranks to be named with their causes.
        size: smallest delay of a fault, as a share of the step.
        cost: what that delay comes to, averaged over all steps of the run, as a share of the step.
        lateness_ns: by how much these ranks are later than the mean of the healthy ones in the steps concerned: the
            delay, and what they differ by without it.
        visible: whether it could be found at all.
    """

    scenario: Scenario
    kind: Kind
    faults: dict[int, str]
    size: float
    cost: float
    lateness_ns: dict[int, float]
    visible: bool


@dataclass(frozen=True)
class _Noise:
    step_ns: float
    sigma: float
    memory: float
    differences: np.ndarray[tuple[int], np.dtype[np.float64]]

    def lasting_ns(self, rank: int, slow: Iterable[int]) -> float:
        """By how much a rank is later than the others that are not slow without any fault."""
        others = np.delete(self.differences, [*slow])
        return float(self.differences[rank] - others.mean()) * self.step_ns


def healthy(seed: int) -> Case:
    """A run without a fault, but with all that may be mistaken for one."""
    random = np.random.default_rng([seed, 0])
    scenario, _ = _scenario(random, seed, least_ranks=2)
    return Case(scenario, "none", {}, 0.0, 0.0, {}, visible=True)


def faulty(seed: int) -> Case:
    """A run with a fault; its kind follows from ``seed``, the rest is drawn."""
    random = np.random.default_rng([seed, 1])
    kind = KINDS[seed % len(KINDS)]
    least = {"rotating": 3, "several": 6}.get(kind, 2)
    scenario, noise = _scenario(random, seed, least_ranks=least)
    low, high = (0.002, 0.01) if random.random() < 0.1 else (0.01, 0.5)
    if random.random() < 1 / 3:
        scenario = replace(scenario, lost=dict.fromkeys(range(scenario.ranks), random.uniform(0.01, 0.3)))
    count = min(int(random.integers(2, 4)), scenario.ranks // 3) if kind == "several" else 1
    ranks = random.permutation(scenario.ranks)[:count].tolist()
    wobble = 0.2 if random.random() < 0.5 else 0.0
    sizes = {rank: _log_uniform(random, low, high) for rank in ranks}
    faults = [
        Fault(
            rank=rank,
            cause=str(random.choice(CAUSES)),
            delay_ns=round(size * noise.step_ns),
            delay_noise=wobble,
            bucket=int(random.integers(scenario.buckets)),
        )
        for rank, size in sizes.items()
    ]
    timed, inside = _TIMING.get(kind, _always)(random, scenario, faults)
    named = {} if kind == "rotating" else {fault.rank: fault.cause for fault in faults}
    return Case(
        scenario=replace(scenario, faults=(*scenario.faults, *timed)),
        kind=kind,
        faults=named,
        size=min(sizes.values()),
        cost=min(sizes.values()) * inside / scenario.steps,
        lateness_ns={rank: sizes[rank] * noise.step_ns + noise.lasting_ns(rank, named) for rank in named},
        visible=_visible(kind, scenario, noise, min(sizes.values()), inside),
    )


def _scenario(random: np.random.Generator, seed: int, *, least_ranks: int) -> tuple[Scenario, _Noise]:
    ranks = round(_log_uniform(random, least_ranks, 64))
    hosts = 1 + (ranks - 1) // 8
    correlation = random.uniform(0.0, 0.9) if random.random() < 0.5 else 0.0
    plain = Scenario(
        ranks=ranks,
        steps=round(_log_uniform(random, 20, 2000)),
        buckets=int(random.integers(1, 9)),
        micro_batches=2 if random.random() < 0.1 else 1,
        data_ns=_milliseconds(random, 0.5, 5),
        other_ns=_milliseconds(random, 0.2, 5),
        forward_ns=_milliseconds(random, 10, 40),
        backward_ns=_milliseconds(random, 20, 80),
        optimizer_ns=_milliseconds(random, 1, 10),
        transfer_ns=_milliseconds(random, 0.5, 5),
        noise_correlation=correlation,
        noise_tail=3 if random.random() < 0.5 else None,
        exit_ns=20_000,
        clock_offset_ns={host: int(random.integers(-5, 6)) * _HOUR_NS for host in range(hosts)},
        clock_drift_ppm={host: float(random.uniform(-100, 100)) for host in range(hosts)},
        seed=seed,
    )
    own, gaps = _phases_ns(plain)
    step_ns = own.sum() + plain.backward_ns + plain.transfer_ns + plain.copy_ns
    sigma = _log_uniform(random, 0.003, 0.03)
    noise = sigma * step_ns / math.sqrt(float((own**2).sum() + (gaps**2).sum()))
    differences = LASTING * random.uniform(-1, 1, ranks)
    pace = 1 + differences * step_ns / (plain.micro_batches * (plain.forward_ns + plain.backward_ns))
    stalls = _stalls(random, plain, step_ns) if random.random() < 0.25 else ()
    noisy = replace(plain, noise=noise, pace=dict(enumerate(pace.tolist())), faults=stalls)
    return noisy, _Noise(step_ns, sigma, (1 + correlation) / (1 - correlation), differences)


def _phases_ns(scenario: Scenario) -> tuple[np.ndarray[tuple[int], np.dtype[np.float64]], ...]:
    """Phases of a step that vary on their own, and the pieces of its last backward."""
    micro = scenario.micro_batches
    each = [scenario.data_ns, scenario.other_ns, scenario.forward_ns] * micro
    own = [*each, *[scenario.backward_ns] * (micro - 1), scenario.optimizer_ns]
    gaps = np.full(scenario.buckets, scenario.backward_ns / scenario.buckets)
    return np.array(own, np.float64), gaps


def _stalls(random: np.random.Generator, scenario: Scenario, step_ns: float) -> tuple[Fault, ...]:
    length = round(random.uniform(0.1, 0.5) * step_ns)
    return tuple(
        Fault(rank=rank, cause="other", delay_ns=length, share=0.01, delay_noise=0.3) for rank in range(scenario.ranks)
    )


Timed = tuple[list[Fault], float]
"""Faults with their steps, and the number of steps concerned."""


def _always(random: np.random.Generator, scenario: Scenario, faults: list[Fault]) -> Timed:  # noqa: ARG001 - one signature
    return faults, float(scenario.steps)


def _onset(random: np.random.Generator, scenario: Scenario, faults: list[Fault]) -> Timed:
    first = round(random.uniform(0.2, 0.8) * scenario.steps)
    return [replace(fault, first_step=first) for fault in faults], float(scenario.steps - first)


def _transient(random: np.random.Generator, scenario: Scenario, faults: list[Fault]) -> Timed:
    length = round(random.uniform(0.2, 0.6) * scenario.steps)
    first = round(random.uniform(0.1, 0.9 - length / scenario.steps) * scenario.steps)
    return [replace(fault, first_step=first, end_step=first + length) for fault in faults], float(length)


def _intermittent(random: np.random.Generator, scenario: Scenario, faults: list[Fault]) -> Timed:
    hit = np.flatnonzero(random.random(scenario.steps) < random.uniform(0.05, 0.35)).tolist()
    return [replace(fault, first_step=s, end_step=s + 1) for fault in faults for s in hit], float(len(hit))


def _rotating(random: np.random.Generator, scenario: Scenario, faults: list[Fault]) -> Timed:
    turns = random.integers(scenario.ranks, size=scenario.steps)
    hit = np.flatnonzero(random.random(scenario.steps) < _ROTATING_SHARE).tolist()
    return [replace(faults[0], rank=int(turns[s]), first_step=s, end_step=s + 1) for s in hit], float(len(hit))


_TIMING: Final[dict[Kind, Callable[[np.random.Generator, Scenario, list[Fault]], Timed]]] = {
    "onset": _onset,
    "transient": _transient,
    "intermittent": _intermittent,
    "rotating": _rotating,
}


def _visible(kind: Kind, scenario: Scenario, noise: _Noise, size: float, inside: float) -> bool:
    kept = 1 - scenario.lost.get(0, 0.0)
    # An arrival needs the last bucket of a step and of the one before; with two ranks, that of both.
    known = kept ** (4 if scenario.ranks == 2 else 2)
    steps, inside = scenario.steps * known, inside * known
    if steps < 50 or steps < 30 * noise.memory or size * inside / steps < 0.01:
        return False
    if kind in ("intermittent", "rotating"):
        surely = inside - 2 * math.sqrt(inside * (1 - known))
        return surely >= 12 and size >= 6 * noise.sigma
    outside = steps - inside
    error = math.sqrt(noise.memory / inside + (noise.memory / outside if outside > 0 else 0.0))
    return size >= 8 * noise.sigma * error


def _log_uniform(random: np.random.Generator, low: float, high: float) -> float:
    return float(np.exp(random.uniform(np.log(low), np.log(high))))


def _milliseconds(random: np.random.Generator, low: float, high: float) -> int:
    return round(random.uniform(low, high) * 1_000_000)
