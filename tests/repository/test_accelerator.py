"""What an accelerator computes differently comes to the same."""

import functools

import chex
import jax
import jax.numpy as jnp
import pytest
import text_models
import token_hashes

from cspd_jax import device_loops, text
from cspd_jax._utils import accelerators, compilation, loops
from cspd_jax.networks.head import full_product


def made():
    """Tokens of images, drafted along chains and not, and of a text one by one, of
    programs lowered anew."""
    jax.clear_caches()
    model = text_models.model()
    how = text.Options(max_new_tokens=6, stop_ids=())
    one = text.generate(
        None, (model, text_models.params(model)), [[3, 5, 7]], options=how
    )
    chains = token_hashes.mar_tokens(denoise=token_hashes.CHAINS)
    return one.tokens, chains, token_hashes.mar_tokens(cfg=2.0)


@pytest.mark.slow
def test_the_form_of_an_accelerator_gives_the_same(monkeypatch, float64):
    usual = made()
    forms = set()

    def on_an_accelerator(*operands, default, cpu=None, cuda=None):
        # products that a CPU refuses; `test_three_products_...` reads them
        if cuda is not None:
            return default(*operands)
        forms.add(getattr(default, "__name__", "partial"))
        return default(*operands)

    monkeypatch.setattr(accelerators, "only_cpus", lambda: False)
    monkeypatch.setattr(jax.lax, "platform_dependent", on_an_accelerator)
    chex.assert_trees_all_close(made(), usual, atol=1e-5)
    assert len(forms) >= 4, forms


@pytest.fixture
def by_the_device():
    device_loops(True)
    yield
    device_loops(False)


@compilation.outermost_jit
def halved(x):
    return jax.lax.while_loop(lambda x: x > 1, lambda x: x / 2, x)


def test_loops_of_the_device_are_asked_for_where_the_library_compiles(
    by_the_device, monkeypatch
):
    """By itself a program has the options, which a compiler may refuse; in another jit
    it has none."""
    assert halved(8.0) == 1
    assert jax.jit(lambda: halved(jnp.float32(8.0)))() == 1
    assert jax.vmap(halved)(jnp.array([8.0, 3.0])).tolist() == [1, 0.75]
    monkeypatch.setitem(
        compilation.DEVICE_LOOPS, "xla_gpu_enable_command_buffer", "WHILES"
    )
    refusing = compilation.outermost_jit(lambda x: x + 1)
    with pytest.warns(match="loops stay with the host"):
        assert refusing(1.0) == 2
    assert not compilation.has_device_loops() and refusing(2.0) == 3


def test_texts_are_the_same_by_the_loops_of_the_device(by_the_device, float64):
    """The options reach the compiler, and what is drawn stays."""
    model = text_models.model()
    what = None, (model, text_models.params(model)), [[3, 5, 7]]
    options = text.Options(max_new_tokens=4, stop_ids=())
    made, _ = text.generate(*what, options=options)
    device_loops(False)
    usual, _ = text.generate(*what, options=options)
    chex.assert_trees_all_equal(made, usual)


def test_three_products_are_for_many_rows_of_float32_on_cuda():
    """On a CPU a product is the full one, whose gradient is too."""
    kernel = jnp.ones((3, 4))
    dimensions = (((1,), (0,)), ((), ()))

    def lowered(rows, dtype, platform):
        product = jax.jit(lambda x, kernel: full_product(x, kernel, dimensions))
        traced = product.trace(jnp.ones((rows, 3), dtype), kernel.astype(dtype))
        return traced.lower(lowering_platforms=(platform,)).as_text()

    three = "num_primitive_operations = 3"
    assert three in lowered(64, "float32", "cuda")
    others = ((63, "float32", "cuda"), (64, "float32", "cpu"), (64, "bfloat16", "cuda"))
    for other in others:
        assert three not in lowered(*other)
    sums = jax.grad(lambda x: jnp.sum(full_product(x, kernel, dimensions)))
    chex.assert_trees_all_equal(sums(jnp.ones((64, 3))), jnp.full((64, 3), 4.0))


def test_a_packed_loop_is_a_loop():
    """Of numbers, of arrays of several types and sizes, of a large one, and of
    nothing."""
    large = 2 * loops._SMALL
    start = {
        "n": jnp.int32(0),
        "x": jnp.ones((2, 3)),
        "y": (jnp.zeros(4), None),
        "big": jnp.zeros(large),
        "flag": jnp.bool_(False),
    }

    def body(carry):
        n = carry["n"] + 1
        y = carry["y"][0] + n
        return {
            "n": n,
            "x": 2 * carry["x"],
            "y": (y, None),
            "big": carry["big"].at[n].set(n),
            "flag": n > 2,
        }

    packed, plain = (
        jax.jit(functools.partial(loop, lambda c: c["n"] < 3, body))(start)
        for loop in (loops.while_loop, jax.lax.while_loop)
    )
    chex.assert_trees_all_equal_dtypes(packed, plain)
    chex.assert_trees_all_equal(packed, plain)
