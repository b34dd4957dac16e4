"""The denoising chain: T transitions from noise to a token, one after the other."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from cspd_jax._utils.accelerators import read_at_once, with_enough_rows
from cspd_jax.diffusion.gaussian import Coefficients, Gaussian, guide, log_density, transition

Array = jax.Array


class Denoiser(Protocol):
    """The network of the chain, in three parts by what they depend on; R is any number of rows."""

    def embed_time(self, params: Any, timesteps: Array) -> Array:
        """Original timesteps [T] -> features [T, ...], computed once per generation."""

    def modulate(self, params: Any, time: Array, z: Array) -> Any:
        """Features [..., W] and z [..., D], broadcast together -> pytree of what (t, z) contributes."""

    def denoise(self, params: Any, x: Array, modulations: Any) -> Array:
        """x [R, d] and its modulations -> eps | v [R, 2d]; of a flow head the velocity [R, d]."""


# Modulations of several steps are made in one matrix product: enough rows to be efficient, few enough to stay
# in cache (and in memory: a row of MAR-H has 40 thousand numbers).
MODULATION_ROWS = 128

# Transitions of given paths in one head call; limits memory only.
GIVEN_ROWS = 4096


def predict(
    denoiser: Denoiser, params: Any, x: Array, modulations: Any, scale: Array | float | None = None
) -> tuple[Array, Array]:
    """(eps, v) at rows x [R, d]; with a `scale` the modulations have 2R rows, conditional ones first."""
    rows = (x if scale is None else jnp.concatenate([x, x]), read_at_once(modulations))
    out = with_enough_rows(lambda params, rows: denoiser.denoise(params, *rows), params, rows)
    eps, v = guide(out, x.shape[-1], scale)
    return eps.astype(x.dtype), v.astype(x.dtype)


def step_distribution(
    denoiser: Denoiser,
    params: Any,
    x: Array,
    modulations: Any,
    c: Coefficients,
    scale: Array | float | None = None,
) -> Gaussian:
    """p(x_{t-1} | x_t = x, z) for rows [R, d], guided when there is a `scale`; temperature is not in it."""
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
    context_index: [R] the row of z that each token has, where tokens share them; None: each its own. What z
        contributes is computed once for all of them.
    """

    denoiser: Denoiser
    params: Any
    time: Array
    z: Array
    c: Coefficients
    temperature: Array | float = 1.0
    scale: Array | float | None = None
    final_noise: bool = False
    context_index: Array | None = None

    @property
    def steps(self) -> int:
        return self.time.shape[0]

    @property
    def lanes(self) -> Array | None:
        """The rows of z that the rows of a head call have, conditional ones first; None: each its own."""
        return self.lanes_of(self.context_index)

    def lanes_of(self, index: Array | None) -> Array | None:
        """The same for tokens with these rows of z."""
        if index is None or self.scale is None:
            return index
        return jnp.concatenate([index, index + self.z.shape[0] // 2])

    def modulations(self, times: Array) -> Any:
        """What times [M, ...] and each row of z contribute."""
        return self.denoiser.modulate(self.params, times[:, None], self.z[None])

    def transition(self, x: Array, modulations: Any, c: Coefficients) -> Gaussian:
        """p(x_{t-1} | x_t = x, z), guided; without the temperature."""
        return step_distribution(self.denoiser, self.params, x, take(modulations, self.lanes), c, self.scale)


class Path(NamedTuple):
    """A denoising path.

    x: [R, d], x_0.
    states: [T, R, d], entry i is x_i.
    log_density: [R], of the states given x_T, without the last transition if that has no noise.
    """

    x: Array
    states: Array
    log_density: Array


def sample_chain(chains: Chains, noise: Array) -> Array:
    """Runs the chains in parallel and returns x_0 [R, d]; noise as for `sample_path`."""
    return _run(chains, noise, record=False)[0]


def sample_path(chains: Chains, noise: Array) -> Path:
    """`sample_chain`, with the states on the way and their density.

    noise: [T + 1, R, d]; entry T is x_T, entry i is added in step i.
    """
    x, (states, terms) = _run(chains, noise, record=True)
    return Path(x, states[::-1], jnp.sum(terms, axis=0))


def _run(chains: Chains, noise: Array, *, record: bool) -> tuple[Array, Any]:
    steps = chains.steps
    gain = jnp.full(steps, chains.temperature, noise.dtype)
    if not chains.final_noise:
        gain = gain.at[0].set(0.0)
    chunk = chunk_length(steps, chains.z.shape[0], MODULATION_ROWS)
    backwards = jax.tree.map(
        lambda a: a[::-1].reshape(steps // chunk, chunk, *a.shape[1:]),
        (chains.time, chains.c, noise[:-1], gain),
    )

    def step(x: Array, inputs: Any) -> tuple[Array, Any]:
        modulations, c, eps, g = inputs
        p = chains.transition(x, modulations, c)
        x = p.mean + g * jnp.exp(0.5 * p.log_var) * eps
        if not record:
            return x, None
        widened = Gaussian(jnp.zeros_like(eps), p.log_var + 2 * jnp.log(chains.temperature))
        term = log_density(widened, jnp.exp(0.5 * widened.log_var) * eps)
        return x, (x, jnp.where(g > 0, term, 0.0))

    def several_steps(x: Array, inputs: Any) -> tuple[Array, Any]:
        times, *rest = inputs
        return jax.lax.scan(step, x, (chains.modulations(times), *rest))

    x, seen = jax.lax.scan(several_steps, noise[-1], backwards)
    return x, jax.tree.map(lambda a: a.reshape(steps, *a.shape[2:]), seen)


def path_log_density(chains: Chains, path: Array) -> Array:
    """log p(x_{T-1}, ..., x_0 | x_T, z) of given paths [T + 1, R, d] (entry i is x_i) -> [R].

    Without `final_noise` the last transition is deterministic and left out.
    """
    terms = _along(log_density, chains, path)
    return jnp.sum(terms if chains.final_noise else terms[1:], axis=0)


def path_log_stds(chains: Chains, path: Array) -> Array:
    """Log sigma of the transitions from x_{i+1} to x_i of given paths, summed over dimensions: [T, R]."""
    return _along(lambda p, after: 0.5 * jnp.sum(p.log_var, axis=-1), chains, path)


def path_density_calls(steps: int, rows: int) -> int:
    """The number of head calls for the transitions of given paths, with `rows` rows of z."""
    return steps // chunk_length(steps, rows, GIVEN_ROWS)


def _along(measure: Callable[[Gaussian, Array], Array], chains: Chains, path: Array) -> Array:
    """measure(transition, after) -> [R] for all transitions of given paths: [T, R].

    The states are given, so nothing is sequential: each chunk of the T x R transitions is a single head call.
    """
    steps, lanes = chains.steps, chains.lanes
    chunk = chunk_length(steps, chains.z.shape[0] if lanes is None else len(lanes), GIVEN_ROWS)
    shift = 2 * jnp.log(jnp.asarray(chains.temperature, path.dtype))
    chunks = jax.tree.map(
        lambda a: a.reshape(steps // chunk, chunk, *a.shape[1:]),
        (chains.time, chains.c, path[1:], path[:-1]),
    )

    def several(inputs: Any) -> Array:
        times, c, x, after = inputs

        def one(modulations: Any, c: Coefficients, x: Array, after: Array) -> Array:
            p = chains.transition(x, modulations, c)
            return measure(Gaussian(p.mean, p.log_var + shift), after)

        return jax.vmap(one)(chains.modulations(times), c, x, after)

    return jax.lax.map(several, chunks).reshape(steps, -1)


def take(modulations: Any, lanes: Array | None) -> Any:
    """Those of some rows."""
    return modulations if lanes is None else jax.tree.map(lambda a: a[lanes], modulations)


def chunk_length(steps: int, rows: int, most_rows: int) -> int:
    """The largest divisor of `steps` that keeps steps x rows near `most_rows`."""
    most = max(1, math.ceil(most_rows / rows))
    return max(d for d in range(1, steps + 1) if steps % d == 0 and d <= most)
