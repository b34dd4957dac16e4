"""What an accelerator computes differently comes to the same."""

import chex
import jax
import jax.numpy as jnp
import pytest
import text_models
import token_hashes

from cspd_jax import text
from cspd_jax._utils import loops


def made():
    """Tokens of images, drafted along chains and not, and of a text one by one, of programs lowered anew."""
    jax.clear_caches()
    model = text_models.model()
    how = text.Options(max_new_tokens=6, stop_ids=())
    one = text.generate(None, (model, text_models.params(model)), [[3, 5, 7]], options=how)
    chains = token_hashes.mar_tokens(chains=token_hashes.CHAINS)
    return one.tokens, chains, token_hashes.mar_tokens(cfg=2.0)


@pytest.mark.slow
def test_the_form_of_an_accelerator_gives_the_same(monkeypatch, float64):
    usual, forms = made(), set()

    def on_an_accelerator(*operands, cpu, default):
        forms.add(getattr(default, "__name__", "partial"))
        return default(*operands)

    monkeypatch.setattr(jax.lax, "platform_dependent", on_an_accelerator)
    chex.assert_trees_all_close(made(), usual, atol=1e-5)
    assert len(forms) >= 4, forms


def test_a_packed_loop_is_a_loop():
    """Of numbers, of arrays of several types and sizes, of a large one, and of nothing."""
    large = 2 * loops._SMALL
    start = {"n": 0, "x": jnp.ones((2, 3)), "y": (jnp.zeros(4), None), "big": jnp.zeros(large), "flag": False}

    def body(carry):
        n = carry["n"] + 1
        y = carry["y"][0] + n
        return {"n": n, "x": 2 * carry["x"], "y": (y, None), "big": carry["big"].at[n].set(n), "flag": n > 2}

    packed, plain = (
        jax.jit(lambda loop=loop: loop(lambda c: c["n"] < 3, body, jax.tree.map(jnp.asarray, start)))()
        for loop in (loops.while_loop, jax.lax.while_loop)
    )
    chex.assert_trees_all_equal_dtypes(packed, plain)
    chex.assert_trees_all_equal(packed, plain)
