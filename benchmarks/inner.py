"""Speculation along the denoising chain: head calls, and time, against the plain chain, in one run.

    python benchmarks/inner.py                 # both parts
    python benchmarks/inner.py --only calls    # head calls per token of the default model
    python benchmarks/inner.py --only seconds  # MAR's real head shapes; whole tokens at MAR-B's sizes
    python benchmarks/inner.py --only auto     # what --denoise auto decides, against both ways

Times of MAR's heads are with random weights, as none are at hand: the cost of a call is real, and which
drafts are accepted is replayed from the default model (the same windows; as many chains). With torch (extra
`parity`), tokens at MAR-B's sizes are compared with the reference as well. Prints tables on standard error,
one JSON object on standard output.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import platform
import statistics
import sys
import time
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from toy import Parser, begin, load, sizes

from cspd_jax.diffusion.chain import Chains
from cspd_jax.diffusion.gaussian import coefficients
from cspd_jax.diffusion.schedule import sampling_schedule
from cspd_jax.image import sampler
from cspd_jax.image.chain import calibration, choice, speculation
from cspd_jax.image.chain.drafters import frozen
from cspd_jax.image.chain.speculation import ChainRandomness, ChainSpeculation
from cspd_jax.image.options import Options
from cspd_jax.keys import row_keys
from cspd_jax.networks.config import MAR_PRESETS, MARConfig
from cspd_jax.networks.mar import MARModel, abstract_params, init_params
from cspd_jax.weights.models import ImageModel

WINDOWS = ((8,), (16,), (32,), (32, 32, 32, 32, 8))
TOY_WINDOWS = ((3, 2),)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def seconds(runs: dict, repeats: int) -> dict[str, float]:
    """Median seconds of each, the runs taking turns, after one that compiles."""
    for run in runs.values():
        jax.block_until_ready(run())
    times = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            start = time.perf_counter()
            jax.block_until_ready(run())
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(t) for name, t in times.items()}


def options_of(model, cfg: float = 1.0, temperature: float = 1.0, speculation=None) -> Options:
    return Options(
        num_iter=model.config.seq_len,
        respacing=model.config.respacing,
        guided=cfg != 1,
        cfg=cfg,
        temperature=temperature,
        denoise=speculation or "plain",
    )


def steps_of(model) -> int:
    return sampling_schedule(model.config.respacing).num_steps


def calls(model: ImageModel, windows_of_all: tuple[tuple[int, ...], ...], images: int) -> list[dict]:
    """Head calls of whole generations by the model, all `images` side by side, one token a step."""
    found = []
    keys = row_keys(jax.random.key(11), images)
    labels = jnp.arange(images, dtype=jnp.int32) % 10
    for cfg, temperature in ((1.0, 1.0), (3.0, 1.0)):
        options = options_of(model, cfg, temperature)
        drafter = calibration.get(model, options).calibration.drafter
        still = frozen(steps_of(model), model.config.token_dim)
        ways = {"frozen": (still, "gains"), "gains": (drafter, "gains"), "Jacobian": (drafter, "jacobian")}
        for name, (drafter, kind) in ways.items():
            for windows in windows_of_all:
                chain = ChainSpeculation(windows, kind)
                way = dataclasses.replace(options, denoise=chain, chain_drafter=drafter)
                counts = sampler.sample(model.network, model.params, keys, labels, way).counts
                counts = jax.tree.map(lambda a: np.asarray(a, np.int64), counts)
                tokens = images * model.config.seq_len
                row = {
                    "cfg": cfg,
                    "temperature": temperature,
                    "drafter": name,
                    "M": choice.name_of(windows),
                    "calls_mean": counts.row_calls.sum() / tokens,
                    "calls_of_slowest": float(counts.calls.mean()),
                    "rows_per_token": counts.rows.sum() / tokens / (1 + options.guided),
                    "acceptance": counts.accepted.sum() / counts.tested.sum(),
                    "trips_per_call": counts.trips.sum() / counts.calls.sum(),
                    "truncated": int(counts.truncated.sum()),
                }
                found.append(row)
                say(
                    f"cfg {cfg:g}, temperature {temperature:g}, {name}, M = {row['M']}:"
                    f" {row['calls_mean']:.1f} head calls a token, {row['calls_of_slowest']:.1f} for the"
                    f" slowest; {row['rows_per_token']:.0f} rows; {row['trips_per_call']:.2f} trips a call"
                )
    return found


def randomness(rows: int, dim: int, steps: int, seed: int = 0) -> tuple[jax.Array, jax.Array]:
    """Noise [T + 1, R, d] and keys [R] of chains."""
    key = jax.random.key(seed)
    noise = jax.random.normal(jax.random.fold_in(key, 1), (steps + 1, rows, dim))
    return noise, jax.random.split(jax.random.fold_in(key, 3), rows)


def recorded(
    model: ImageModel, rows: int, windows: tuple[int, ...], options: Options | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Runs a model on `rows` of its contexts. Returns how many drafts a row kept in the call that began with
    so many steps left, less one [T, R], for `replayed`; and the head calls of each row."""
    options = options or options_of(model)
    found = calibration.get(model, options).calibration
    schedule = sampling_schedule(options.respacing)
    features = model.network.embed_time(model.params, jnp.asarray(schedule.timestep_map))
    chosen = np.random.default_rng(rows).integers(found.contexts.shape[1], size=rows)
    noise, keys = randomness(rows, model.config.token_dim, schedule.num_steps)
    z = found.contexts[0, chosen]
    chains = Chains(model.network, model.params, features, z, coefficients(schedule))
    inputs, chain = speculation.begin(chains, ChainRandomness(noise[-1], keys), found.drafter)
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


@functools.partial(jax.jit, static_argnums=0)
def replayed(model, params, z, noise, keys, options: Options, kept):
    """`choice.run_chains`, with as many drafts kept as were `recorded`."""
    verify = speculation.verify_steps

    def as_recorded(inputs, draft, keys):
        verdict = verify(inputs, draft, keys)
        of_row = kept[draft.steps[0], jnp.arange(kept.shape[1])]
        return verdict._replace(block=verdict.block._replace(kept=of_row))

    with mock.patch.object(speculation, "verify_steps", as_recorded):
        return choice.run_chains.__wrapped__(model, params, z, noise, keys, options)


def head_seconds(name: str, config: MARConfig, recorder: ImageModel, windows_of_all, rows: int, repeats: int):
    """Seconds of the chains of `rows` tokens with the head of a size; `recorder` says what is accepted."""
    steps = steps_of(recorder)
    model = MARModel(config)
    random = np.random.default_rng(0)
    params = jax.tree.map(
        lambda a: jnp.asarray(0.02 * random.standard_normal(a.shape, np.float32)),
        {"head": abstract_params(config)["head"]},
    )
    z = jax.random.normal(jax.random.key(1), (rows, config.decoder_width))
    drafter = frozen(steps, config.token_dim)
    options = Options(respacing=recorder.config.respacing, chain_drafter=drafter)
    given = model, params, z, *randomness(rows, config.token_dim, steps)
    runs, count = {"plain": functools.partial(choice.run_chains, *given, options)}, {}
    for windows in windows_of_all:
        label, way = choice.name_of(windows), dataclasses.replace(options, denoise=ChainSpeculation(windows))
        kept, calls = recorded(recorder, rows, windows)
        count[label] = int(calls.max())
        runs[label] = functools.partial(replayed, *given, way, kept)
    times = seconds(runs, repeats)
    best = min((label for label in times if label != "plain"), key=times.get)
    say(
        f"{name}, {rows} rows: plain {times['plain']:.3f} s, "
        + ", ".join(f"M = {m} {times[m]:.3f} s in {count[m]} calls" for m in count)
        + f"; {times['plain'] / times[best]:.2f} times faster"
    )
    return {
        "head": name,
        "rows": rows,
        "seconds": times,
        "calls": count,
        "ratio": times["plain"] / times[best],
    }


def whole_tokens(config: MARConfig, head: dict, repeats: int) -> list[dict]:
    """One AR step at MAR-B's sizes, batch 1: the backbone's time, and with it the time of a token."""
    model, params = MARModel(config), init_params(config, jax.random.key(0))
    options = Options(num_iter=config.seq_len, respacing=config.respacing, prefix_buckets=4)
    keys, labels = row_keys(jax.random.key(0), 1), jnp.zeros(1, jnp.int32)
    batch = jax.jit(functools.partial(sampler.bind, model))(params, keys, labels, options)
    segments = sampler.plan_segments(config.seq_len, options)
    state = sampler.empty_state(batch)
    fast = min(s for label, s in head["seconds"].items() if label != "plain")
    found = []
    half = config.seq_len // 2
    for known in sorted({min(4, half), half}):  # a tiny model has four tokens in all
        bucket = next(s.bucket for s, _ in segments if s.bucket >= known)
        segment = sampler.Segment(bucket, 1, options.respacing)
        context = jax.jit(sampler.group_context, static_argnums=1)
        run = functools.partial(context, batch, segment, state, jnp.int32(known))
        backbone = seconds({"backbone": run}, repeats)["backbone"]
        row = {"known": known, "backbone": backbone}
        row |= {"plain": backbone + head["seconds"]["plain"], "speculative": backbone + fast}
        row["reference"] = reference_token(config, known, repeats)
        found.append(row)
        against = f", reference {row['reference']:.2f} s" if row["reference"] else ""
        say(
            f"MAR-B token, batch 1, {known} known: plain {row['plain']:.3f} s, speculative"
            f" {row['speculative']:.3f} s (backbone {backbone:.3f}){against}"
        )
    return found


def reference_token(config, known: int, repeats: int) -> float | None:
    """Seconds of a token in a PyTorch implementation that loops as the reference does; None without torch."""
    try:
        import reference_torch
        import torch
    except ImportError:
        return None
    torch.set_num_threads(2)
    reference = reference_torch.random_model(config)
    reveal = np.random.default_rng(0).permutation(config.seq_len)
    mask = torch.ones(1, config.seq_len)
    mask[:, reveal[:known]] = 0
    tokens = torch.zeros(1, config.seq_len, config.token_dim)

    def token():
        with torch.inference_mode():
            z = reference.context(tokens, mask, reference.fake_latent)[:, reveal[known]]
            reference.diffloss.sample(z, sampling_schedule(config.respacing), None, 1.0, 1.0)
        return 0

    return seconds({"token": token}, repeats)["token"]


def auto(model: ImageModel, rows_of_all: tuple[int, ...], repeats: int) -> list[dict]:
    """What `--denoise auto` decides for groups of the model, and what both ways take."""
    found = []
    options = options_of(model)
    gains = calibration.get(model, options).calibration
    for rows in rows_of_all:
        chosen = choice.choose(model, options, gains, rows)
        again = [choice.measure(model, options, gains, rows) for _ in range(repeats)]
        times = {name: statistics.median(a[name] for a in again) for name in again[0]}
        name = choice.name_of(chosen.speculation.draft_lengths) if chosen.speculation else "plain"
        row = {"rows": rows, "chosen": name, "seconds": times, "loss": times[name] / min(times.values()) - 1}
        found.append(row)
        listed = ", ".join(f"{n} {1e3 * s:.1f} ms" for n, s in times.items())
        say(f"auto, {rows} rows of the default model: {name}; {listed}; {row['loss']:.1%} from the best")
    return found


def make_parser() -> Parser:
    parser = Parser(__doc__, images=2, repeats=1)
    parser.add_argument("--only", choices=["calls", "seconds", "auto"])
    parser.add_argument("--images", type=int, default=64, help="side by side, for the calls (64)")
    parser.add_argument("--repeats", type=int, default=5)
    return parser


def main() -> None:
    args = begin(make_parser())
    model, windows = load("default", args.toy), TOY_WINDOWS if args.toy else WINDOWS
    rows_of_all = (1,) if args.toy else (1, 8, 64)
    out = {
        "machine": platform.machine(),
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
    }
    if args.only in (None, "calls"):
        out["calls"] = calls(model, windows, args.images)
    if args.only in (None, "seconds"):
        out["head"] = [
            head_seconds(name, sizes(MAR_PRESETS, name, args.toy), model, windows, rows, args.repeats)
            for name in (("mar-base",) if args.toy else ("mar-base", "mar-huge"))
            for rows in rows_of_all
        ]
        config = sizes(MAR_PRESETS, "mar-base", args.toy)
        out["token"] = whole_tokens(config, out["head"][0], args.repeats)
    if args.only in (None, "auto"):
        out["auto"] = auto(model, rows_of_all, 3)
    print(json.dumps(out))


if __name__ == "__main__":
    main()
