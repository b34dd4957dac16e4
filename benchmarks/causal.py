"""Causal image models: head calls per token, and seconds of a token at SphereAR's sizes, in one run.

    python benchmarks/causal.py                 # both parts
    python benchmarks/causal.py --only calls    # head calls per token of the embedded causal model
    python benchmarks/causal.py --only seconds  # SphereAR-B and -L, one image, against plain

Published weights cannot be had here: those of the second part are random. The cost of a call is real, and
which drafts are accepted is replayed from the embedded causal model (the same windows). Prints tables on
standard error, one JSON object on standard output.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import platform

import jax
import jax.numpy as jnp
import numpy as np
from replayed import name_of, randomness, recorded, replayed_chains, run_chains
from toy import Parser, among, begin, load, median_seconds, say, sizes

from cspd_jax.image import calibration, sampler
from cspd_jax.image.bound import bind
from cspd_jax.image.chain import ChainSpeculation
from cspd_jax.image.drafters import frozen
from cspd_jax.image.options import Options
from cspd_jax.image.order import RISING, Raster
from cspd_jax.keys import row_keys
from cspd_jax.models import ImageModel
from cspd_jax.networks.config import SPHERE_PRESETS, SphereConfig
from cspd_jax.networks.sphere import SphereModel, init_params

MODEL = "default-causal"
WINDOWS, TOY_WINDOWS = ((8,), (16,), (32,)), ((3, 2),)
_REPLAYS = 6  # tokens whose accepted runs are replayed


def options_of(steps: int, cfg: float = 1.0) -> Options:
    """Returns the options of a flow of so many noisy steps."""
    guided = cfg != 1
    return Options(
        respacing=f"flow{steps}",
        guided=guided,
        cfg=cfg,
        cfg_schedule=RISING,
        order=Raster(),
        final_noise=False,
    )


def calls(model: ImageModel, windows_of_all, steps_of_all: tuple[int, ...], images: int) -> list[dict]:
    """Counts head calls of whole generations by the embedded causal model, all `images` side by side."""
    found = []
    keys, labels = row_keys(jax.random.key(11), images), jnp.arange(images, dtype=jnp.int32) % 10
    tokens = images * model.config.seq_len
    for steps in steps_of_all:
        for cfg in (1.0, 3.0):
            options = options_of(steps, cfg)
            fitted = calibration.drafter_for(model, options)
            for name, drafter, kind in (
                ("frozen", frozen(steps + 1, model.config.token_dim), "gains"),
                ("gains", fitted, "gains"),
                ("Jacobian", fitted, "jacobian"),
            ):
                for windows in windows_of_all:
                    chain = ChainSpeculation(windows, kind)
                    way = dataclasses.replace(options, denoise=chain, chain_drafter=drafter)
                    out = sampler.sample(model.network, model.params, keys, labels, way)
                    work = jax.device_get(out.counts.target)
                    row = {
                        "plain": steps + 1,
                        "cfg": cfg,
                        "drafter": name,
                        "M": name_of(windows),
                        "calls_mean": work.chain_calls.sum() / tokens,
                        "calls_of_slowest": float(work.head.sequential / model.config.seq_len),
                        "acceptance": float(work.chain_accepted.sum() / work.chain_tested.sum()),
                        "truncated": int(work.truncated.sum()),
                    }
                    found.append(row)
                    say(
                        f"{steps + 1} head calls plain, cfg {cfg:g}, {name}, M = {row['M']}:"
                        f" {row['calls_mean']:.1f} a token, {row['calls_of_slowest']:.1f} for the slowest of"
                        f" {images}; acceptance {row['acceptance']:.2f}"
                    )
    return found


def taking_turns(calls: list):
    """Returns a call that makes the first of some calls, then the second, and so on."""
    order = itertools.cycle(calls)
    return lambda: next(order)()


def token_seconds(name: str, config: SphereConfig, recorder: ImageModel, windows_of_all, steps: int, repeats):
    """Times one token of one image at the sizes `name`: the backbone's pass, and the chain by each way;
    `recorder` says which drafts are accepted."""
    model, params = SphereModel(config), jax.jit(functools.partial(init_params, config))(jax.random.key(0))
    options = options_of(steps)
    batch = bind(model, params, row_keys(jax.random.key(0), 1), jnp.zeros(1, jnp.int32), options)
    state = sampler.empty_state(batch)
    segment = sampler.Segment(config.seq_len, 1, options.respacing)

    @functools.partial(jax.jit, donate_argnums=1)
    def pass_of_backbone(params, cache, first):
        bound = dataclasses.replace(batch, params=params)
        z, _, cache = sampler.group_context(bound, segment, state._replace(cache=cache), first)
        return z, cache

    kept = [state.cache]
    half = jnp.int32(config.seq_len // 2)

    def backbone():
        z, kept[0] = pass_of_backbone(params, kept[0], half)
        return z

    z = jax.random.normal(jax.random.key(1), (1, config.width))
    given = model, params, z, *randomness(1, config.token_dim, steps + 1)
    drafted = dataclasses.replace(options, chain_drafter=frozen(steps + 1, config.token_dim))
    runs, count = {"plain": functools.partial(run_chains, *given, options)}, {"plain": steps + 1}
    for windows in windows_of_all:
        label, way = name_of(windows), dataclasses.replace(drafted, denoise=ChainSpeculation(windows))
        numbers, calls = recorded(recorder, _REPLAYS, windows, options)
        count[label] = float(calls.mean())
        runs[label] = taking_turns(
            [
                functools.partial(replayed_chains, *given, way, of_row)
                for of_row in np.split(numbers, _REPLAYS, axis=1)
            ]
        )
    times = median_seconds({"backbone": backbone, **runs}, repeats)
    of_pass = times.pop("backbone")
    tokens = {label: of_pass + s for label, s in times.items()}
    best = min((label for label in tokens if label != "plain"), key=tokens.get)
    say(
        f"{name}, {steps + 1} head calls, one image: backbone {of_pass:.3f} s; a token plain"
        f" {tokens['plain']:.3f} s, "
        + ", ".join(f"M = {m} {tokens[m]:.3f} s in {count[m]:.1f} calls" for m in tokens if m != "plain")
        + f"; {tokens['plain'] / tokens[best]:.2f} times faster"
    )
    return {
        "model": name,
        "plain_calls": steps + 1,
        "backbone": of_pass,
        "token": tokens,
        "calls": count,
        "ratio": tokens["plain"] / tokens[best],
    }


def make_parser() -> Parser:
    parser = Parser(__doc__, images=2, repeats=1, sizes="sphere-b")
    parser.add_argument("--only", choices=["calls", "seconds"])
    parser.add_argument("--images", type=int, default=64, help="side by side, for the calls (64)")
    parser.add_argument("--repeats", type=int, default=12)
    parser.add_argument("--sizes", type=among(SPHERE_PRESETS, ","), default="sphere-b,sphere-l")
    return parser


def main() -> None:
    args = begin(make_parser())
    model, windows = load(MODEL, args.toy), TOY_WINDOWS if args.toy else WINDOWS
    steps_of_all = (5,) if args.toy else (100, 50, 25)
    out = {"machine": platform.machine(), "device": jax.devices()[0].device_kind, "jax": jax.__version__}
    if args.only in (None, "calls"):
        out["calls"] = calls(model, windows, steps_of_all, args.images)
    if args.only in (None, "seconds"):
        out["seconds"] = [
            token_seconds(name, sizes(SPHERE_PRESETS, name, args.toy), model, windows, steps, args.repeats)
            for name in args.sizes
            for steps in steps_of_all
        ]
    print(json.dumps(out))


if __name__ == "__main__":
    main()
