"""Time of our plain sampler against the PyTorch reference, in one run, with the same weights.

    python benchmarks/plain.py                # both tables, several minutes
    python benchmarks/plain.py --only small   # whole images of a small model
    python benchmarks/plain.py --only mar-b   # a few AR steps at MAR-B's real sizes

Prints a table on standard error and one JSON object on standard output. Needs torch (`parity` extra).
"""

from __future__ import annotations

import argparse
import functools
import json
import platform
import statistics
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import reference_torch
import torch

from cspd_jax.decoders import plain
from cspd_jax.decoders.order import reveal_groups
from cspd_jax.diffusion.schedule import sampling_schedule
from cspd_jax.keys import image_keys
from cspd_jax.networks.config import MAR_PRESETS, MARConfig
from cspd_jax.networks.model import MARModel

SMALL = MARConfig(
    encoder_width=128,
    encoder_depth=4,
    encoder_heads=4,
    decoder_width=128,
    decoder_depth=4,
    decoder_heads=4,
    head_depth=3,
    head_width=256,
    respacing="ddim100",
)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def seconds(run, repeats: int = 1) -> float:
    """The median time of `repeats` calls, the first (compilation) aside."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def whole_images(batch: int, cfg: float = 1.0) -> dict:
    """Seconds per image of a whole generation (256 tokens, 100 denoising steps), both systems."""
    config, rng = SMALL, np.random.default_rng(0)
    reference = reference_torch.random_model(config)
    params = jax.tree.map(jnp.asarray, reference_torch.to_jax(reference))
    labels = rng.integers(0, config.num_classes, batch)
    orders = np.stack([rng.permutation(config.seq_len) for _ in range(batch)])
    noise = rng.standard_normal((101, batch, config.seq_len, config.token_dim), np.float32)
    settings = plain.PlainSettings(num_iter=256, respacing=config.respacing, guided=cfg != 1.0)
    keys = image_keys(jax.random.key(0), batch)
    ours = functools.partial(
        plain.sample, MARModel(config), params, keys, jnp.asarray(labels), settings=settings, cfg=cfg
    )
    start = time.perf_counter()
    jax.block_until_ready(ours())
    first = time.perf_counter() - start
    ours_s = seconds(ours, 3)

    spent, mark = {"backbone": 0.0, "head": 0.0}, time.perf_counter()

    def clock(name):
        nonlocal mark
        now = time.perf_counter()
        spent[name] += now - mark
        mark = now

    schedule = sampling_schedule(config.respacing)
    start = mark = time.perf_counter()
    theirs = reference.sample(
        torch.as_tensor(labels), schedule, num_iter=256, cfg=cfg, orders=orders, noise=noise, clock=clock
    )
    theirs_s = time.perf_counter() - start
    same = ours(reveal=jnp.asarray(orders[:, ::-1].copy()), noise=jnp.asarray(noise))
    return {
        "batch": batch,
        "cfg": cfg,
        "ours_s_per_image": ours_s / batch,
        "reference_s_per_image": theirs_s / batch,
        "reference_share_head": spent["head"] / theirs_s,
        "ratio": theirs_s / ours_s,
        "ours_first_call_s": first,
        "largest_difference": float(np.abs(np.asarray(same) - theirs.numpy()).max()),
        "largest_value": float(theirs.abs().max()),
    }


def few_steps(cfg: float, steps: int, at: int) -> dict:
    """Seconds per token of the backbone and of the head at MAR-B's sizes, batch 1, both systems.

    The reference is timed over `steps` AR steps from an empty image on; ours at the same numbers of known
    tokens, and with `at` known tokens as well.
    """
    config = MAR_PRESETS["mar-base"]
    reference = reference_torch.random_model(config)
    params = jax.tree.map(jnp.asarray, reference_torch.to_jax(reference))
    schedule = sampling_schedule(config.respacing)
    spent = {"backbone": [], "head": []}
    mark = 0.0

    def clock(name):
        nonlocal mark
        now = time.perf_counter()
        spent[name].append(now - mark)
        mark = now

    labels = torch.zeros(1, dtype=torch.long)
    mark = time.perf_counter()
    reference.sample(labels, schedule, num_iter=256, cfg=cfg, steps=steps + 1, clock=clock)
    theirs = {name: statistics.median(times[1:]) for name, times in spent.items()}

    model, guided = MARModel(config), cfg != 1.0
    settings = plain.PlainSettings(num_iter=256, respacing=config.respacing, guided=guided)
    keys = image_keys(jax.random.key(0), 1)
    batch = plain.start(model, params, keys, jnp.zeros(1, jnp.int32), settings)
    state = plain.State(jnp.zeros((1, config.seq_len, config.token_dim)))
    segment = plain.plan_segments(config.seq_len, 256, settings.encoder_sizes)[1]
    halves = batch.reveal.shape[0]
    rows = jnp.full((halves, 1), steps)

    @functools.partial(jax.jit, static_argnames="bucket")
    def backbone(params, known, bucket):
        tokens = jnp.zeros((halves, config.seq_len, config.token_dim))
        known = jnp.full(halves, known)
        return model.context(params, tokens, batch.reveal, known, batch.class_embedding, rows, bucket=bucket)

    @functools.partial(jax.jit, static_argnames=("bucket", "width"))
    def step(params, state, first, bucket, width):
        kwargs = {"settings": settings, "bucket": bucket, "width": width}
        return plain.ar_step(model, params, batch, state, first, jnp.float32(cfg), jnp.float32(1), **kwargs)

    def timed(f):
        jax.block_until_ready(f())
        return seconds(f, steps)

    ours_backbone = timed(lambda: backbone(params, 1, segment.bucket))
    ours_step = timed(lambda: step(params, state, jnp.int32(1), segment.bucket, 1))
    later = -(-at // segment.bucket) * segment.bucket
    return {
        "cfg": cfg,
        "reference_backbone_s": theirs["backbone"],
        "reference_head_s": theirs["head"],
        "ours_backbone_s": ours_backbone,
        "ours_head_s": ours_step - ours_backbone,
        "ratio_backbone": theirs["backbone"] / ours_backbone,
        "ratio_head": theirs["head"] / (ours_step - ours_backbone),
        "ratio_token": (theirs["backbone"] + theirs["head"]) / ours_step,
        f"ours_backbone_s_at_{at}_known": timed(lambda: backbone(params, at, later)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=["small", "mar-b"])
    parser.add_argument("--threads", type=int, default=2, help="threads for torch (default 2)")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    assert len(reveal_groups(256, 256)) == 256
    out = {
        "machine": platform.machine(),
        "threads": args.threads,
        "jax_device": jax.devices()[0].platform,
        "versions": {"jax": jax.__version__, "torch": torch.__version__},
    }
    if args.only != "mar-b":
        out["small"] = []
        for batch, cfg in ((1, 1.0), (8, 1.0), (1, 3.0)):
            row = whole_images(batch, cfg)
            out["small"].append(row)
            say(
                f"small, batch {batch}, cfg {cfg}: ours {row['ours_s_per_image']:.2f} s per image, reference "
                f"{row['reference_s_per_image']:.2f} s: {row['ratio']:.1f} times faster; largest difference "
                f"{row['largest_difference']:.1e} on values up to {row['largest_value']:.1f}"
            )
    if args.only != "small":
        out["mar_b"] = []
        for cfg in (1.0, 3.0):
            row = few_steps(cfg, steps=5, at=128)
            out["mar_b"].append(row)
            say(
                f"MAR-B, batch 1, cfg {cfg}: backbone {row['ours_backbone_s']:.2f} s (reference "
                f"{row['reference_backbone_s']:.2f}), head {row['ours_head_s']:.2f} s (reference "
                f"{row['reference_head_s']:.2f}), token {row['ratio_token']:.1f} times faster"
            )
    print(json.dumps(out))


if __name__ == "__main__":
    main()
