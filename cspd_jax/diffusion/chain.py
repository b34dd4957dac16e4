"""The denoising chain: T transitions from noise to a token, one after the other."""

from __future__ import annotations

import math
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
from chex import ArrayTree

from cspd_jax._utils.accelerators import read_at_once, with_enough_rows
from cspd_jax.diffusion.gaussian import (
    Coefficients,
    Gaussian,
    guide,
    log_density,
    transition,
)

Array = jax.Array


class Denoiser(Protocol):
    """The network of the chain, in three parts by what they depend on; R is any number
    of rows."""

    def embed_time(self, params: ArrayTree, timesteps: Array) -> Array:
        """Maps original timesteps [T] to features [T, ...], computed once per
        generation."""

    def modulate(self, params: ArrayTree, time: Array, z: Array) -> ArrayTree:
        """Features [..., W] and z [..., D], broadcast together -> pytree of what (t, z)
        contributes."""

    def denoise(self, params: ArrayTree, x: Array, modulations: ArrayTree) -> Array:
        """Maps x [R, d] and its modulations to eps | v [R, 2d]; of a flow head the
        velocity [R, d]."""


# Modulations of several steps are made in one matrix product: enough rows to be
# efficient, few enough to stay in cache (and in memory: a row of MAR-H has 40 thousand
# numbers).
MODULATION_ROWS = 128

# Transitions of given paths in one head call; limits memory only.
GIVEN_ROWS = 4096


def predict(
    denoiser: Denoiser,
    params: ArrayTree,
    x: Array,
    modulations: ArrayTree,
    scale: Array | float | None = None,
) -> tuple[Array, Array]:
    """Returns (eps, v) at rows x [R, d]; with a `scale` the modulations have 2R rows,
    conditional ones first."""
    rows = (x if scale is None else jnp.concatenate([x, x]), read_at_once(modulations))
    out = with_enough_rows(
        lambda params, rows: denoiser.denoise(params, *rows), params, rows
    )
    eps, v = guide(out, x.shape[-1], scale)
    return eps.astype(x.dtype), v.astype(x.dtype)


def step_distribution(
    denoiser: Denoiser,
    params: ArrayTree,
    x: Array,
    modulations: ArrayTree,
    c: Coefficients,
    scale: Array | float | None = None,
) -> Gaussian:
    """Returns p(x_{t-1} | x_t = x, z) for rows [R, d], guided when there is a `scale`;
    temperature is not in it."""
    return transition(c, x, *predict(denoiser, params, x, modulations, scale))


class Chains(NamedTuple):
    """The denoising chains of R tokens, side by side: everything but their noise.

    denoiser, params: the network.
    time: `embed_time` of the T timesteps.
    z: [R, D]; with guidance [2R, D], the conditional rows first.
    c: coefficients of the schedule, [T].
    temperature: factor of the standard deviation of every step.
    scale: of guidance, [R, 1] or a scalar; None without.
    final_noise: whether noise is added in step 0, which MAR does not do.
    """

    denoiser: Denoiser
    params: ArrayTree
    time: Array
    z: Array
    c: Coefficients
    temperature: Array | float = 1.0
    scale: Array | float | None = None
    final_noise: bool = False

    @property
    def steps(self) -> int:
        return self.time.shape[0]

    def modulations(self, times: Array) -> ArrayTree:
        """Returns what times [M, ...] and each row of z contribute."""
        return self.denoiser.modulate(self.params, times[:, None], self.z[None])

    def transition(self, x: Array, modulations: ArrayTree, c: Coefficients) -> Gaussian:
        """Returns p(x_{t-1} | x_t = x, z), guided; without the temperature."""
        return step_distribution(
            self.denoiser, self.params, x, modulations, c, self.scale
        )

    def widened(self, p: Gaussian) -> Gaussian:
        """Returns p with the temperature."""
        return Gaussian(
            p.mean,
            p.log_var + 2 * jnp.log(jnp.asarray(self.temperature, p.log_var.dtype)),
        )


class Start(NamedTuple):
    """Where R chains begin.

    left: [R] steps that are left; T at the chain's own start, 0 where there is nothing
        to do.
    x: [R, d] the state x_left.
    """

    left: Array
    x: Array


class Path(NamedTuple):
    """A denoising path. Entries before its start, where that is not x_T, mean nothing.

    x: [R, d], x_0.
    states: [T, R, d], entry i is x_i.
    laws: [T, R, d] the Gaussian that x_i was drawn from; its mean, where the last step
        has no noise.
    """

    x: Array
    states: Array
    laws: Gaussian

    def log_density(self, final_noise: bool) -> Array:
        """Returns the log density of the states given x_T, without the last transition
        if that has no noise: [R]."""
        return _summed(log_density(self.laws, self.states), final_noise)


def sample_chain(chains: Chains, noise: Array) -> Array:
    """Runs the chains in parallel and returns x_0 [R, d]; noise as for
    `sample_path`."""
    return _run(chains, noise, record=False)[0]


def sample_path(chains: Chains, noise: Array, start: Start | None = None) -> Path:
    """Does what `sample_chain` does, and returns the states on the way and what they
    were drawn from.

    noise: [T + 1, R, d]; entry T is x_T, entry i is added in step i.
    start: in place of x_T.
    """
    x, (states, laws) = _run(chains, noise, start, record=True)
    return Path(x, states[::-1], jax.tree.map(lambda a: a[::-1], laws))


def _run(
    chains: Chains, noise: Array, start: Start | None = None, *, record: bool
) -> tuple[Array, ArrayTree]:
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


def path_log_density(chains: Chains, path: Array) -> Array:
    """Returns log p(x_{T-1}, ..., x_0 | x_T, z) of given paths [T + 1, R, d] (entry i
    is x_i): [R].

    Without `final_noise` the last transition is deterministic and left out.
    """
    return _summed(log_density(path_laws(chains, path), path[:-1]), chains.final_noise)


def _summed(terms: Array, final_noise: bool) -> Array:
    return jnp.sum(terms if final_noise else terms[1:], axis=0)


def path_laws(chains: Chains, path: Array) -> Gaussian:
    """Returns the transitions from x_{i+1} to x_i of given paths [T + 1, R, d]: [T, R,
    d].

    The states are given, so nothing is sequential: each chunk of the T x R transitions
    is a single head call.
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
    """Returns the number of head calls for the transitions of given paths, with `rows`
    rows of z."""
    return steps // chunk_length(steps, rows, GIVEN_ROWS)


def chunk_length(steps: int, rows: int, most_rows: int) -> int:
    """Returns the largest divisor of `steps` that keeps steps x rows near
    `most_rows`."""
    most = max(1, math.ceil(most_rows / rows))
    return max(d for d in range(1, steps + 1) if steps % d == 0 and d <= most)
