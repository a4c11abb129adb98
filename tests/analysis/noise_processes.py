"""Processes that noise is drawn from, in the tests of the statistics behind the verdict."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["STEP_NS", "arrivals", "autoregressive"]

STEP_NS = 100e6


def autoregressive(random: np.random.Generator, shape: tuple[int, int], rho: float, tail: str) -> npt.NDArray[Any]:
    """AR(1) noise with a spread of about 1; innovations normal, Student's t with 3 degrees, skewed, or with spikes."""
    size = (shape[0] + 200, shape[1])
    innovations = {
        "normal": lambda: random.standard_normal(size),
        "t3": lambda: random.standard_t(3, size),
        "skewed": lambda: random.lognormal(0, 0.8, size) - 1,
        "spikes": lambda: random.standard_normal(size) + (random.random(size) < 0.03) * random.exponential(15, size),
    }[tail]()
    noise = np.zeros(size)
    for step in range(1, len(noise)):
        noise[step] = rho * noise[step - 1] + np.sqrt(1 - rho**2) * innovations[step]
    return noise[200:]


def arrivals(seed: int, shape: tuple[int, int], rho: float = 0.3, tail: str = "t3", sigma: float = 0.02) -> Any:
    noise = autoregressive(np.random.default_rng(seed), shape, rho, tail)
    return STEP_NS * (0.7 + sigma * noise)
