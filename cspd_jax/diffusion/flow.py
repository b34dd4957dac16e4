"""The flow sampler's grid: Euler-Maruyama steps of the SDE from noise (t = 0) to data
(t = 1).

A flow head predicts the velocity v of x_t = (1 - t) noise + t data. A step of length dt
is

    x <- x + ((1 + t) v - x) dt + sqrt(2 (1 - t) dt) xi,

a Gaussian whose covariance depends on nothing, and the last one is x <- x + 0.04 v,
without noise. With the token that v implies, x_0-hat = x + (1 - t) v, its mean is
linear in x_0-hat and x, as a denoising step's is.
"""

from __future__ import annotations

import functools
import re
from typing import NamedTuple

import numpy as np

from cspd_jax.check import UserError

_END = 0.96  # where the noisy steps end
_LAST = 0.04  # length of the step without noise
_MOST_STEPS = 10_000
_SPEC = re.compile(
    r"flow(\d{1,9})|flow-calls(\d{1,9})(?:-shift(\d{1,3}(?:\.\d{1,6})?))?", re.ASCII
)


class FlowSchedule(NamedTuple):
    """Arrays [T], indexed like a `Schedule`: step i turns x_{i+1} into x_i, so t falls
    with the index.

    timestep_map: float32 t that the network is given.
    recip, recipm1, mean_x0, mean_x, log_var: float64, see
        `diffusion.gaussian.Coefficients`.
    """

    timestep_map: np.ndarray
    recip: np.ndarray
    recipm1: np.ndarray
    mean_x0: np.ndarray
    mean_x: np.ndarray
    log_var: np.ndarray

    @property
    def num_steps(self) -> int:
        return len(self.timestep_map)


def is_flow(spec: str) -> bool:
    return spec.startswith("flow")


def of_kind(spec: str, own: str) -> str:
    """Returns the schedule that `spec` means for a model whose own is `own`: a bare
    number is of the same kind."""
    if is_flow(own) and spec.strip().isascii() and spec.strip().isdecimal():
        return re.sub(r"\d+", spec.strip(), own, count=1)
    if is_flow(spec) != is_flow(own):
        raise UserError(
            f"steps {spec!r:.40} do not go with this model, whose own are {own!r}"
        )
    return spec


@functools.lru_cache(maxsize=64)
def flow_schedule(spec: str) -> FlowSchedule:
    """Returns the schedule of a flow. `"flow100"`: 100 noisy steps of equal length and
    the last one (SphereAR's; 101 head calls). `"flow-calls28"`,
    `"flow-calls28-shift3.2"`: 28 head calls, times from 0 to 0.96 shifted towards noise
    by t / (s - (s - 1) t) (NextStep-1's)."""
    found = _SPEC.fullmatch(spec)
    if found is None:
        raise UserError(
            f"steps {spec[:40]!r} are not understood; write for example flow100"
        )
    equal, calls, shift = found.groups()
    steps = int(equal or calls)
    if not 1 + (equal is None) <= steps <= _MOST_STEPS:
        raise UserError(
            f"steps {spec!r}: the number of steps must be from {1 + (equal is None)} to"
            f" {_MOST_STEPS}"
        )
    if equal:
        dt = _END / steps
        t = np.zeros(steps + 1, np.float32)
        for k in range(steps):  # accumulated in float32, as the published sampler does
            t[k + 1] = np.float32(t[k] + np.float32(dt))
        t[steps] = _END
        lengths = np.full(steps, dt)
    else:
        by = float(shift or 1)
        if not by:
            raise UserError(f"steps {spec!r}: the shift must be above 0")
        t = _shifted(_even(steps), by)
        lengths = np.diff(t.astype(np.float64))
    return _of_times(t, np.append(lengths, _LAST))


def _even(steps: int) -> np.ndarray:
    """Times from 0 to _END in float32, bit for bit as PyTorch's `linspace` rounds them:
    the first half from the start, the second from the end, each by one fused
    multiplication and addition."""
    k = np.arange(steps)
    step = float(np.float32(_END) / np.float32(steps - 1))
    return np.where(
        k < steps // 2, k * step, float(np.float32(_END)) - k[::-1] * step
    ).astype(np.float32)


def _shifted(t: np.ndarray, by: float) -> np.ndarray:
    """Returns t / (s - (s - 1) t), every operation in float32."""
    return t / (np.float32(by) - np.float32(by - 1) * t)


def _of_times(t: np.ndarray, lengths: np.ndarray) -> FlowSchedule:
    """Returns t float32 [T] rising, and the length of the step from each."""
    wide = t.astype(np.float64)
    dt = lengths
    left = 1 - wide
    mean_x0 = (1 + wide) * dt / left
    mean_x = 1 - dt - mean_x0
    mean_x0[-1] = dt[-1] / left[-1]
    mean_x[-1] = 1 - mean_x0[-1]
    log_var = np.log(2 * left * dt)
    arrays = (t, np.ones_like(wide), -left, mean_x0, mean_x, log_var)
    return FlowSchedule(*(a[::-1] for a in arrays))
