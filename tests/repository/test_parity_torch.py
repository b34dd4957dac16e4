"""Live against PyTorch: the same weights, orders and noise in our sampler and in a PyTorch implementation."""

import dataclasses
import sys
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cspd_jax.diffusion.schedule import sampling_schedule
from cspd_jax.image import sampler
from cspd_jax.image.options import Options
from cspd_jax.keys import row_keys
from cspd_jax.networks.config import MARConfig
from cspd_jax.networks.mar import MARModel

pytestmark = pytest.mark.parity

CONFIG = MARConfig(
    seq_len=25, token_dim=16, num_classes=7, buffer_size=5, encoder_width=48, encoder_depth=2,
    encoder_heads=4, decoder_width=32, decoder_depth=3, decoder_heads=2, head_depth=2, head_width=40,
    respacing="ddim10",
)  # fmt: skip


@pytest.mark.parametrize("num_iter, cfg, temperature", [(25, 1.0, 1.0), (6, 3.0, 0.9), (40, 1.5, 1.0)])
@pytest.mark.parametrize("change", [{}, {"token_dim": 64, "patch_size": 2, "encoder_width": 16}])
def test_whole_generation(change, num_iter, cfg, temperature):
    torch = pytest.importorskip("torch")
    sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
    import reference_torch

    config = dataclasses.replace(CONFIG, **change)
    reference = reference_torch.random_model(config)
    rng = np.random.default_rng(1)
    labels = rng.integers(0, config.num_classes, 3)
    orders = np.stack([rng.permutation(config.seq_len) for _ in range(3)])
    noise = rng.standard_normal((11, 3, config.seq_len, config.token_dim), np.float32)
    schedule, how = sampling_schedule(config.respacing), {"num_iter": num_iter, "cfg": cfg}
    how |= {"temperature": temperature}
    theirs = reference.sample(torch.as_tensor(labels), schedule, orders=orders, noise=noise, **how).numpy()
    options = Options(
        respacing=config.respacing, guided=cfg != 1.0, prefix_buckets=4, final_noise=False, **how
    )
    ours = sampler.sample(
        MARModel(config), jax.tree.map(jnp.asarray, reference_torch.to_jax(reference)),
        row_keys(jax.random.key(0), 3), jnp.asarray(labels), options,
        order=jnp.asarray(orders[:, ::-1].copy()), noise=jnp.asarray(noise),
    ).tokens  # fmt: skip
    chex.assert_trees_all_close(ours, theirs, rtol=0, atol=2e-5 * np.abs(theirs).max())
