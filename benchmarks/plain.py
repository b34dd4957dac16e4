"""Time of our plain sampler against the PyTorch reference, in one run, with the same weights and noise.

    python benchmarks/plain.py      # whole images of a small model, several minutes

MAR-B's real sizes: `python benchmarks/gpu.py --only "MAR-B on a CPU"`. Prints a table on standard error and
one JSON object on standard output. Needs torch (extra `parity`).
"""

from __future__ import annotations

import functools
import json
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from toy import Parser, begin, machine, narrow, say

from cspd_jax.diffusion.schedule import sampling_schedule
from cspd_jax.image import sampler
from cspd_jax.image.options import Options
from cspd_jax.keys import row_keys
from cspd_jax.measure import median_seconds
from cspd_jax.networks.config import MARConfig
from cspd_jax.networks.mar import MARModel

SMALL = MARConfig(
    encoder_width=128, encoder_depth=4, encoder_heads=4, decoder_width=128, decoder_depth=4, decoder_heads=4,
    head_depth=3, head_width=256, respacing="ddim100",
)  # fmt: skip


def whole_images(config: MARConfig, batch: int, cfg: float, repeats: int) -> dict[str, Any]:
    """Times a whole generation (all tokens, all denoising steps) of both systems, and compares what they
    make."""
    import reference_torch
    import torch

    rng, schedule = np.random.default_rng(0), sampling_schedule(config.respacing)
    reference = reference_torch.random_model(config)
    params = jax.tree.map(jnp.asarray, reference_torch.to_jax(reference))
    labels = rng.integers(0, config.num_classes, batch)
    orders = np.stack([rng.permutation(config.seq_len) for _ in range(batch)])
    noise = rng.standard_normal((schedule.num_steps + 1, batch, config.seq_len, config.token_dim), np.float32)
    options = Options(
        num_iter=config.seq_len, respacing=config.respacing, guided=cfg != 1.0, cfg=cfg, prefix_buckets=4,
        final_noise=False,
    )  # fmt: skip
    ours = functools.partial(
        sampler.sample, MARModel(config), params, row_keys(jax.random.key(0), batch), jnp.asarray(labels),
        options, order=jnp.asarray(orders[:, ::-1].copy()), noise=jnp.asarray(noise),
    )  # fmt: skip
    our_seconds = median_seconds({"": ours}, repeats)[""]
    start = time.perf_counter()
    theirs = reference.sample(
        torch.as_tensor(labels), schedule, num_iter=config.seq_len, cfg=cfg, orders=orders, noise=noise
    )
    their_seconds = time.perf_counter() - start
    return {
        "batch": batch,
        "cfg": cfg,
        "ours_s_per_image": our_seconds / batch,
        "reference_s_per_image": their_seconds / batch,
        "ratio": their_seconds / our_seconds,
        "largest_difference": float(np.abs(np.asarray(ours().tokens) - theirs.numpy()).max()),
        "largest_value": float(theirs.abs().max()),
    }


def make_parser() -> Parser:
    return Parser(__doc__)


def main() -> None:
    args = begin(make_parser())
    config, rows = narrow(SMALL) if args.toy else SMALL, []
    for batch, cfg in ((1, 1.0), (8, 1.0), (1, 3.0)):
        rows.append(whole_images(config, batch, cfg, 1 if args.toy else 3))
        say(", ".join(f"{name} {value:.3g}" for name, value in rows[-1].items()))
    print(json.dumps({"machine": machine(), "rows": rows}))


if __name__ == "__main__":
    main()
