"""A batch in parts: the step of the whole batch, in less memory."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import training_run
from test_text_training import CORPUS

from cspd_jax.errors import UserError
from cspd_jax.networks.mar import init_params
from cspd_jax.training import presets, settings
from cspd_jax.training.accumulation import mean_gradient
from cspd_jax.training.config import TextTrainConfig, with_settings
from cspd_jax.training.data.text import TextConfig, Texts
from cspd_jax.training.image import masking
from cspd_jax.training.image.distillation import distill_step
from cspd_jax.training.image.objective import ROWS
from cspd_jax.training.image.step import init_state, train_step
from cspd_jax.training.placement import Placement
from cspd_jax.training.run import RunOptions
from cspd_jax.training.text.presets import byte_model
from cspd_jax.training.text.trainer import init_text_state, text_step, train_text

IMAGES = dataclasses.replace(training_run.TINY, clip=1e9, label_drop=0.5)
CAUSAL = TextTrainConfig(
    model=byte_model(8, 1, 1, 8), data=TextConfig(16), steps=12, batch=8, warmup=2, clip=1e9, sample_every=0
)
MASKED = dataclasses.replace(CAUSAL, model=byte_model(8, 1, 1, 8, causal=False))
BUCKET = masking.Bucket(0, 2)
TEXTS = Texts(CAUSAL.data, CORPUS)


def shaken(params, seed=0):
    """MAR's first head is zero, and passes no gradient on."""
    random = np.random.default_rng(seed)
    return jax.tree.map(lambda p: p + 0.1 * random.standard_normal(p.shape, np.float32), params)


def image(config):
    """The arguments of a step, and the step."""
    random = np.random.default_rng(1)
    tokens = random.uniform(-1, 1, (config.batch, 4, 16)).astype(np.float32)
    labels = random.integers(0, 10, config.batch).astype(np.int32)
    state = init_state(config)
    state = state._replace(params=shaken(state.params))
    return train_step, (config, BUCKET, state, tokens, labels, np.int32(1))


def distilled(config):
    _, (config, bucket, state, *batch) = image(config)
    target = shaken(init_params(config.model, jax.random.key(5)), 5)
    return distill_step, (config, config.model, bucket, target, state, *batch)


def text(config):
    return text_step, (config, init_text_state(config), TEXTS.batch(0, config.batch))


def distilled_text(config):
    target = shaken(init_text_state(config).params, 7)
    return text_step, (*text(dataclasses.replace(config, data_share=0.3))[1], config.model, target)


CASES = {
    "image": (image, IMAGES),
    "distilled": (distilled, IMAGES),
    "causal": (text, CAUSAL),
    "masked": (text, MASKED),
    "masked, distilled": (distilled_text, MASKED),
}


def stepped(case, accumulate):
    """The gradient (as AdamW keeps it: nothing is clipped) and the metrics of the first step."""
    make, config = CASES[case]
    step, arguments = make(dataclasses.replace(config, accumulate=accumulate))
    state, metrics = step(*arguments)
    return optax.tree_utils.tree_get(state.optimizer, "mu"), metrics._replace(rate=jnp.float32(0))


def check(found, wanted, tolerance=3e-6):
    """Gradients by the largest number of each array, metrics one by one."""
    for ours, theirs in zip(jax.tree.leaves(found[0]), jax.tree.leaves(wanted[0])):
        scale = np.abs(theirs).max()
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=tolerance * scale + 1e-9)
    np.testing.assert_allclose(found[1], wanted[1], rtol=tolerance)


@pytest.mark.parametrize("parts", [pytest.param(2, marks=pytest.mark.slow), 4])
@pytest.mark.parametrize(
    "case", [name if name == "masked" else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
def test_parts_make_the_step_of_the_batch(case, parts):
    check(stepped(case, parts), stepped(case, 1))


def test_where_the_rows_of_the_draws_are():
    draws = jax.eval_shape(
        lambda key: masking.draw(key, 6, 4, 16, BUCKET, jnp.int32(1), copies=2, drop=0.1), jax.random.key(0)
    )
    for drawn, axis in zip(draws, ROWS):
        assert drawn.shape == () if axis is None else drawn.shape[axis] == 6


def test_the_comparison_can_fail():
    """Another row in one of the parts is seen."""
    wanted = stepped("causal", 1)
    step, (config, state, rows) = text(CAUSAL)
    rows = np.array(rows)
    rows[5, 3] += 1
    state, metrics = step(config, state, rows)
    other = optax.tree_utils.tree_get(state.optimizer, "mu"), metrics._replace(rate=jnp.float32(0))
    with pytest.raises(AssertionError):
        check(other, wanted)


def test_rows_are_cut_evenly_on_any_axis():
    """Each row is in one part, and what they share is whole in each."""
    batch = {"rows": jnp.arange(6.0), "columns": jnp.arange(12.0).reshape(2, 6), "shared": jnp.float32(3)}

    def loss_of(part):
        assert part["rows"].shape == (2,) and part["columns"].shape == (2, 2)
        together = jnp.mean(part["rows"] * part["columns"].sum(axis=0)) * part["shared"]
        return lambda params: (params * together, together)

    axes = {"rows": 0, "columns": 1, "shared": None}
    gradient, aux = mean_gradient(loss_of, jnp.float32(1), batch, axes, parts=3)
    exact = np.mean(np.arange(6) * (6 + 2 * np.arange(6))) * 3
    assert float(gradient) == pytest.approx(exact) and float(aux) == pytest.approx(exact)


@pytest.mark.parametrize("case", ["causal", pytest.param("image", marks=pytest.mark.slow)])
def test_parts_take_less_memory(case):
    """Besides the state and the batch; the noise of an image's step is drawn for the whole batch."""

    def temporary(parts):
        make, config = CASES[case]
        step, arguments = make(dataclasses.replace(config, batch=64, accumulate=parts))
        return step.lower(*arguments).compile().memory_analysis().temp_size_in_bytes

    assert temporary(4) < (0.5 if case == "causal" else 0.75) * temporary(1)


def test_a_run_in_parts_continues_bit_for_bit(tmp_path):
    config = dataclasses.replace(MASKED, accumulate=2)
    whole = train_text(config, TEXTS, tmp_path / "whole", RunOptions(progress=False))
    for stop in (5, None):
        state = train_text(
            config, TEXTS, tmp_path / "run", RunOptions(resume=True, stop_at=stop, progress=False)
        )
    assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(whole)))
    assert settings.read(tmp_path / "run") == config


@pytest.mark.parametrize("name", ["glyphs", "text-target"])
def test_runs_of_before_have_one_part(tmp_path, name):
    values = settings.to_json(presets.preset(name))
    assert values.pop("accumulate") == 1
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert settings.read(tmp_path) == presets.preset(name)


@pytest.mark.parametrize(
    "setting, match",
    [
        ("accumulate=0", "accumulate is 0; it must be at least 1"),
        ("accumulate=3", "a batch of 8 cannot be cut into 3 equal parts"),
    ],
)
def test_parts_that_are_not_equal(setting, match):
    with pytest.raises(UserError, match=match):
        with_settings(IMAGES, [setting])


def test_each_part_must_divide_among_devices():
    four = type("Mesh", (), {"shape": {"data": 4, "model": 1}})
    Placement(8, four, 2)
    with pytest.raises(UserError, match="batch of 8 in 4 parts cannot be spread evenly over 4 devices"):
        Placement(8, four, 4)
