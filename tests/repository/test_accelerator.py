"""What an accelerator computes differently comes to the same."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import text_models

from cspd_jax._utils import accelerators, loops
from cspd_jax.networks import layers, lm


@pytest.fixture
def as_an_accelerator(monkeypatch):
    """Programs are lowered for a CPU in the form of an accelerator."""
    monkeypatch.setattr(accelerators, "by_device", lambda *operands, cpu, accelerator: accelerator(*operands))


def test_modulations_read_at_once_are_the_same(as_an_accelerator):
    tree = (jnp.arange(6.0).reshape(2, 3), [jnp.arange(10.0).reshape(2, 5)])
    for one, other in zip(jax.tree.leaves(jax.jit(accelerators.read_at_once)(tree)), jax.tree.leaves(tree)):
        chex.assert_trees_all_equal(one, other)
    mixed = (jnp.zeros(3), jnp.zeros(3, jnp.int32))
    assert accelerators.read_at_once(mixed) is mixed


@pytest.mark.slow
def test_one_token_is_multiplied_as_several(monkeypatch):
    """In a language model: logits and cache are those of the token alone."""
    model = text_models.model()
    params, tokens = text_models.params(model), np.array([[3, 5, 7]])
    _, cache = model.apply(params, tokens, np.array([[0, 1, 2]]), model.empty_cache(1, 6))

    def next_token():
        run = lambda *args: model.apply(*args)
        return jax.jit(run)(params, np.array([[4]]), np.array([[3]]), cache)

    expected, seen = next_token(), []

    def on_accelerator(*operands, cpu, accelerator):
        seen.append(accelerator)
        return accelerator(*operands)

    monkeypatch.setattr(lm, "by_device", on_accelerator)
    found = next_token()
    assert len(seen) == 1 and found[0].shape == (1, 1, model.vocab_size)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected)):
        chex.assert_trees_all_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("hidden", [False, True])
@pytest.mark.parametrize("some", [False, True])
def test_attention_in_place_is_attention(hidden, some):
    qkv = jax.random.normal(jax.random.key(1), (2, 7, 3, 4, 8))
    visible = jnp.arange(7) < jnp.array([[3], [6]]) if hidden else None
    rows = jnp.array([[0, 5], [2, 2]]) if some else None
    by_head, in_place = (
        jax.jit(attend)(qkv, visible, rows) for attend in (layers._attend_by_head, layers._attend_in_place)
    )
    assert by_head.shape == (2, 2 if some else 7, 4, 8)
    chex.assert_trees_all_close(in_place, by_head, rtol=1e-5, atol=1e-6)


def test_a_packed_loop_is_a_loop():
    """Of numbers, of arrays of several types and sizes, of a large one, and of nothing."""
    large = 2 * loops._SMALL
    start = {"n": 0, "x": jnp.ones((2, 3)), "y": (jnp.zeros(4), None), "big": jnp.zeros(large), "flag": False}

    def body(carry):
        n = carry["n"] + 1
        y = carry["y"][0] + n
        return {"n": n, "x": 2 * carry["x"], "y": (y, None), "big": carry["big"].at[n].set(n), "flag": n > 2}

    def cond(carry):
        return carry["n"] < 3

    packed, plain = (
        jax.jit(lambda loop=loop: loop(cond, body, jax.tree.map(jnp.asarray, start)))()
        for loop in (loops.while_loop, jax.lax.while_loop)
    )
    assert jax.tree.structure(packed) == jax.tree.structure(plain)
    for one, other in zip(jax.tree.leaves(packed), jax.tree.leaves(plain)):
        assert one.dtype == other.dtype
        chex.assert_trees_all_equal(one, other)
