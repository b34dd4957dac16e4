"""Keys of other generators, and another default of JAX: the same bits, or one sentence
why not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import text_models
import tiny
from commands import run
from masked_models import LLADA, params_of

import cspd_jax
from cspd_jax import SelfSpeculation, UserError, masked, text
from cspd_jax.keys import seed_key
from cspd_jax.networks.lm import LM

SHORT = cspd_jax.Options(num_iter=2, respacing="ddim4")


def of_each_family(folder, key, temperature=0.0):
    """An image, of a model that is loaded anew, a text and a masked text."""
    lm = text_models.model()
    llada = LM(LLADA, jnp.float32)
    causal = (lm, text_models.params(lm))
    filled = (llada, params_of(LLADA, 0))
    new = {"max_new_tokens": 4, "temperature": temperature}
    prompts = [[1, 2]]
    look_up = text.Speculation(text.PromptLookup())
    how = text.Options(**new, stop_ids=())
    return [
        lambda: cspd_jax.generate(
            key, cspd_jax.load(folder), [0, 1], SelfSpeculation(1), SHORT
        )[0],
        lambda: text.generate(key, causal, prompts, look_up, how).tokens,
        lambda: (
            masked.generate(key, filled, prompts, options=masked.Options(**new)).tokens
        ),
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.save_mar(tmp_path_factory.mktemp("m") / "model", tiny.PIXELS)


@pytest.mark.parametrize("generator", ["rbg", "unsafe_rbg"])
def test_generators_that_mix_rows_are_refused(folder, generator):
    keys = jax.random.split(jax.random.key(0, impl=generator), 3)
    together = jax.vmap(jax.random.bits)(keys)  # of the first key: why they are refused
    assert (
        np.asarray(together[1:]) != [jax.random.bits(key) for key in keys[1:]]
    ).all()
    for make in of_each_family(folder, keys[0], temperature=1.0):
        with pytest.raises(UserError, match=f"of the generator {generator}, with"):
            make()
    with jax.default_prng_impl(generator):
        with pytest.raises(UserError, match=r"is uint32 \[4\], which is no key"):
            of_each_family(folder, jax.random.PRNGKey(0))[0]()
        assert seed_key(5) == jax.random.key(5, impl="threefry2x32")


def test_a_seed_means_the_same_whatever_jax_draws_with_by_default(folder, tmp_path):
    line = f"sample --target {folder} --n 2 --num-iter 2 --respacing 4 --batch 2 --out "
    assert run(f"{line} {tmp_path}/usual") == 0
    with jax.default_prng_impl("rbg"):
        assert run(f"{line} {tmp_path}/other") == 0
    usual, other = (
        (tmp_path / name / "shards" / "00000.npz").read_bytes()
        for name in ("usual", "other")
    )
    assert usual == other
