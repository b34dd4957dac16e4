"""Every method on the default pair, in one run: seconds, network calls one after the other, acceptance.

    python benchmarks/methods.py results.jsonl                       # all cells
    python benchmarks/methods.py results.jsonl --batch 1,8 --cfg 1   # some of them
    python benchmarks/methods.py results.jsonl --held-out            # acceptance on real images' contexts
    python benchmarks/methods.py results.jsonl --gammas --batch 8 --cfg 1 --picture docs/gamma.png

One line of JSON per cell is appended to the file; cells that are there already are not run again, so an
interrupted run goes on where it was. A cell is one batch with one key; its seconds are those of the one run,
less compilation. A table of the file's cells is printed on standard error.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from PIL import Image
from toy import Parser, among, begin, load, say, several
from ways import asked, held_out, timed, training_data

from cspd_jax import reports
from cspd_jax.coupling import log_acceptance_of_ratio
from cspd_jax.diffusion.chain import Chains, path_log_density, sample_path
from cspd_jax.diffusion.gaussian import coefficients
from cspd_jax.diffusion.schedule import sampling_schedule
from cspd_jax.image.order import guidance_scale, random_order, reveal_groups
from cspd_jax.image.pixels import patchify
from cspd_jax.image.plan import resolve
from cspd_jax.keys import row_keys
from cspd_jax.reports.charts import bars, stacked
from cspd_jax.training.image.data import make_source

PAPER = {"method": "cspd", "criterion": "paper", "gamma": 3}
METHODS = {
    "plain": {"final_noise": True},
    "plain, 16 AR steps": {"final_noise": True, "num_iter": 16},
    "inner": {"final_noise": True, "denoise": "speculative"},
    "self": {"method": "self"},
    "self + inner": {"method": "self", "denoise": "speculative"},
    "self, gamma 16": {"method": "self", "gamma": 16},
    "self, one context (lossy)": {"method": "self", "gamma": 3, "joint": True},
    "self, 16 AR steps": {"method": "self", "num_iter": 16, "gamma": 4},
    "cspd path": {"method": "cspd", "gamma": 3},
    "cspd paper, Sigma = 1": {**PAPER, "sigma": False},
    "cspd paper (lossy)": PAPER,
    "cspd paper, inner temperature 42 (lossy)": {**PAPER, "gamma": 8, "inner_temperature": 42.0},
    "cspd official (lossy)": {"method": "cspd", "criterion": "official", "gamma": 8},
}
GAMMAS = {f"self, gamma {gamma}": {"method": "self", "gamma": gamma} for gamma in (1, 2, 4, 8, 16)}
DISTANCES = (1, 2, 4, 8)
TOY = ["plain", "self", "cspd paper (lossy)"]


def cell(target, draft, name: str, batch: int, cfg: float, seed: int) -> dict:
    labels = np.arange(batch) % target.config.num_classes
    plan = resolve(target, labels, *asked(draft, {**METHODS, **GAMMAS}[name], cfg=cfg))
    tokens, info, seconds = timed(row_keys(jax.random.key(seed), batch), plan)
    row = {"seconds_per_image": seconds / batch, "lossless": info.exactness.lossless, "rounds": info.rounds}
    row |= {"tokens_per_round": info.tokens / batch / info.rounds, "sequential": info.sequential._asdict()}
    row |= {"total": info.total._asdict()}
    if info.verified is not None:
        found, background = info.verified, is_background(tokens)
        other = info.tested & ~background
        row |= {
            "acceptance": found.acceptance,
            "by_distance": reports.rates(found.accepted.sum(0), found.tested.sum(0)),
            "tested": int(found.tested.sum()),
            "trips": found.trips,
            "truncated": found.truncated,
            "zeros": found.zeros,
            "background": float(background.mean()),
            "acceptance_without_background": float(info.accepted[other].mean()) if other.any() else None,
        }
    return row


def is_background(tokens: np.ndarray) -> np.ndarray:
    """Finds tokens [N, L] without a stroke: the default's background is between -0.95 and -0.55."""
    return (tokens < -0.5).all(axis=-1)


def contexts_of(model, images, known, guided):
    """Returns z [1 or 2, B, D] of the token after the prefix, with the first `known` tokens known."""
    tokens, reveal, labels, at = images
    halves, batch = 1 + guided, len(tokens)
    unconditional = jnp.arange(halves * batch) >= batch
    return model.network.context(
        model.params,
        jnp.tile(tokens, (halves, 1, 1)),
        jnp.tile(reveal, (halves, 1)),
        jnp.tile(known, halves),
        model.network.embed_class(model.params, jnp.tile(labels, halves), unconditional),
        jnp.tile(at, halves)[:, None],
        bucket=tokens.shape[1],
    )[:, 0]


def on_real_images(target, draft, cfg: float, count: int = 512, seed: int = 0) -> dict:
    """Measures acceptance by paths of drafts after real prefixes: by the draft model, and by the target
    itself from a context that lacks the last 1, 2, 4, 8 tokens of the prefix."""
    data = held_out(make_source(training_data(target)), count)
    tokens = patchify(jnp.asarray(data.images / np.float32(127.5) - 1), target.config.patch_size)
    key, length = jax.random.key(seed), target.config.seq_len
    reveal = jax.vmap(random_order, (0, None))(jax.random.split(key, count), length)
    at = jax.random.randint(jax.random.fold_in(key, 1), (count,), max(DISTANCES), length)
    ordered = jnp.take_along_axis(tokens, reveal[:, :, None], axis=1)
    images = (ordered, reveal, jnp.asarray(data.labels, jnp.int32), at)
    schedule = sampling_schedule(target.config.respacing)
    c, stamps = coefficients(schedule), jnp.asarray(schedule.timestep_map)
    shape = (schedule.num_steps + 1, count, target.config.token_dim)
    noise = jax.random.normal(jax.random.fold_in(key, 2), shape)
    scale = None
    if cfg != 1:  # of each prefix's AR step, as in generation
        scale = guidance_scale(reveal_groups(length, length), cfg, "linear")[at][:, None]
    options = {"scale": scale, "final_noise": True}

    def acceptance(drafter, lacking):
        p_z, q_z = (contexts_of(m, images, at - n, cfg != 1) for m, n in ((target, 0), (drafter, lacking)))
        p_time, q_time = (m.network.embed_time(m.params, stamps) for m in (target, drafter))
        drawn = sample_path(Chains(drafter.network, drafter.params, q_time, q_z, c, **options), noise)
        path = jnp.concatenate([drawn.states, noise[-1:]])
        log_p = path_log_density(Chains(target.network, target.params, p_time, p_z, c, **options), path)
        return jnp.exp(log_acceptance_of_ratio(log_p - drawn.log_density(final_noise=True))), drawn.x

    found = {}
    for name, drafter, lacking in (("draft model", draft, 0), *((str(d), target, d) for d in DISTANCES)):
        share, x = map(np.asarray, jax.jit(functools.partial(acceptance, drafter, lacking))())
        found[name] = {
            "acceptance": float(share.mean()),
            "standard_error": float(share.std() / np.sqrt(count)),
            "without_background": float(share[~is_background(x)].mean()),
        }
    return found


def table(rows: list[dict]) -> None:
    for row in rows:
        if "held_out" in row:
            shares = (
                f"{n} {v['acceptance']:.2f} ({v['without_background']:.2f})"
                for n, v in row["held_out"].items()
            )
            say(
                f"real contexts, cfg {row['cfg']:g}: "
                + ", ".join(shares)
                + "  (in brackets: without background)"
            )
            continue
        seq, found = row["sequential"], ""
        if "acceptance" in row and row["acceptance"] is not None:
            near = ["-" if a is None else f"{a:.2f}" for a in row["by_distance"]]
            found = f"; acceptance {row['acceptance']:.3f}, by distance {' '.join(near)}"
            found += f"; without background {row['acceptance_without_background'] or 0:.3f}"
        seconds = f"{row['seconds_per_image']:.3f} s/image, " if "seconds_per_image" in row else ""
        say(
            f"B={row['batch']} cfg={row['cfg']:g} {row['method']}: {seconds}"
            f"{sum(seq.values())} calls in sequence ({', '.join(str(n) for n in seq.values())}),"
            f" {row['tokens_per_round']:.1f} tokens a round{found}"
        )


def against_gamma(rows: list[dict], batch: int, cfg: float) -> Image.Image:
    """Draws acceptance and tokens per round against gamma, from the rows of `--gammas`."""
    found = {row["method"]: row for row in rows if (row["batch"], row["cfg"]) == (batch, cfg)}
    measured = [found.get(name, {}) for name in GAMMAS]
    names = [f"gamma {options['gamma']}" for options in GAMMAS.values()]
    charts = [
        bars([row.get(key) for row in measured], f"{title}, {batch} images, guidance {cfg:g}", "gamma", names)
        for key, title in (("acceptance", "acceptance"), ("tokens_per_round", "tokens a round"))
    ]
    return stacked(charts)


def make_parser() -> Parser:
    parser = Parser(__doc__, file=Path("methods.jsonl"), picture=Path("gamma.png"), batch="1", cfg="1")
    parser.add_argument("file", type=Path)
    parser.add_argument("--batch", type=several(int), default="1,8,64")
    parser.add_argument("--cfg", type=several(float), default="1,3")
    parser.add_argument("--methods", type=among({**METHODS, **GAMMAS}), help="some, by name, between ;")
    parser.add_argument("--held-out", action="store_true")
    parser.add_argument("--gammas", action="store_true", help="self-speculation with several gamma")
    parser.add_argument("--picture", type=Path, help="where --gammas draws what it found (the last cell's)")
    parser.add_argument("--draft", default="default-draft", help="another draft model")
    parser.add_argument("--seed", type=int, default=0)
    return parser


def main() -> None:
    args = begin(make_parser())
    rows = [json.loads(line) for line in args.file.read_text().splitlines()] if args.file.exists() else []
    target, draft = load("default", args.toy), load(args.draft, args.toy)
    machine = {"device": jax.devices()[0].device_kind, "jax": jax.__version__, "seed": args.seed}
    parts = [(args.gammas, args.held_out)]
    if args.toy:
        for options in {**METHODS, **GAMMAS}.values():
            resolve(target, np.arange(1), *asked(draft, options))  # all that are left out below
        args.methods, parts = args.methods or TOY, [(False, False), (True, False), (False, True)]
    for gammas, real in parts:
        names = args.methods if args.methods else list(GAMMAS if gammas else METHODS)
        if args.toy and gammas:
            names = list(GAMMAS)[:1]
        for cfg in args.cfg:
            cells = [(b, n) for b in args.batch for n in names]
            for batch, name in [(None, "held-out")] if real else cells:
                row = {"batch": batch, "cfg": cfg, "method": name, "draft": args.draft, **machine}
                if any(row.items() <= old.items() for old in rows):
                    continue
                if real:
                    row["held_out"] = on_real_images(target, draft, cfg, 4 if args.toy else 512)
                else:
                    row |= cell(target, draft, name, batch, cfg, args.seed)
                rows.append(row)
                table([row])
                with args.file.open("a") as file:
                    file.write(json.dumps(row) + "\n")
    if args.picture:
        against_gamma(rows, cells[-1][0], cfg).save(args.picture)


if __name__ == "__main__":
    main()
