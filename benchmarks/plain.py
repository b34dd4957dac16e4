"""Time of our plain sampler against the PyTorch reference, in one run, with the same weights.

    python benchmarks/plain.py                # both tables, several minutes
    python benchmarks/plain.py --only small   # whole images of a small model
    python benchmarks/plain.py --only mar-b   # single AR steps at MAR-B's real sizes

Prints a table on standard error and one JSON object on standard output. Needs torch (`parity` extra).
"""

from __future__ import annotations

import dataclasses
import functools
import json
import platform
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from toy import Parser, begin, median_seconds, narrow, say, sizes

from cspd_jax.diffusion.schedule import sampling_schedule
from cspd_jax.image import sampler
from cspd_jax.image.options import Options
from cspd_jax.keys import row_keys
from cspd_jax.networks.config import MAR_PRESETS, MARConfig
from cspd_jax.networks.mar import MARModel

SMALL = MARConfig(
    encoder_width=128, encoder_depth=4, encoder_heads=4, decoder_width=128, decoder_depth=4, decoder_heads=4,
    head_depth=3, head_width=256, respacing="ddim100",
)  # fmt: skip


def seconds(run: Callable[[], Any], repeats: int) -> float:
    """Returns the median time of a call, after a first one that compiles."""
    return median_seconds({"run": run}, repeats)["run"]


def whole_images(config: MARConfig, batch: int, cfg: float, repeats: int) -> dict:
    """Times a whole generation (all tokens, all denoising steps), both systems."""
    import reference_torch
    import torch

    rng, schedule = np.random.default_rng(0), sampling_schedule(config.respacing)
    reference = reference_torch.random_model(config)
    params = jax.tree.map(jnp.asarray, reference_torch.to_jax(reference))
    labels = rng.integers(0, config.num_classes, batch)
    orders = np.stack([rng.permutation(config.seq_len) for _ in range(batch)])
    noise = rng.standard_normal((schedule.num_steps + 1, batch, config.seq_len, config.token_dim), np.float32)
    num_iter = config.seq_len
    options = Options(
        num_iter=num_iter, respacing=config.respacing, guided=cfg != 1.0, cfg=cfg, prefix_buckets=4,
        final_noise=False,
    )  # fmt: skip
    keys = row_keys(jax.random.key(0), batch)
    ours = functools.partial(sampler.sample, MARModel(config), params, keys, jnp.asarray(labels), options)
    ours_s = seconds(ours, repeats)
    start = time.perf_counter()
    theirs = reference.sample(
        torch.as_tensor(labels), schedule, num_iter=num_iter, cfg=cfg, orders=orders, noise=noise
    )
    theirs_s = time.perf_counter() - start
    same = ours(order=jnp.asarray(orders[:, ::-1].copy()), noise=jnp.asarray(noise))
    return {
        "batch": batch,
        "cfg": cfg,
        "ours_s_per_image": ours_s / batch,
        "reference_s_per_image": theirs_s / batch,
        "ratio": theirs_s / ours_s,
        "largest_difference": float(np.abs(np.asarray(same.tokens) - theirs.numpy()).max()),
        "largest_value": float(theirs.abs().max()),
    }


def mar_b(config: MARConfig, cfg: float, known: int, repeats: int) -> dict:
    """Times one AR step at MAR-B's sizes, batch 1, when `known` tokens are known, both systems."""
    import reference_torch
    import torch

    guided = cfg != 1.0
    reference = reference_torch.random_model(config)
    schedule = sampling_schedule(config.respacing)
    halves = 1 + guided
    reveal = np.random.default_rng(0).permutation(config.seq_len)
    mask = torch.ones(halves, config.seq_len)
    mask[:, reveal[:known]] = 0
    tokens = torch.zeros(halves, config.seq_len, config.token_dim)
    embedding = reference.fake_latent.expand(halves, -1)
    with torch.inference_mode():
        z = reference.context(tokens, mask, embedding)[:, reveal[known]]
        their_backbone = seconds(lambda: reference.context(tokens, mask, embedding), repeats)
        their_head = seconds(lambda: reference.diffloss.sample(z, schedule, None, 1.0, cfg), repeats)

    params = jax.tree.map(jnp.asarray, reference_torch.to_jax(reference))
    model = MARModel(config)
    options = Options(num_iter=config.seq_len, respacing=config.respacing, guided=guided, prefix_buckets=4)
    segments = sampler.plan_segments(config.seq_len, options)
    bucket = next(s.bucket for s, _ in segments if s.bucket >= known)
    keys = row_keys(jax.random.key(0), 1)
    batch = sampler.bind(model, params, keys, jnp.zeros(1, jnp.int32), options)
    state = sampler.empty_state(batch)

    @jax.jit
    def backbone(params):
        tokens = jnp.zeros((halves, config.seq_len, config.token_dim))
        first, rows = jnp.full(halves, known), jnp.full((halves, 1), known)
        return model.context(params, tokens, batch.order, first, batch.class_embedding, rows, bucket=bucket)

    @jax.jit
    def step(params, state):
        segment = sampler.Segment(bucket, 1, config.respacing)
        group = sampler.GroupArrays(jnp.int32(known), jnp.int32(1), jnp.float32(cfg))
        return sampler.ar_step(dataclasses.replace(batch, params=params), segment, state, group)

    our_backbone = seconds(lambda: backbone(params), repeats)
    our_step = seconds(lambda: step(params, state), repeats)
    return {
        "cfg": cfg,
        "known": known,
        "reference_backbone_s": their_backbone,
        "reference_head_s": their_head,
        "ours_backbone_s": our_backbone,
        "ours_head_s": our_step - our_backbone,
        "ratio_backbone": their_backbone / our_backbone,
        "ratio_head": their_head / (our_step - our_backbone),
        "ratio_token": (their_backbone + their_head) / our_step,
    }


def make_parser() -> Parser:
    parser = Parser(__doc__)
    parser.add_argument("--only", choices=["small", "mar-b"])
    parser.add_argument("--threads", type=int, default=2, help="threads for torch (default 2)")
    return parser


def main() -> None:
    args = begin(make_parser())
    import torch

    torch.set_num_threads(args.threads)
    out = {
        "machine": platform.machine(),
        "threads": args.threads,
        "jax_device": jax.devices()[0].platform,
        "versions": {"jax": jax.__version__, "torch": torch.__version__},
    }
    if args.only != "mar-b":
        out["small"] = []
        config = narrow(SMALL) if args.toy else SMALL
        for batch, cfg in ((1, 1.0), (1, 3.0)) if args.toy else ((1, 1.0), (8, 1.0), (1, 3.0)):
            row = whole_images(config, batch, cfg, 1 if args.toy else 3)
            out["small"].append(row)
            say(
                f"small, batch {batch}, cfg {cfg}: ours {row['ours_s_per_image']:.2f} s per image, reference "
                f"{row['reference_s_per_image']:.2f} s: {row['ratio']:.1f} times faster; largest difference "
                f"{row['largest_difference']:.1e} on values up to {row['largest_value']:.1f}"
            )
    if args.only != "small":
        out["mar_b"] = []
        config = sizes(MAR_PRESETS, "mar-base", args.toy)
        cells = ((1.0, 4), (1.0, 128), (1.0, 250), (3.0, 4), (3.0, 128))
        for cfg, known in ((1.0, 2), (3.0, 2)) if args.toy else cells:
            row = mar_b(config, cfg, known, 1 if args.toy else 5)
            out["mar_b"].append(row)
            say(
                f"MAR-B, batch 1, cfg {cfg}, {known} tokens known: backbone {row['ours_backbone_s']:.2f} s "
                f"(reference {row['reference_backbone_s']:.2f}), head {row['ours_head_s']:.2f} s (reference "
                f"{row['reference_head_s']:.2f}), token {row['ratio_token']:.1f} times faster"
            )
    print(json.dumps(out))


if __name__ == "__main__":
    main()
