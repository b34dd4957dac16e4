"""SphereAR: against numbers recorded from the PyTorch implementation, and its files."""

import dataclasses
import functools
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from batches import batch_of
from recorded import Recorded, check_published

from cspd_jax import generate, models
from cspd_jax.converters import sphere as converter
from cspd_jax.converters.source import Options, convert, make_config, open_source
from cspd_jax.image.chain import ChainSpeculation
from cspd_jax.image.options import Options as ImageOptions
from cspd_jax.networks import sphere
from cspd_jax.networks.sphere import SPHERE_PRESETS
from cspd_jax.training.image.flow import flow_objective

GOLDEN = Path(__file__).parents[1] / "golden_causal"
HEADS = {"sphere_tiny": 4, "sphere_tiny2": 2}  # the weights do not say it
every_model = pytest.mark.parametrize("name", HEADS)


@functools.cache
def load(name):
    """Model, parameters, recorded arrays."""
    source = open_source(GOLDEN / f"{name}_ar.pth")
    config = make_config(source, Options(heads=(HEADS[name],)))
    params = jax.tree.map(jnp.asarray, convert(source, config))
    recorded = np.load(GOLDEN / f"{name}_ar.npz")
    arrays = {key: jnp.asarray(recorded[key]) for key in recorded.files}
    return sphere.SphereModel(config), params, arrays


def close(ours, theirs, atol=4e-5):
    chex.assert_trees_all_close(ours, theirs, rtol=0, atol=atol)


def runs(name):
    return Recorded(GOLDEN, f"{name}_ar").under("gen/")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, run", [(name, run) for name in HEADS for run in runs(name)]
)
def test_whole_generations(name, run):
    """With the recorded noise; with linear guidance the unconditional half has a first
    token of its own."""
    model, params, recorded = load(name)
    at = f"gen/{run}/"
    steps, cfg, constant = (float(a) for a in recorded[at + "settings"])
    labels = recorded[at + "labels"]
    images = len(labels)
    noise = np.zeros(
        (int(steps) + 2, 2 * images, model.seq_len, model.token_dim), np.float32
    )
    for i in range(model.seq_len):
        first = recorded[f"{at}pos{i:03d}/init_noise"]
        rest = recorded[f"{at}pos{i:03d}/step_noise"]
        noise[-1, : len(first), i] = first
        noise[1:-1, : len(first), i] = rest[::-1]
    schedule = "constant" if constant else "linear"
    options = ImageOptions(
        respacing=f"flow{int(steps)}", cfg=cfg, cfg_schedule=schedule
    )
    keys = jax.random.split(jax.random.key(0), images)
    batch = batch_of(model, params, keys, labels, options)
    assert batch.recipe.separate_first == (cfg > 1 and not constant)
    noise = noise if batch.recipe.separate_first else noise[:, :images]
    out = dataclasses.replace(batch, noise=noise).generate()
    bound = 8e-4 if cfg > 3 else 2.5e-4 if cfg > 1 else 1e-4
    close(out.tokens, recorded[at + "latents"], bound)


@pytest.mark.slow
@every_model
def test_training_loss_and_gradients(name):
    model, params, recorded = load(name)
    tokens = recorded["train/latents"]
    labels = recorded["train/labels"]
    shape = (-1, *tokens.shape[:2])
    dropped = jnp.zeros(len(tokens), bool)
    t = jax.nn.sigmoid(recorded["train/t_normal"]).reshape(shape)
    noise = recorded["train/noise"].reshape(*shape, tokens.shape[2])
    objective = lambda params: flow_objective(
        model, params, tokens, labels, dropped, t, noise
    )
    loss, gradient = jax.jit(jax.value_and_grad(objective))(params)
    close(loss, recorded["train/loss"][0], 1e-5)
    backbone = gradient["backbone"]
    attention = backbone["layers_0"]["attention"]
    head = gradient["head"]
    for name, ours in {
        "proj_in.weight": backbone["proj_in"]["kernel"].T,
        "emb_norm.weight": backbone["emb_norm"]["scale"],
        "layers.0.attention.wqkv.weight": attention["wqkv"]["kernel"].T,
        "head.net.ada_ln_blocks.0.weight": head["ada_ln_blocks_0"]["kernel"].T,
        "head.net.final_layer.linear.weight": head["final_layer"]["linear"]["kernel"].T,
        "pos_for_diff.weight": backbone["pos_for_diff"]["embedding"],
    }.items():
        close(ours, recorded[f"train/grad/{name}"], 1e-5)


@pytest.mark.quick("sphere-b")
@pytest.mark.parametrize("name", sorted(SPHERE_PRESETS))
def test_published_names(name):
    file = GOLDEN / f"{name.replace('-', '_')}_keys.json"
    check_published(file, converter, SPHERE_PRESETS[name])


@pytest.mark.slow
def test_whole_generations_with_speculation():
    """Chains are speculated, also apart: fewer head calls, and every token on the
    sphere."""
    network, params, _ = load("sphere_tiny2")
    model = models.ImageModel("tiny", network, params)
    options = ImageOptions(cfg=3.0, respacing=50, denoise=ChainSpeculation(8))
    tokens, info = generate(jax.random.key(0), model, [0, 1, 2], options=options)
    chex.assert_trees_all_close(jnp.linalg.norm(tokens, axis=-1), 8**0.5, rtol=1e-5)
    assert info.calls["head"].sequential < 0.5 * 9 * 51 and info.exact
