"""Exact ways to speculate along a denoising chain, in head calls of the same chains of the default model.

    python benchmarks/chain_rivals.py results.json [--rows 512] [--cfg 1,3] [--windows 8,16,32]

Every way drafts M steps from frozen or corrected predictions, verifies them in one head call, and keeps a
prefix; T = 100 with noise in the last step, contexts of the model's own generations.

drafts: what stays as it was at the last state that the head has seen: `x0`, its prediction of x_0, as in
    autospeculation (arXiv 2505.03983, in whose coordinates that is the frozen drift); `eps`, its prediction
    of the noise, which follows MAR's uneven steps where the frozen drift of De Bortoli et al. (2501.05370)
    means even ones; or `corrected`, x_0-hat moved by the noise that was drawn, as this library does.
start: `fresh` if each round first calls the head at the state where it starts, as both papers do: two calls
    in sequence a round, of whose drafts the first is always accepted; or `kept`, the prediction of the call
    that verified the last step.
test: `each` transition by min(1, p / q), a maximal coupling like the papers' reflection, which has the same
    acceptance (it needs equal variances, and those of MAR are learnt), as this library did in its first
    versions; or `block` verification as in 2606.13426, by `verify_gaussian_block`, which does not need them
    equal either, as this library does.

The file is a JSON list of rows; rows that are there are not computed again.
"""

from __future__ import annotations

import functools
import itertools
import json
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from inputs import several
from toy import Parser, begin, load

from cspd_jax._utils.files import write_text
from cspd_jax.cli._arguments import positive
from cspd_jax.coupling import (
    accepts,
    gaussian_residual,
    log_acceptance_of_ratio,
    log_ratio,
    uniform,
    verify_gaussian_block,
)
from cspd_jax.diffusion import chain
from cspd_jax.diffusion.gaussian import Coefficients, Gaussian, coefficients, predicted_x0, transition_from_x0
from cspd_jax.diffusion.schedule import sampling_schedule
from cspd_jax.image.chain import calibration
from cspd_jax.image.chain.drafters import NoiseCorrected, Prediction
from cspd_jax.image.chain.head import head_of_steps
from cspd_jax.image.options import Options

_CLIP = 5.0

Array = jax.Array


class Way(NamedTuple):
    """How a chain is speculated; the names are those of this file's beginning."""

    drafts: str
    start: str
    test: str

    def __str__(self) -> str:
        known = {
            ("corrected", "kept", "block"): "this library",
            ("corrected", "kept", "each"): "this library, one by one",
            ("x0", "fresh", "each"): "autospeculation",
            ("eps", "fresh", "each"): "De Bortoli et al.",
        }
        return known.get(self, ", ".join(self))


WAYS = (
    Way("corrected", "kept", "block"),
    Way("corrected", "kept", "each"),
    Way("x0", "kept", "each"),
    Way("eps", "kept", "each"),
    Way("x0", "fresh", "each"),
    Way("eps", "fresh", "each"),
    Way("corrected", "fresh", "each"),
    Way("x0", "fresh", "block"),
)


class Chains(NamedTuple):
    """R chains on their way: `left` [R] steps are left, x [R, d] is the state, `seen` the prediction that is
    kept: x_0-hat, or eps where that is frozen."""

    left: Array
    x: Array
    seen: Prediction


class Round(NamedTuple):
    """M drafted transitions of R chains: at steps [M, R], from states [M, R, d], to states, drawn from q."""

    steps: Array
    before: Array
    after: Array
    q: Gaussian
    valid: Array


def at(c: Coefficients, steps: Array) -> Coefficients:
    return Coefficients(*(a[steps][..., None] for a in c))


def as_x0(way: Way, c: Coefficients, x: Array, seen: Prediction) -> Prediction:
    """The prediction of x_0 at x that a kept prediction implies."""
    x0 = predicted_x0(c, x, seen.x0) if way.drafts == "eps" else seen.x0
    return Prediction(jnp.clip(x0, -_CLIP, _CLIP), seen.v)


def as_seen(way: Way, c: Coefficients, x: Array, eps: Array, v: Array) -> Prediction:
    return Prediction(eps if way.drafts == "eps" else predicted_x0(c, x, eps), v)


def drafted(way: Way, c: Coefficients, drafter: NoiseCorrected, chains: Chains, window: int, noise) -> Round:
    """noise: [M, R, d], new in every round: a block's test looks at drafts that it does not keep."""
    ahead = jnp.arange(window)[:, None]
    steps, valid = jnp.maximum(chains.left - 1 - ahead, 0), chains.left > ahead

    def step(carry, inputs):
        (x, seen), (t, noise) = carry, inputs
        guess = as_x0(way, at(c, t), x, seen)
        q = transition_from_x0(at(c, t), x, guess.x0, guess.v)
        deviation = jnp.exp(0.5 * q.log_var) * noise
        if way.drafts == "corrected":
            seen = drafter.advance(t, seen, x, deviation)
        after = q.mean + deviation
        return (after, seen), (x, after, q)

    _, (before, after, q) = jax.lax.scan(step, (chains.x, chains.seen), (steps, noise))
    return Round(steps, before, after, q, valid)


def tested_one_by_one(p: Gaussian, made: Round, uniforms: Array, key: Array) -> tuple[Array, Array]:
    """How many drafts are kept [R], and the state after them [R, d] where not all are."""
    passed = accepts(uniforms, log_acceptance_of_ratio(log_ratio(p, made.q, made.after))) & made.valid
    window, lanes = len(passed), jnp.arange(passed.shape[1])
    n = jnp.min(jnp.where(passed, window, jnp.arange(window)[:, None]), axis=0)
    last = jnp.minimum(n, window - 1)
    p, q = jax.tree.map(lambda a: a[last, lanes], (p, made.q))
    keys = jax.random.split(key, len(lanes))
    needed = n < jnp.sum(made.valid, axis=0)
    return n, jax.vmap(lambda k, p, q, on: gaussian_residual(k, p, q, needed=on).value)(keys, p, q, needed)


def tested_as_block(p: Gaussian, made: Round, uniforms: Array, key: Array) -> tuple[Array, Array]:
    """The same by block verification, which draws uniforms of its own."""
    keys = jax.random.split(key, made.valid.shape[1])
    found = jax.vmap(verify_gaussian_block, (0, 1, 1, 1, 1))(keys, p, made.q, made.after, made.valid)
    return found.kept, found.value


@functools.partial(jax.jit, static_argnames=("way", "window", "model"))
def run_chains(way: Way, window: int, model, params, time, z, scale, c, drafter, x, key):
    """Calls in sequence [R] until each chain was finished, drafts tested and kept, and the rounds of the
    slowest."""
    rows, lanes = len(x), jnp.arange(len(x))
    call = head_of_steps(chain.Chains(model, params, time, z, c, scale=scale), rows)
    test = {"each": tested_one_by_one, "block": tested_as_block}[way.test]
    start = Chains(jnp.full(rows, len(c[0])), x, drafter.start(x))
    if way.drafts == "eps":
        start = start._replace(seen=Prediction(x, start.seen.v))

    def one_round(carry):
        chains, calls, kept, drafts, rounds = carry
        active = chains.left > 0
        if way.start == "fresh":
            t = jnp.maximum(chains.left - 1, 0)
            eps, v = call(t[None], chains.x[None])
            chains = chains._replace(seen=as_seen(way, at(c, t), chains.x, eps[0], v[0]))
        own = jax.random.fold_in(key, rounds)
        noise = jax.random.normal(jax.random.fold_in(own, 1), (window, *start.x.shape))
        made = drafted(way, c, drafter, chains, window, noise)
        eps, v = call(made.steps, made.before)
        cc = at(c, made.steps)
        x0 = predicted_x0(cc, made.before, eps)
        p = transition_from_x0(cc, made.before, x0, v)
        for_uniforms, for_residual = jax.random.split(own)
        n, other = test(p, made, uniform(for_uniforms, made.valid.shape), for_residual)
        ends = jnp.sum(made.valid, axis=0)
        n = jnp.minimum(n, ends)
        if way.start == "fresh":  # the first draft comes from the target itself, whatever rounding says
            n = jnp.maximum(n, 1)
        rejected = n < ends
        last = jnp.clip(jnp.where(rejected, n, n - 1), 0, window - 1)
        x = jnp.where(rejected[:, None], other, made.after[last, lanes])
        step = made.steps[last, lanes]
        if way.drafts == "corrected":
            seen = Prediction(x0[last, lanes], v[last, lanes])
            seen = drafter.advance(step, seen, made.before[last, lanes], x - p.mean[last, lanes])
        else:
            seen = as_seen(way, at(c, step), made.before[last, lanes], eps[last, lanes], v[last, lanes])
        moved = Chains(chains.left - n - rejected, x, seen)
        chains = jax.tree.map(
            lambda a, b: jnp.where(active.reshape(-1, *[1] * (a.ndim - 1)), a, b), moved, chains
        )
        each = 2 if way.start == "fresh" else 1
        return (
            chains,
            calls + each * active,
            kept + jnp.sum(jnp.where(active, n, 0)),
            drafts + jnp.sum(jnp.where(active, n + rejected, 0)),
            rounds + 1,
        )

    end = jax.lax.while_loop(
        lambda carry: jnp.any(carry[0].left > 0),
        one_round,
        (start, jnp.zeros(rows, jnp.int32), jnp.int32(0), jnp.int32(0), jnp.int32(0)),
    )
    return end[0].x, *end[1:]


def make_parser() -> Parser:
    parser = Parser(__doc__, file=Path("rivals.json"), rows=4, windows="3")
    parser.add_argument("file", type=Path)
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--cfg", type=several(float), default="1,3")
    parser.add_argument("--windows", type=several(positive), default="8,16,32")
    return parser


def main() -> None:
    args = begin(make_parser())
    found: list[dict[str, Any]] = json.loads(args.file.read_text()) if args.file.exists() else []
    model = load("default", args.toy)
    schedule = sampling_schedule(model.config.respacing)
    c = coefficients(schedule)
    features = model.network.embed_time(model.params, jnp.asarray(schedule.timestep_map))
    cells = list(itertools.product(args.cfg, args.windows, WAYS))
    if args.toy:  # each word of the ways, and guidance
        cells = [*(cells[i] for i in (0, 5, 7)), cells[-1]]
    for cfg, window, way in cells:
        cell = {"cfg": cfg, "M": window, "rows": args.rows, **way._asdict()}
        if any(cell.items() <= row.items() for row in found):
            continue
        options = Options(
            num_iter=model.config.seq_len,
            respacing=model.config.respacing,
            guided=cfg != 1,
            cfg=cfg,
            final_noise=True,
        )
        calibrated = calibration.get(model, options).calibration
        chosen = np.random.default_rng(0).integers(calibrated.contexts.shape[1], size=args.rows)
        z = calibrated.contexts[:, chosen].reshape(-1, calibrated.contexts.shape[-1])
        first = jax.random.normal(jax.random.key(1), (args.rows, model.config.token_dim))
        begun = time.perf_counter()
        x, calls, kept, drafts, _ = jax.block_until_ready(
            run_chains(
                way, window, model.network, model.params, features, z, None if cfg == 1 else cfg, c,
                calibrated.drafter, first, jax.random.key(2),
            )
        )  # fmt: skip
        row = {
            **cell,
            "name": str(way),
            "calls": round(float(calls.mean()), 2),
            "standard_error": round(float(calls.std() / args.rows**0.5), 2),
            "slowest": int(calls.max()),
            "acceptance": round(float(kept / drafts), 3),
            "mean": round(float(x.mean()), 4),
            "std": round(float(x.std()), 4),
            "seconds": round(time.perf_counter() - begun, 1),
        }
        found.append(row)
        write_text(args.file, json.dumps(found, indent=1) + "\n")
        print(f"cfg {cfg:g}, M {window}, {way}: {row['calls']} calls, acceptance {row['acceptance']}",
              file=sys.stderr)  # fmt: skip


if __name__ == "__main__":
    main()
