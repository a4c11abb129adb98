"""Real trainings with a known fault, recorded as any user's, and whether the verdict finds it.

Four ranks on gloo, one thread each. Cases take turns through the causes and through persistent, onset (from half time
on), transient (the second quarter and the third), rotating and none: 25 cases. The rank and a delay of 12 to 40 ms, a
fifth to a half of the step, are drawn at random. The rates count the delays of at least 10 % of the recorded step.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from ddpan.analysis import load, stragglers
from ddpan.analysis.testing import CAUSES, Scenario

from .diagnosis import Outcome, Rate, print_confusion, score
from .population import Case, Kind

__all__ = ["judge_real"]

RANKS: Final = 4
STEPS: Final = 160
KINDS: Final[tuple[Kind, ...]] = ("persistent", "none", "onset", "transient", "rotating")
SPANS: Final = {"onset": (STEPS // 2, STEPS), "transient": (STEPS // 4, 3 * STEPS // 4)}
TRAINING: Final = Path(__file__).with_name("faulty_training.py")


def judge_real(cases: range, seed: int) -> list[Rate]:
    """Train, record and judge each of ``cases``; print each run and the confusion table."""
    outcomes = list(_outcomes(cases, seed))
    print()
    print_confusion(outcomes)
    healthy = [one for one in outcomes if one.kind == "none"]
    slow = [one for one in outcomes if one.kind != "none" and one.size >= 0.1]
    right_cause = [one for one in slow if one.right_ranks]
    rates = [
        Rate(
            "healthy trainings: a rank is named",
            sum(bool(one.named) for one in healthy),
            len(healthy),
            0.0,
            least=False,
        ),
        Rate("faults >= 10 % of the step: right rank", sum(one.right_ranks for one in slow), len(slow), 1.0),
        Rate("  right cause", sum(one.named == one.faults for one in right_cause), len(right_cause), 1.0),
        Rate("  right kind", sum(one.right_kind for one in slow), len(slow), None),
    ]
    return [rate for rate in rates if rate.runs]


def _outcomes(cases: range, seed: int) -> Iterator[Outcome]:
    for number in cases:
        drawn = random.Random(f"{seed} {number}")
        kind, cause = KINDS[number % len(KINDS)], CAUSES[number // len(KINDS) % len(CAUSES)]
        rank, delay_ms = drawn.randrange(RANKS), drawn.uniform(12, 40)
        with tempfile.TemporaryDirectory() as folder:
            _train(folder, kind, cause, rank, delay_ms, seed=number)
            found = stragglers(load(folder))
        step_ns = found.verdict.step_time_ns or 1.0
        size = 0.0 if kind == "none" else delay_ms * 1e6 / step_ns
        faults = {} if kind in ("none", "rotating") else {rank: cause}
        # Others on the same cores run faster while a rank sleeps, so what it is late by is not known: no interval.
        case = Case(Scenario(ranks=RANKS, steps=STEPS, seed=number), kind, faults, size, size, {}, visible=True)
        outcome = score(number, case, found)
        put_in = (
            "nothing"
            if kind == "none"
            else f"{kind}, {cause} of rank {rank}, {delay_ms:.0f} ms ({size:.0%} of the step)"
        )
        says = f"{outcome.found} {outcome.named or ''}"
        right = outcome.right_ranks and outcome.named == outcome.faults and outcome.right_kind
        print(f"  {number:3}  {put_in:<60} {says} {'' if right else '<--'}", flush=True)
        yield outcome


def _train(folder: str, kind: Kind, cause: str, rank: int, delay_ms: float, *, seed: int) -> None:
    first, end = SPANS.get(kind, (0, STEPS))
    plan = {
        "cause": "none" if kind == "none" else cause,
        "delay-ms": delay_ms,
        "from-step": first,
        "to-step": end,
        "steps": STEPS,
        "seed": seed,
    }
    options = [text for name, value in plan.items() for text in (f"--{name}", str(value))]
    slow = [str(one) for one in range(RANKS)] if kind == "rotating" else [str(rank)]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    environment = os.environ | {"DDPAN_LOG_DIR": folder, "DDPAN_QUIET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*launcher, str(TRAINING), *options, "--ranks", *slow],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise SystemExit(f"the training failed with exit code {done.returncode}:\n{done.stderr[-2000:]}")
