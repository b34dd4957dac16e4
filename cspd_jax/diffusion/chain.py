"""The denoising chain: T transitions from noise to a token, one after the other."""

from __future__ import annotations

import math
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
from chex import ArrayTree

from cspd_jax._utils.accelerators import read_at_once, with_enough_rows
from cspd_jax.check import UserError
from cspd_jax.diffusion.gaussian import (
    Coefficients,
    Gaussian,
    guide,
    transition,
)

Array = jax.Array


class Denoiser(Protocol):
    """The network of the chain, split into three parts. The first depends on the time
    only, the second on the time and on z, and the third on the state x as well. R is
    any number of rows."""

    def embed_time(self, params: ArrayTree, timesteps: Array) -> Array:
        """Maps original timesteps [T] to features [T, ...]. It is computed once per
        generation."""

    def modulate(self, params: ArrayTree, time: Array, z: Array) -> ArrayTree:
        """Maps features [..., W] and z [..., D], broadcast together, to modulations: a
        pytree of arrays that depend on the time and z alone."""

    def denoise(self, params: ArrayTree, x: Array, modulations: ArrayTree) -> Array:
        """Maps x [R, d] and its modulations to eps and v side by side [R, 2d]; a flow
        head returns the velocity [R, d]."""


# One matrix product makes the modulations of several steps. This is the number of its
# rows: enough to be efficient, and few enough to stay in cache and in memory, since a
# row of MAR-H has 40 thousand numbers.
MODULATION_ROWS = 128

# The most transitions of given paths in one head call. It only limits the memory.
GIVEN_ROWS = 4096


def predict(
    denoiser: Denoiser,
    params: ArrayTree,
    x: Array,
    modulations: ArrayTree,
    scale: Array | float | None = None,
) -> tuple[Array, Array]:
    """Returns (eps, v), each [R, d], for rows x [R, d]. With a `scale` the modulations
    have 2R rows, first the conditional ones, then the unconditional ones."""
    rows = (x if scale is None else jnp.concatenate([x, x]), read_at_once(modulations))
    out = with_enough_rows(
        lambda params, rows: denoiser.denoise(params, *rows), params, rows
    )
    count, dim = rows[0].shape
    if out.shape not in ((count, dim), (count, 2 * dim)):
        raise UserError(
            f"denoise returned {list(out.shape)} for {count} rows of {dim} numbers; it"
            f" must return eps and v, {[count, 2 * dim]}, or a flow's velocity"
        )
    eps, v = guide(out, dim, scale)
    return eps.astype(x.dtype), v.astype(x.dtype)


class Chains(NamedTuple):
    """The denoising chains of R tokens, which run side by side. The record holds
    everything except their noise.

    denoiser, params: the network and its parameters.
    time: [T, ...] the result of `embed_time` for the T timesteps.
    z: [R or 2R, D] the context of each token; with guidance there are 2R rows, first
        the conditional ones, then the unconditional ones.
    c: the coefficients of the schedule, arrays [T].
    temperature: [] the factor of the standard deviation of every step.
    scale: the guidance scale [R, 1], or one number; None without guidance.
    final_noise: whether noise is added in step 0. MAR adds none.
    known_variance: whether the variances are the schedule's alone, as a flow's are.
    """

    denoiser: Denoiser
    params: ArrayTree
    time: Array
    z: Array
    c: Coefficients
    temperature: Array | float = 1.0
    scale: Array | float | None = None
    final_noise: bool = False
    known_variance: bool = False

    @property
    def steps(self) -> int:
        """T, the number of denoising steps."""
        return self.time.shape[0]

    @property
    def halves(self) -> int:
        """Rows of z per token: 2 with guidance."""
        return 1 if self.scale is None else 2

    def modulations(self, times: Array) -> ArrayTree:
        """Returns the modulations [M, R, ...] for each of the time features [M, ...]
        and each row of z. With guidance they have 2R rows."""
        return self.denoiser.modulate(self.params, times[:, None], self.z[None])

    def transition(self, x: Array, modulations: ArrayTree, c: Coefficients) -> Gaussian:
        """Returns p(x_{t-1} | x_t = x, z) for x [R, d], guided and without the
        temperature."""
        eps, v = predict(self.denoiser, self.params, x, modulations, self.scale)
        return transition(c, x, eps, v)

    @property
    def log_scale(self) -> Array:
        """The number that the temperature adds to every log variance."""
        return 2 * jnp.log(jnp.asarray(self.temperature, self.c.h.dtype))

    def widened(self, p: Gaussian) -> Gaussian:
        """Returns p with its standard deviation multiplied by the temperature."""
        return Gaussian(p.mean, p.log_var + self.log_scale)


class Start(NamedTuple):
    """The states from which R chains go on.

    left: [R] the number of steps that are left: T for a whole chain, 0 for a chain that
        is finished.
    x: [R, d] the state x_left of each chain.
    """

    left: Array
    x: Array


class Path(NamedTuple):
    """The denoising paths of R chains. If a chain starts at x_left with left < T, the
    entries from index left on have no meaning.

    x: [R, d] the last states x_0.
    states: [T, R, d] entry i is x_i.
    laws: [T, R, d] entry i is the Gaussian that x_i was drawn from. If the last step
        has no noise, x_0 is the mean of entry 0.
    """

    x: Array
    states: Array
    laws: Gaussian


def sample_chain(chains: Chains, noise: Array) -> Array:
    """Runs the chains in parallel and returns x_0 [R, d]. The noise is the same as in
    `sample_path`."""
    return _run(chains, noise, record=False)[0]


def sample_path(chains: Chains, noise: Array, start: Start | None = None) -> Path:
    """Runs the chains like `sample_chain`, and also returns the states on the way and
    the Gaussians that they were drawn from.

    noise: [T + 1, R, d] entry T is x_T, and entry i is the noise of step i.
    start: the states to start from, in place of x_T.
    """
    x, (states, laws) = _run(chains, noise, start, record=True)
    return Path(x, states[::-1], jax.tree.map(lambda a: a[::-1], laws))


def _run(
    chains: Chains, noise: Array, start: Start | None = None, *, record: bool
) -> tuple[Array, ArrayTree]:
    """Runs the chains and returns x_0 [R, d]. With `record`, also returns the states
    and the Gaussians of all steps, [T, R, d], in the order in which the chains run: the
    first entry is for step T - 1."""
    steps = chains.steps
    gain = jnp.full(steps, chains.temperature, noise.dtype)
    if not chains.final_noise:
        gain = gain.at[0].set(0.0)
    chunk = chunk_length(steps, chains.z.shape[0], MODULATION_ROWS)
    backwards = jax.tree.map(
        lambda a: a[::-1].reshape(steps // chunk, chunk, *a.shape[1:]),
        (jnp.arange(steps), chains.time, chains.c, noise[:-1], gain),
    )

    def step(x: Array, inputs: ArrayTree) -> tuple[Array, ArrayTree]:
        index, modulations, c, eps, g = inputs
        p = chains.transition(x, modulations, c)
        drawn = p.mean + g * jnp.exp(0.5 * p.log_var) * eps
        if start is not None:
            drawn = jnp.where((index < start.left)[:, None], drawn, x)
        return drawn, (drawn, chains.widened(p)) if record else None

    def several_steps(x: Array, inputs: ArrayTree) -> tuple[Array, ArrayTree]:
        index, times, *rest = inputs
        return jax.lax.scan(step, x, (index, chains.modulations(times), *rest))

    x, seen = jax.lax.scan(
        several_steps, noise[-1] if start is None else start.x, backwards
    )
    return x, jax.tree.map(lambda a: a.reshape(steps, *a.shape[2:]), seen)


def path_laws(chains: Chains, path: Array) -> Gaussian:
    """Returns the transitions [T, R, d] from x_{i+1} to x_i, for given paths [T + 1, R,
    d].

    All states are given, so the transitions need not be computed one after the other:
    the T x R transitions are cut into chunks, and each chunk is a single head call.
    """
    steps = chains.steps
    chunk = steps // path_law_calls(steps, chains.z.shape[0])
    chunks = jax.tree.map(
        lambda a: a.reshape(steps // chunk, chunk, *a.shape[1:]),
        (chains.time, chains.c, path[1:]),
    )

    def several(inputs: ArrayTree) -> Gaussian:
        times, c, x = inputs
        return chains.widened(
            jax.vmap(chains.transition)(x, chains.modulations(times), c)
        )

    laws = jax.lax.map(several, chunks)
    return jax.tree.map(lambda a: a.reshape(path[1:].shape), laws)


def path_law_calls(steps: int, rows: int) -> int:
    """Returns the number of head calls that `path_laws` makes for `rows` rows of z."""
    return steps // chunk_length(steps, rows, GIVEN_ROWS)


def chunk_length(steps: int, rows: int, most_rows: int) -> int:
    """Returns the number of steps in a chunk: the largest divisor of `steps` up to
    most_rows / rows, rounded up.

    For example, `chunk_length(100, 64, 128)` is 2, and `chunk_length(100, 10, 128)` is
    10.
    """
    most = max(1, math.ceil(most_rows / rows))
    return max(d for d in range(1, steps + 1) if steps % d == 0 and d <= most)
