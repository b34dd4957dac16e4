"""The time grid of the flow sampler, which takes Euler-Maruyama steps of the SDE from
noise (t = 0) to data (t = 1).

A flow head predicts the velocity v of x_t = (1 - t) noise + t data. A step of length dt
is

    x <- x + ((1 + t) v - x) dt + sqrt(2 (1 - t) dt) xi,

where xi is standard normal. So a step draws from a Gaussian whose covariance depends on
t and dt alone. The last step is x <- x + 0.04 v and has no noise. The velocity implies
the token x_0-hat = x + (1 - t) v, and the mean of a step is linear in x_0-hat and x,
like the mean of a denoising step.
"""

from __future__ import annotations

import functools
import re
from typing import NamedTuple

import numpy as np

from cspd_jax.check import UserError

_END = 0.96  # the time at which the noisy steps end
_LAST = 0.04  # the length of the last step, which has no noise
_MOST_STEPS = 10_000
_SPEC = re.compile(
    r"flow(\d{1,9})|flow-calls(\d{1,9})(?:-shift(\d{1,3}(?:\.\d{1,6})?))?", re.ASCII
)


class FlowSchedule(NamedTuple):
    """The constants of a flow's steps, indexed like a `Schedule`: step i turns x_{i+1}
    into x_i, so t falls as the index rises.

    timestep_map: [T] float32, the time t that the network is given.
    recip, recipm1, mean_x0, mean_x, log_var: [T] float64, see
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
        """T, the number of steps, the last one included."""
        return len(self.timestep_map)


def is_flow(spec: str) -> bool:
    """Returns whether the name of a schedule names a flow's schedule."""
    return spec.startswith("flow")


def of_kind(spec: str, own: str) -> str:
    """Returns the schedule that `spec` stands for, given a model whose own schedule is
    `own`. If `spec` is a bare number, it replaces the first number in a flow's `own`:
    `of_kind("50", "flow100")` is "flow50"."""
    if is_flow(own) and spec.strip().isascii() and spec.strip().isdecimal():
        return re.sub(r"\d+", spec.strip(), own, count=1)
    if is_flow(spec) != is_flow(own):
        raise UserError(
            f"steps {spec!r:.40} do not go with this model, whose own are {own!r}"
        )
    return spec


@functools.lru_cache(maxsize=64)
def flow_schedule(spec: str) -> FlowSchedule:
    """Returns the schedule of a flow.

    `"flow100"` is SphereAR's schedule with 100 noisy steps of equal length and the last
    step, which makes 101 head calls. `"flow-calls28"` and `"flow-calls28-shift3.2"` are
    NextStep-1's schedules with 28 head calls. Their times go from 0 to 0.96. A shift s
    moves each time t towards noise, to t / (s - (s - 1) t).
    """
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
    """Returns evenly spaced times [steps] from 0 to _END in float32, with the same bits
    as PyTorch's `linspace`. That function counts the first half from the start and the
    second half from the end, and rounds each time once, after a fused multiplication
    and addition."""
    k = np.arange(steps)
    step = float(np.float32(_END) / np.float32(steps - 1))
    return np.where(
        k < steps // 2, k * step, float(np.float32(_END)) - k[::-1] * step
    ).astype(np.float32)


def _shifted(t: np.ndarray, by: float) -> np.ndarray:
    """Returns t / (s - (s - 1) t) for the shift s = `by`, every operation in
    float32."""
    return t / (np.float32(by) - np.float32(by - 1) * t)


def _of_times(t: np.ndarray, lengths: np.ndarray) -> FlowSchedule:
    """Returns the schedule whose steps start at the rising times t [T], float32, and
    have these lengths [T]."""
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
