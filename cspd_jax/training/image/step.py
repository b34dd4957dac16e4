"""One training step of a MAR model: a pure function from state and batch to state and metrics."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from cspd_jax.networks.registry import kind_of
from cspd_jax.training.config import ImageTrainConfig, TrainConfig
from cspd_jax.training.data.words import WordsConfig, letters
from cspd_jax.training.image import masking
from cspd_jax.training.image.objective import More, objective
from cspd_jax.training.step import Metrics, Purpose, TrainState, descend, first_state, run_key

Array = jax.Array

_FOCUS = 4  # beyond the keys that `masking.draw` splits off
_GRID = 1
_LAST = {"attn": "proj", "mlp": "fc2"}  # the last layers of a block's two parts


@functools.partial(jax.jit, static_argnames=("config",))
def init_state(config: ImageTrainConfig) -> TrainState:
    """Returns the state of a run that starts from random weights."""
    key = run_key(config.seed, Purpose.INIT)
    params = kind_of(config.model).init_params(config.model, key)
    if isinstance(config, TrainConfig) and config.on_grid:
        params = {**params, "backbone": on_grid(jax.random.fold_in(key, _GRID), params["backbone"])}
    return first_state(config, params)


def on_grid(key: Array, backbone: dict) -> dict:
    """Returns MAR's random backbone with positions [1, buffer + L, D] that are sums of a row's vector and a
    column's, and an encoder whose blocks change nothing yet."""
    side = math.isqrt(backbone["diffusion_pos_embed_learned"].shape[1])
    row, column = jnp.divmod(jnp.arange(side**2), side)
    found = dict(backbone)
    for i, name in enumerate(("encoder_pos_embed_learned", "decoder_pos_embed_learned")):
        table = backbone[name]
        both = 0.5 * jax.random.normal(jax.random.fold_in(key, i), (2, side, table.shape[-1]))
        found[name] = table.at[0, -(side**2) :].set(both[0, row] + both[1, column])
    for name, block in backbone.items():
        if name.startswith("encoder_blocks"):
            found[name] = {**block, **{part: _silent(block[part], last) for part, last in _LAST.items()}}
    return found


def _silent(part: dict, last: str) -> dict:
    """Returns a part of a block with a last layer that gives 0."""
    return {**part, last: jax.tree.map(jnp.zeros_like, part[last])}


def n_known(config: TrainConfig, step: int) -> int:
    """Draws the number of tokens shown in step `step`, on the host because it selects the compiled shape."""
    if step < config.settle:
        return 5 * config.model.seq_len // 8
    random = np.random.default_rng([int(Purpose.MASK), config.seed, step])
    ratio = config.least_mask_ratio, config.mask_ratio_deviation
    return masking.draw_n_known(random, config.model.seq_len, *ratio)


@functools.partial(jax.jit, static_argnames=("config", "bucket"), donate_argnames=("state",))
def train_step(
    config: TrainConfig,
    bucket: masking.Bucket,
    state: TrainState,
    tokens: Array,
    labels: Array,
    contents: Array | None,
    known: Array,
) -> tuple[TrainState, Metrics]:
    """Takes one step of MAR's objective.

    tokens: [B, L, C] by position. labels: [B]. contents: [B, L] what each token shows, for `config.hint`.
    known: [], the number of tokens shown, within `bucket`.
    """
    model = config.model
    key = jax.random.fold_in(run_key(config.seed, Purpose.STEP), state.step)
    draws = masking.draw(
        key,
        tokens.shape[0],
        model.seq_len,
        model.token_dim,
        bucket,
        known,
        copies=config.copies,
        drop=config.label_drop,
    )
    draws = masking.focused(jax.random.fold_in(key, _FOCUS), draws, config.focus)
    kinds = len(letters(config.data)) if isinstance(config.data, WordsConfig) else 0
    more = More(config.max_weight, config.hint, kinds, contents)

    def loss(params):
        dtype = jnp.dtype(config.dtype)
        return objective(model, params, tokens, labels, draws, bucket=bucket.most, dtype=dtype, more=more)

    return descend(config, state, loss)
