"""The cosine schedule of 1000 steps, and shorter schedules that keep some of its
steps."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import numpy as np

from cspd_jax.check import UserError
from cspd_jax.diffusion.flow import FlowSchedule, flow_schedule, is_flow

NUM_TRAIN_STEPS = 1000
_MAX_BETA = 0.999


class Schedule(NamedTuple):
    """The constants of a denoising process with T steps. Each field is a numpy array
    [T], float64 except for `timestep_map`, indexed by the step i = 0..T-1.

    Step i turns x_{i+1} into x_i. x_T is pure noise, and x_0 is the token.
    `timestep_map[i]` (int32) is the original timestep 0..999 that the network is given.
    """

    timestep_map: np.ndarray
    betas: np.ndarray
    log_betas: np.ndarray
    alphas_cumprod: np.ndarray
    alphas_cumprod_prev: np.ndarray
    sqrt_alphas_cumprod: np.ndarray
    sqrt_one_minus_alphas_cumprod: np.ndarray
    sqrt_recip_alphas_cumprod: np.ndarray
    sqrt_recipm1_alphas_cumprod: np.ndarray
    posterior_variance: np.ndarray
    posterior_log_variance_clipped: np.ndarray
    posterior_mean_coef1: np.ndarray
    posterior_mean_coef2: np.ndarray

    @property
    def num_steps(self) -> int:
        """T, the number of denoising steps."""
        return len(self.betas)


def cosine_betas(num_steps: int = NUM_TRAIN_STEPS) -> np.ndarray:
    """Returns [T], beta_t = min(0.999, 1 - f(t+1)/f(t)) with f(t) = cos^2(pi/2 (t/T +
    0.008) / 1.008), where T is `num_steps`."""

    def f(u: float) -> float:
        return math.cos((u + 0.008) / 1.008 * math.pi / 2) ** 2

    return np.array(
        [
            min(1 - f((t + 1) / num_steps) / f(t / num_steps), _MAX_BETA)
            for t in range(num_steps)
        ]
    )


def respace(spec: str, num_steps: int = NUM_TRAIN_STEPS) -> np.ndarray:
    """Returns the original timesteps [T] that a respacing keeps, in increasing order.

    `"100"` spreads 100 steps over all 1000 timesteps, both ends included. `"10,15"`
    splits the range into two equal sections and spreads 10 steps over the first and 15
    over the second. `"ddim100"` takes 100 steps with a fixed integer stride, from 0.
    For example, `respace("ddim4")` is [0, 250, 500, 750].
    """
    spec = str(spec).strip()
    if spec.startswith("ddim"):
        count = _count(spec[4:], spec)
        for stride in range(1, num_steps + 1):
            if len(range(0, num_steps, stride)) == count:
                return np.arange(0, num_steps, stride, dtype=np.int32)
        raise UserError(
            f"respacing {spec!r}: no integer stride cuts {num_steps} timesteps into"
            f" {count} steps"
        )

    counts = [_count(part, spec) for part in spec.split(",")]
    size, longer = divmod(num_steps, len(counts))
    kept: list[int] = []
    start = 0
    for i, count in enumerate(counts):
        length = size + (i < longer)
        if count > length:
            raise UserError(
                f"respacing {spec!r}: section {i} has {length} timesteps, fewer than"
                f" {count}"
            )
        between = (length - 1) / (count - 1) if count > 1 else 1.0
        at = 0.0  # a running sum, as in the reference: i * between rounds differently
        for _ in range(count):
            kept.append(start + round(at))
            at += between
        start += length
    if not kept:
        raise UserError(f"respacing {spec!r} keeps no timestep at all")
    return np.array(sorted(set(kept)), dtype=np.int32)


def _count(text: str, spec: str) -> int:
    """Reads a number of steps in a respacing. Raises UserError if it is none."""
    digits = text.strip() if "," in spec else text
    if not (digits.isascii() and digits.isdecimal()) or len(digits) > 9:
        raise UserError(
            f"respacing {spec[:40]!r} is not understood; write for example 100, 10,15"
            " or ddim100"
        )
    return int(text)


@functools.lru_cache(maxsize=64)
def make_schedule(spec: str = str(NUM_TRAIN_STEPS)) -> Schedule:
    """Returns the schedule of a respacing (see `respace`). Training uses
    `make_schedule("1000")`."""
    timesteps = respace(spec)
    kept = np.cumprod(1.0 - cosine_betas())[timesteps]
    betas = 1.0 - kept / np.append(1.0, kept[:-1])
    alphas_cumprod = np.cumprod(1.0 - betas)
    previous = np.append(1.0, alphas_cumprod[:-1])
    variance = betas * (1.0 - previous) / (1.0 - alphas_cumprod)
    # The variance of step 0 is 0. MAR uses the log variance of step 1 in its place.
    clipped = (
        np.log(np.append(variance[1:2], variance[1:]))
        if len(betas) > 1
        else np.full(1, np.nan)
    )
    return Schedule(
        timestep_map=timesteps,
        betas=betas,
        log_betas=np.log(betas),
        alphas_cumprod=alphas_cumprod,
        alphas_cumprod_prev=previous,
        sqrt_alphas_cumprod=np.sqrt(alphas_cumprod),
        sqrt_one_minus_alphas_cumprod=np.sqrt(1.0 - alphas_cumprod),
        sqrt_recip_alphas_cumprod=np.sqrt(1.0 / alphas_cumprod),
        sqrt_recipm1_alphas_cumprod=np.sqrt(1.0 / alphas_cumprod - 1),
        posterior_variance=variance,
        posterior_log_variance_clipped=clipped,
        posterior_mean_coef1=betas * np.sqrt(previous) / (1.0 - alphas_cumprod),
        posterior_mean_coef2=(1.0 - previous)
        * np.sqrt(1.0 - betas)
        / (1.0 - alphas_cumprod),
    )


def sampling_schedule(spec: str) -> Schedule | FlowSchedule:
    """Returns `flow_schedule(spec)` if `spec` begins with "flow", and otherwise
    `make_schedule(spec)`. A respacing with a single step is refused, because MAR
    defines no variance for it."""
    if is_flow(spec):
        return flow_schedule(spec)
    schedule = make_schedule(spec)
    if schedule.num_steps < 2:
        raise UserError(
            f"respacing {spec!r} has a single step; sampling needs at least 2"
        )
    return schedule
