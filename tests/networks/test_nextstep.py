"""NextStep-1: parity with the numbers recorded from the published code, conversion, prompts, speculation."""

import chex
import jax
import jax.numpy as jnp
import nextstep_tiny as tiny
import numpy as np
import pytest

import cspd_jax
from cspd_jax import hub
from cspd_jax.check import UserError
from cspd_jax.converters import nextstep as converter
from cspd_jax.image import generate, pixels, prompts, sampler
from cspd_jax.image.chain import ChainSpeculation
from cspd_jax.image.drafters import frozen
from cspd_jax.image.options import Options as ImageOptions
from cspd_jax.keys import row_keys
from cspd_jax.networks.config import NextStepConfig
from cspd_jax.networks.lm import Layer, Transformer
from cspd_jax.networks.lm_config import LMConfig

A = tiny.recorded()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.write(tmp_path_factory.mktemp("hub") / "nextstep")


@pytest.fixture(scope="module")
def model(folder):
    return hub.load(folder)


def close(ours, theirs, bound):
    chex.assert_trees_all_close(ours, theirs, rtol=0, atol=bound)


def test_language_model(model):
    ids, seen = A["lm/input_ids"], A["lm/attention_mask"] > 0
    places = np.arange(ids.shape[1])
    visible = jnp.asarray((places <= places[:, None]) & seen[:, None])
    transformer = Transformer(model.config.lm)

    def forward(module):
        x = module.embedded(ids)
        h, _, _ = module.hidden(x, jnp.broadcast_to(places, ids.shape), visible)
        return x, h, module.logits(h[:, -1])

    def run(params):
        layers = lambda module, _: isinstance(module, Layer)
        return transformer.apply(
            {"params": params}, method=forward, capture_intermediates=layers, mutable=["intermediates"]
        )

    (x, h, logits), kept = jax.jit(run)(model.params["backbone"]["lm"])
    inner = [kept["intermediates"][f"layers_{i}"]["__call__"][0][0] for i in range(2)]
    for ours, theirs in zip((x, *inner, h), A["lm/hidden"], strict=True):
        close(np.where(seen[:, :, None], ours, 0), theirs, 1e-4)
    close(logits, A["lm/logits_last"], 1e-4)


@pytest.mark.slow
def test_contexts(model):
    """What the head is given for the recorded tokens, with the cache and without."""
    name = "cfg3_pos_norm_shift"
    bound = tiny.run(model, A, name).model
    network, tokens = bound.network, jnp.tile(A[f"gen/{name}/tokens"], (2, 1, 1))
    reveal = jnp.tile(jnp.arange(6), (4, 1))

    @jax.jit
    def run(params):
        prompt = network.embed_class(params, jnp.array([0, 1, 0, 1]), jnp.array([0, 0, 1, 1], bool))
        fixed = {"class_embedding": prompt, "bucket": 6}

        def one(cache, i):
            known = jnp.where(jnp.arange(6)[:, None] < i, tokens, 9.0)  # nothing else may matter
            rows, count = jnp.full((4, 1), i), jnp.full(4, i)
            z, cache = network.extend(params, cache, known, reveal, count, rows=rows, **fixed)
            return cache, z[:, 0]

        cache, cached = jax.lax.scan(one, network.init_cache(params, reveal, prompt), jnp.arange(6))
        again, _ = network.extend(params, cache, tokens, reveal, jnp.full(4, 5), rows=reveal[:, 2:], **fixed)
        return network.context(params, tokens, reveal, jnp.full(4, 5), rows=reveal, **fixed), cached, again

    whole, cached, again = run(bound.params)
    theirs = A[f"gen/{name}/c"]
    close(whole.swapaxes(0, 1), theirs, 1e-4)
    close(cached, theirs, 1e-4)
    close(again.swapaxes(0, 1), theirs[2:], 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", tiny.RUNS)
def test_generation(model, name):
    run = tiny.run(model, A, name)
    keys = row_keys(jax.random.key(0), 2)
    network, params = run.model.network, run.model.params
    out = sampler.sample(network, params, keys, jnp.arange(2), run.options, noise=run.noise)
    close(out.tokens, A[f"gen/{name}/tokens"], 1e-4)


# At the widths of Qwen2.5-14B, with fewer layers.
LARGE = NextStepConfig(
    LMConfig(
        "llama", vocab_size=152_064, known_ids=152_064, width=5120, depth=2, heads=40, kv_heads=8,
        head_dim=128, mlp_width=13_824, max_positions=32_768, qkv_bias=True,
    ),
    head_depth=1,
)  # fmt: skip


def test_shapes_of_the_published_size():
    theirs = converter.FORMAT.parameters(tiny.DESCRIPTION["assumed_14B"]["keys"])
    ours = {entry.name: list(entry.source_shape) for entry in converter.FORMAT.wanted(LARGE)}
    assert {name: ours.pop(name) for name in theirs} == theirs
    assert all(name.startswith("layers.1.") for name in ours)


# Prompts.

IDS = ([64, 38, 71, 23, 22, 86, 92], [9, 23, 22, 86, 92])
NEGATIVE = [71, 48, 23, 22, 86, 92]


@pytest.mark.slow
def test_speculation(model):
    """Fewer head calls for two images of each prompt."""
    bound = prompts.bind(model, IDS, NEGATIVE, grid=(2, 3))
    chain = {"denoise": ChainSpeculation(4), "chain_drafter": frozen(12, 16)}
    options = ImageOptions(cfg=2.0, cfg_schedule="constant", respacing=12, **chain)
    tokens, info = generate(jax.random.key(3), bound, [0, 0, 1, 1], options=options)
    assert tokens.shape == (4, 6, 16) and np.isfinite(tokens).all() and info.exact
    assert info.trace.chain_accepted.all() and info.calls["head"].sequential < 6 * 12
    assert pixels.to_latents(bound, tokens).shape == (4, 4, 6, 4)


@pytest.mark.slow
def test_prompts_in_one_call(tmp_path):
    """The same images as by ids."""
    folder = tiny.with_tokenizer(tiny.write(tmp_path / "model", {**tiny.CONFIG, "latent_size": 2}))
    model, options = cspd_jax.load(folder), ImageOptions(respacing=4, cfg=2.0, cfg_schedule="constant")
    made, _ = cspd_jax.generate(jax.random.key(0), model, prompts=["red red", "x"], options=options)
    size = [86, 7, 92]
    bound = prompts.bind(model, [[5, 5, *size], [92, *size]], size, texts=("red red", "x"))
    same, _ = cspd_jax.generate(jax.random.key(0), bound, [0, 1], options=options)
    chex.assert_trees_all_equal(made, same)
    with pytest.raises(UserError, match="say what to make: give labels, or prompts"):
        cspd_jax.generate(jax.random.key(0), model)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(UserError, match=r"has no tokenizer\.json; bind the ids"):
        cspd_jax.generate(jax.random.key(0), cspd_jax.load(folder), prompts=["x"])
