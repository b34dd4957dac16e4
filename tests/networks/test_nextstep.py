"""NextStep-1: parity with the numbers recorded from the published code, conversion,
prompts, speculation."""

import chex
import jax
import jax.numpy as jnp
import nextstep_tiny as tiny
import numpy as np
import pytest
from batches import batch_of

import cspd_jax
from cspd_jax import hub
from cspd_jax.check import UserError
from cspd_jax.converters import nextstep as converter
from cspd_jax.image import generate, pixels, prompts
from cspd_jax.image.chain import ChainSpeculation
from cspd_jax.image.options import Options as ImageOptions
from cspd_jax.keys import row_keys
from cspd_jax.networks.lm import LMConfig
from cspd_jax.networks.nextstep import NextStepConfig

A = tiny.recorded()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.write(tmp_path_factory.mktemp("hub") / "nextstep")


@pytest.fixture(scope="module")
def model(folder):
    return hub.load(folder)


def close(ours, theirs, bound):
    chex.assert_trees_all_close(ours, theirs, rtol=0, atol=bound)


@pytest.mark.slow
def test_contexts_without_a_cache(model):
    name = "cfg3_pos_norm_shift"
    order = jnp.tile(jnp.arange(6), (4, 1))
    bound, *_ = tiny.run(model, A, name)
    network = bound.network
    tokens = jnp.tile(A[f"gen/{name}/tokens"], (2, 1, 1))
    prompt = network.embed_class(
        bound.params, jnp.array([0, 1, 0, 1]), jnp.array([0, 0, 1, 1], bool)
    )
    z = network.context(
        bound.params, tokens, order, jnp.full(4, 5), prompt, order, bucket=6
    )
    close(z.swapaxes(0, 1), A[f"gen/{name}/c"], 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", tiny.RUNS)
def test_generation(model, name):
    bound, options, noise = tiny.run(model, A, name)
    network = bound.network
    keys = row_keys(jax.random.key(0), 2)
    batch = batch_of(network, bound.params, keys, jnp.arange(2), options, noise=noise)
    close(batch.generate().tokens, A[f"gen/{name}/tokens"], 1e-4)


# At the widths of Qwen2.5-14B, with fewer layers.
LARGE = NextStepConfig(
    LMConfig(
        "llama",
        vocab_size=152_064,
        known_ids=152_064,
        width=5120,
        depth=2,
        heads=40,
        kv_heads=8,
        head_dim=128,
        mlp_width=13_824,
        max_positions=32_768,
        qkv_bias=True,
    ),
    head_depth=1,
)


def test_shapes_of_the_published_size():
    theirs = converter.FORMAT.parameters(tiny.DESCRIPTION["assumed_14B"]["keys"])
    wanted = converter.FORMAT.wanted(LARGE)
    ours = {entry.name: list(entry.source_shape) for entry in wanted}
    assert {name: ours.pop(name) for name in theirs} == theirs
    assert all(name.startswith("layers.1.") for name in ours)


# Prompts.

IDS = ([64, 38, 71, 23, 22, 86, 92], [9, 23, 22, 86, 92])
NEGATIVE = [71, 48, 23, 22, 86, 92]


@pytest.mark.slow
def test_speculation(model):
    """Fewer head calls for two images of each prompt."""
    bound = prompts.with_prompts(model, IDS, NEGATIVE, grid=(2, 3))
    options = ImageOptions(
        cfg=2.0, cfg_schedule="constant", respacing=12, denoise=ChainSpeculation(4)
    )
    tokens, info = generate(jax.random.key(3), bound, [0, 0, 1, 1], options=options)
    assert tokens.shape == (4, 6, 16) and np.isfinite(tokens).all() and info.exact
    assert info.trace.chain_accepted.all() and info.calls["head"].sequential < 6 * 12
    assert pixels.to_latents(bound, tokens).shape == (4, 4, 6, 4)


@pytest.mark.slow
def test_prompts_in_one_call(tmp_path):
    """The same images as by ids."""
    folder = tiny.with_tokenizer(
        tiny.write(tmp_path / "model", {**tiny.CONFIG, "latent_size": 2})
    )
    model = cspd_jax.load(folder)
    options = ImageOptions(respacing=4, cfg=2.0, cfg_schedule="constant")
    made, _ = cspd_jax.generate(
        jax.random.key(0), model, prompts=["red red", "x"], options=options
    )
    size = [86, 7, 92]
    bound = prompts.with_prompts(
        model, [[5, 5, *size], [92, *size]], size, texts=("red red", "x")
    )
    same, _ = cspd_jax.generate(jax.random.key(0), bound, [0, 1], options=options)
    chex.assert_trees_all_equal(made, same)
    with pytest.raises(UserError, match="say what to make: give labels, or prompts"):
        cspd_jax.generate(jax.random.key(0), model)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(UserError, match=r"has no tokenizer\.json; bind the ids"):
        cspd_jax.generate(jax.random.key(0), cspd_jax.load(folder), prompts=["x"])
