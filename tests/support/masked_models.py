"""Tiny random masked-diffusion models, prompts for them, and what the stepwise
reference makes of these."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import tiny

from cspd_jax.masked import Options
from cspd_jax.masked.canvas import make_canvas
from cspd_jax.masked.stepwise import Steps
from cspd_jax.networks.lm import LM, LMConfig, abstract_params
from cspd_jax.text import Prompts

V = 12
MASK = 10
PLACES = 11
LLADA = LMConfig(
    family="llada",
    vocab_size=V,
    known_ids=V - 1,
    width=16,
    depth=2,
    heads=2,
    kv_heads=2,
    head_dim=8,
    mlp_width=24,
    max_positions=64,
    causal=False,
    mask_ids=(MASK,),
)
DREAM = dataclasses.replace(
    LLADA, family="Dream", shifted=True, kv_heads=1, qkv_bias=True
)
# Causal between blocks. The first one predicts in place, the second is shifted.
SDAR = dataclasses.replace(LLADA, family="sdar", block=4)
FAST = dataclasses.replace(DREAM, family="Fast_dLLM_Qwen", block=4)
FAST_8 = dataclasses.replace(FAST, block=8)
STEPWISE = Steps()
CONFIGS = {
    "llada": LLADA,
    "dream": DREAM,
    "sdar": SDAR,
    "fast": FAST,
    "fast, blocks of 8": FAST_8,
}


@functools.cache
def params_of(config, seed):
    return jax.tree.map(
        lambda a: np.asarray(a, np.float64),
        tiny.params(abstract_params(config), scale=0.6, seed=seed),
    )


def canvas(
    family="llada", seed=0, rows=8, block=4, places=PLACES, temperature=0.0, **options
):
    config = CONFIGS[family]
    random = np.random.default_rng(seed)
    lengths = random.integers(1, 7, rows)
    lengths[0] = 4  # the end of a block
    prompts = random.integers(0, MASK, (rows, 6))
    drawn = (
        temperature
        or options.get("place_temperature")
        or options.get("confidence") == "random"
    )
    keys = jax.random.split(jax.random.key(seed), rows) if drawn else None
    options = {
        name: jnp.float64(x) if isinstance(x, float) else x
        for name, x in options.items()
    }
    options = Options(
        max_new_tokens=places, block=block, temperature=temperature, **options
    )
    network = LM(config, jnp.float64)
    params = params_of(config, seed)
    return make_canvas(network, params, Prompts(prompts, lengths), options, keys)


@jax.jit
def run(canvas, way=STEPWISE):
    """The last state of a way to fill a canvas, which may be a speculation."""
    more = lambda state: jnp.any(way.unfinished(canvas, state))
    return jax.lax.while_loop(
        more, lambda state: way.advance(canvas, state), way.begin(canvas)
    )


@functools.cache
def reference(family="llada", seed=0, **options):
    """What the stepwise reference makes of `canvas`."""
    with jax.enable_x64(True):
        return run(canvas(family, seed, **options))
