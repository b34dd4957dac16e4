"""What drafts ahead of a causal model's token in work would be worth: acceptance of each, nothing timed.

    python benchmarks/causal_ahead.py                      # the embedded causal model
    python benchmarks/causal_ahead.py --draft RUN/model    # a smaller model's drafts as well

A token of these models is a function of the last noisy state and of its own context, so a token drafted in
another context is never the target's, and several tokens cannot be verified in one pass. What can be drafted
ahead are the noisy steps of the next token's chain, under a guess of its context. The first of them are
then verified in one head call as soon as the context is known, and those up to the first rejection are kept.
Contexts are guessed by feeding the backbone what the head predicts of the token in work so far, or by ridge
regression from the context and that prediction (in place of a small distilled head).

For each way: the noisy steps kept, on average, and the head calls in sequence that the token then takes: one
that verifies, and those of the steps that are left. Prints a table on standard error, one JSON object on
standard output.
"""

from __future__ import annotations

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
from causal import MODEL, options_of
from inner import randomness, say
from toy import Parser, begin, load

from cspd_jax.diffusion.chain import Chains, path_log_density, predict, sample_path
from cspd_jax.diffusion.gaussian import coefficients, predicted_x0
from cspd_jax.diffusion.schedule import sampling_schedule
from cspd_jax.errors import UserError
from cspd_jax.image import sampler
from cspd_jax.image.chain import calibration, speculation
from cspd_jax.image.chain.speculation import ChainRandomness
from cspd_jax.image.protocol import CausalTokenModel
from cspd_jax.keys import row_keys
from cspd_jax.weights.checks import check_draft

SHARES_LEFT = (1.0, 0.6, 0.4, 0.25, 0.1)  # of the steps, when the prediction is taken
WINDOW = 16


class Setting:
    """A model, the images that it made, and what chains at any position of them need."""

    def __init__(self, model, steps: int, tokens, labels):
        self.network, self.params, self.tokens = model.network, model.params, tokens
        schedule = sampling_schedule(f"flow{steps}")
        self.steps, self.c = schedule.num_steps, coefficients(schedule)
        self.time = self.network.embed_time(self.params, jnp.asarray(schedule.timestep_map))
        self.embedding = self.network.embed_class(self.params, labels, jnp.zeros(len(labels), bool))

    def context(self, tokens, position: int):
        """z [B, D] of the tokens at a position."""
        rows = jnp.full((len(tokens), 1), position)
        return _context(self.network, self.params, tokens, self.embedding, rows)[:, 0]

    def path(self, z, noise):
        """All states [T + 1, B, d] of chains under z."""
        return _path(self.network, self.params, self.time, z, noise, self.c)

    def predictions(self, states, z):
        """x_0-hat [T, B, d] at the states that each step starts from."""
        return _predictions(self.network, self.params, self.time, states, z, self.c)

    def log_density(self, states, z):
        """Of the noisy steps [B]."""
        return _log_density(self.network, self.params, self.time, z, states, self.c)


@functools.partial(jax.jit, static_argnums=0)
def _context(network, params, tokens, embedding, rows):
    known = jnp.full(len(tokens), network.seq_len)
    return network.context(params, tokens, None, known, embedding, rows, bucket=network.seq_len)


@functools.partial(jax.jit, static_argnums=0)
def _path(network, params, time, z, noise, c):
    path = sample_path(Chains(network, params, time, z, c), noise)
    return jnp.concatenate([path.states, noise[-1:]])


@functools.partial(jax.jit, static_argnums=0)
def _predictions(network, params, time, states, z, c):
    def one(inputs):
        time, c, x = inputs
        eps, _ = predict(network, params, x, network.modulate(params, time[None], z))
        return predicted_x0(c, x, eps)

    return jax.lax.map(one, (time, c, states[1:]))


@functools.partial(jax.jit, static_argnums=0)
def _log_density(network, params, time, z, states, c):
    return path_log_density(Chains(network, params, time, z, c), states)


def kept_steps(setting: Setting, states, drafted_x0, z) -> np.ndarray:
    """Expected number of noisy steps kept [B], of states drafted with predictions `drafted_x0` [T, B, d].
    Both Gaussians of a step have one variance, so it is kept with probability 2 Phi(-distance / 2)."""
    c = setting.c
    apart = c.mean_x0[:, None, None] * (drafted_x0 - setting.predictions(states, z))
    distance = jnp.linalg.norm(apart, axis=-1) * jnp.exp(-0.5 * c.log_beta)[:, None]
    passes = 2 * jax.scipy.stats.norm.cdf(-distance[:0:-1] / 2)  # in the order in which they are taken
    return np.asarray(jnp.cumprod(passes, axis=0).sum(0))


def calls_by_steps_left(setting: Setting, drafter, z, states) -> np.ndarray:
    """Mean head calls [T + 1] of chains that are speculated along from so many steps left on."""
    rows, found = z.shape[0], []
    random = ChainRandomness(states[-1], randomness(rows, states.shape[-1], setting.steps, seed=5)[1])
    lefts = np.unique(np.linspace(1, setting.steps, 9).astype(int))

    @jax.jit
    def run(left, x, random, drafter):
        chains = Chains(setting.network, setting.params, setting.time, z, setting.c)
        inputs, chain = speculation.begin(chains, random, drafter)
        chain = chain._replace(left=jnp.full(rows, left), x=x)

        def call(carry):
            chain, calls = carry
            busy = jnp.sum(chain.left > 0)
            chain, _ = speculation.speculate_once(inputs, chain, WINDOW)
            return chain, calls + busy

        return jax.lax.while_loop(lambda carry: jnp.any(carry[0].left > 0), call, (chain, jnp.int32(0)))[1]

    for left in lefts:
        found.append(float(run(int(left), states[left], random, drafter)) / rows)
    return np.interp(np.arange(setting.steps + 1), [0, *lefts], [0.0, *found])


def positions_of(model) -> range:
    return range(2, model.seq_len - 2, 6)


def ridge(setting: Setting):
    """The next context from the context and the first prediction at each position, fitted on other images."""
    half = len(setting.tokens) // 2
    fitted = {}
    for position in positions_of(setting.network):
        z = setting.context(setting.tokens, position)
        noise, _ = randomness(len(z), setting.tokens.shape[-1], setting.steps, seed=position)
        first = setting.predictions(jnp.broadcast_to(noise[-1], noise.shape), z)[-1]
        features = np.concatenate([z, first, np.ones((len(z), 1))], axis=1)[:half].astype(np.float64)
        wanted = np.asarray(setting.context(setting.tokens, position + 1), np.float64)[:half]
        gram = features.T @ features + 1e-2 * half * np.eye(features.shape[1])
        fitted[position] = np.linalg.solve(gram, features.T @ wanted)
    return fitted


def measure(model, draft, steps: int, images: int) -> list[dict]:
    labels = jnp.arange(images, dtype=jnp.int32) % model.config.num_classes
    keys, options = row_keys(jax.random.key(1), images), options_of(steps)
    tokens = sampler.sample(model.network, model.params, keys, labels, options).tokens
    setting = Setting(model, steps, tokens, labels)
    drafter = calibration.get(model, options).calibration.drafter
    guessed = ridge(setting)
    kept: dict[str, list[np.ndarray]] = {}
    calls, whole = [], []
    for position in positions_of(setting.network):
        z, dim = setting.context(tokens, position), tokens.shape[-1]
        states = setting.path(z, randomness(images, dim, setting.steps, seed=position)[0])
        predicted = setting.predictions(states, z)
        tokens_here = tokens.at[:, position].set(setting.network.finish(states[0]))
        after = setting.context(tokens_here, position + 1)
        noise = randomness(images, dim, setting.steps, seed=1000 + position)[0]
        calls.append(calls_by_steps_left(setting, drafter, after, setting.path(after, noise)))
        ways = {
            f"fed back with {share:.0%} of the steps left": setting.context(
                tokens.at[:, position].set(
                    setting.network.finish(predicted[round(share * setting.steps) - 1])
                ),
                position + 1,
            )
            for share in SHARES_LEFT
        }
        features = jnp.concatenate([z, predicted[-1], jnp.ones((images, 1))], axis=1)
        ways["guessed by ridge regression"] = features @ jnp.asarray(guessed[position], z.dtype)
        for name, guess in ways.items():
            drafted = setting.path(guess, noise)
            part = kept_steps(setting, drafted, setting.predictions(drafted, guess), after)
            kept.setdefault(name, []).append(part)
        if draft is not None:
            small = Setting(draft, steps, tokens, labels)
            own = small.context(tokens_here, position + 1)
            drafted = small.path(own, noise)
            part = kept_steps(setting, drafted, small.predictions(drafted, own), after)
            kept.setdefault("a smaller model", []).append(part)
            ratio = setting.log_density(drafted, after) - small.log_density(drafted, own)
            whole.append(np.asarray(jnp.minimum(1, jnp.exp(ratio))))
    table = np.mean(calls, axis=0)
    found = [{"way": "nothing ahead", "plain": steps + 1, "kept": 0.0, "calls": float(table[-1])}]
    for name, parts in kept.items():
        steps_kept = np.concatenate(parts)
        left = setting.steps - steps_kept
        needed = 1 + np.interp(left, np.arange(len(table)), table)
        row = {
            "way": name,
            "plain": steps + 1,
            "kept": float(steps_kept.mean()),
            "calls": float(needed.mean()),
        }
        if name == "a smaller model":
            row["whole_path_accepted"] = float(np.mean(whole))
        found.append(row)
    for row in found:
        more = (
            f"; whole paths accepted {row['whole_path_accepted']:.3f}" if "whole_path_accepted" in row else ""
        )
        say(
            f"{steps} noisy steps, {row['way']}: {row['kept']:.1f} kept, {row['calls']:.1f} head calls"
            f" in sequence{more}"
        )
    return found


def make_parser() -> Parser:
    parser = Parser(__doc__, images=8, draft=MODEL)
    parser.add_argument("--draft", help="a smaller causal model of the same tokens")
    parser.add_argument("--images", type=int, default=256)
    return parser


def main() -> None:
    parser = make_parser()
    args = begin(parser)
    if args.images < 2:
        parser.error("half of the images are what the ridge regression is fitted to; ask for at least 2")
    model = load(MODEL, args.toy)
    draft = None if args.draft is None else load(args.draft, args.toy)
    if draft is not None:
        check_draft(model.config, draft.config)
        if not isinstance(draft.network, CausalTokenModel):
            raise UserError(f"--draft {args.draft} is no causal model, as {MODEL} is")
    steps_of_all = (5,) if args.toy else (100, 25)
    print(json.dumps([row for steps in steps_of_all for row in measure(model, draft, steps, args.images)]))


if __name__ == "__main__":
    main()
