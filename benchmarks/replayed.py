"""Lets models whose weights are not at hand accept as many drafts as the embedded ones do.

Published weights cannot be had here. The cost of a call is real with random ones; which drafts are accepted
is recorded of the embedded models and replayed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Iterator
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from cspd_jax.diffusion.chain import Chains, sample_chain
from cspd_jax.diffusion.gaussian import coefficients
from cspd_jax.diffusion.schedule import sampling_schedule
from cspd_jax.image import calibration, rounds, sampler
from cspd_jax.image import chain as speculation
from cspd_jax.image.bound import bind, embed_time
from cspd_jax.image.chain import ChainRandomness
from cspd_jax.image.drafters import drafter_of
from cspd_jax.image.options import Options
from cspd_jax.keys import row_keys
from cspd_jax.models import ImageModel
from cspd_jax.text import ModelDrafter


def randomness(rows: int, dim: int, steps: int, seed: int = 0) -> tuple[jax.Array, jax.Array]:
    """Draws noise [T + 1, R, d] and keys [R] of chains."""
    key = jax.random.key(seed)
    noise = jax.random.normal(jax.random.fold_in(key, 1), (steps + 1, rows, dim))
    return noise, jax.random.split(jax.random.fold_in(key, 3), rows)


def contexts(model: ImageModel, options: Options, images: int = 10) -> jax.Array:
    """Returns z [N, D] of all tokens of an image of each class."""
    keys, labels = row_keys(jax.random.key(0), images), jnp.arange(images, dtype=jnp.int32)

    def draw(bound, z, *group):
        return sampler.draw_tokens(bound, z, *group)[0], z

    @jax.jit
    def run(params):
        bound = bind(model.network, params, keys, labels, options)
        ((segment, groups),) = sampler.plan_segments(model.network.seq_len, options)
        step = functools.partial(sampler.ar_step, bound, segment, draw=draw)
        return jax.lax.scan(step, sampler.empty_state(bound), sampler.group_arrays(groups, options))[1]

    return run(model.params).reshape(-1, model.config.context_width)


def recorded(
    model: ImageModel, rows: int, windows: tuple[int, ...], options: Options
) -> tuple[np.ndarray, np.ndarray]:
    """Runs a model on `rows` of its contexts, for others to replay.

    Returns how many drafts a row kept in the call that began with so many steps left, less one [T, R]; and
    the head calls of each row.
    """
    drafter, found = calibration.drafter_for(model, options), contexts(model, options)
    schedule = sampling_schedule(options.respacing)
    features = model.network.embed_time(model.params, jnp.asarray(schedule.timestep_map))
    chosen = np.random.default_rng(rows).integers(len(found), size=rows)
    noise, keys = randomness(rows, model.config.token_dim, schedule.num_steps)
    z = found[chosen]
    chains = Chains(model.network, model.params, features, z, coefficients(schedule))
    inputs, chain = speculation.begin(chains, ChainRandomness(noise[-1], keys), drafter)
    call = jax.jit(functools.partial(speculation.speculate_once, inputs), static_argnums=1)
    kept, count = np.zeros((schedule.num_steps, rows), np.int32), np.zeros(rows, int)
    for made in itertools.count():
        left = np.asarray(chain.left)
        going = np.nonzero(left)[0]
        if not len(going):
            return kept, count
        count[going] += 1
        chain, _ = call(chain, windows[min(made, len(windows) - 1)])
        # A residual takes one more step; where there was none, a draft less is kept, and that one is taken.
        kept[left[going] - 1, going] = (left - np.asarray(chain.left))[going] - 1


@contextlib.contextmanager
def replaying(chains: jax.Array | None, blocks: jax.Array | None = None, first: int = 0) -> Iterator[None]:
    """Makes programs that are traced meanwhile accept what was recorded.

    chains: [T, R], as `recorded` returns them.
    blocks: [B, tokens], of rounds that begin so many tokens behind `first`.
    """
    steps, transitions = speculation.verify_steps, rounds.verify_transitions

    def chain(inputs, draft, keys):
        verdict = steps(inputs, draft, keys)
        kept = chains[draft.steps[0], jnp.arange(chains.shape[1])]
        return verdict._replace(block=verdict.block._replace(kept=kept))

    def block(inputs, state, *drafted):
        at = jnp.clip(state.group - first, 0, blocks.shape[1] - 1)
        return transitions(inputs, state, *drafted)._replace(kept=blocks[jnp.arange(len(at)), at])

    with contextlib.ExitStack() as patches:
        if chains is not None:
            patches.enter_context(mock.patch.object(speculation, "verify_steps", chain))
        if blocks is not None:
            patches.enter_context(mock.patch.object(rounds, "verify_transitions", block))
        yield


def name_of(draft_lengths: tuple[int, ...]) -> str:
    """Writes draft lengths: runs of equal ones as count x length, for example 4x32,8."""
    runs = [(n, len(list(same))) for n, same in itertools.groupby(draft_lengths)]
    return ",".join(f"{count}x{n}" if count > 1 else str(n) for n, count in runs)


@functools.partial(jax.jit, static_argnums=0)
def run_chains(network, params, z, noise, keys, options: Options) -> jax.Array:
    """Runs the chains of one group, z [R, D], noise [T + 1, R, d] and keys [R] given: x_0 [R, d]."""
    respacing = str(options.respacing)
    c = coefficients(sampling_schedule(respacing), noise.dtype)
    time = embed_time(network, params, respacing)
    chains = Chains(network, params, time, z, c, options.temperature, final_noise=options.final_noise)
    if options.chain is None or options.chain_drafter is None:
        return sample_chain(chains, noise)
    drafter = drafter_of(options.chain.drafter, options.chain_drafter, respacing, noise.dtype)
    return speculation.speculate_chain(chains, ChainRandomness(noise[-1], keys), drafter, options.chain).x


@functools.partial(jax.jit, static_argnums=0)
def replayed_chains(model, params, z, noise, keys, options: Options, kept):
    """Runs chains, with as many drafts kept as were `recorded`."""
    with replaying(kept):
        return run_chains.__wrapped__(model, params, z, noise, keys, options)


@dataclasses.dataclass(frozen=True)
class Replayed:
    """Runs a draft model for its time, while each of its tokens is right with a given probability.

    Parameters: (the model's, right [B, N] tokens, use [B, N] whether to propose them).
    """

    inner: ModelDrafter

    def begin(self, params, prompts, max_len):
        return self.inner.begin(params[0], prompts, max_len)

    def draft(self, params, state, request):
        weights, right, use = params
        drafts, state = self.inner.draft(weights, state, request)
        at = request.length[:, None] + jnp.arange(request.max_gamma)
        take = lambda a: jnp.take_along_axis(a, jnp.minimum(at, a.shape[1] - 1), axis=1)
        wrong = (take(right) + 1 + drafts.tokens % 2) % request.num_ids  # so that the draft is not left out
        return drafts._replace(tokens=jnp.where(take(use), take(right), wrong)), state
