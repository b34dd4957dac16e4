"""One training step of a language model: from data, or towards a target."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from cspd_jax.networks.lm import LM, init_params
from cspd_jax.networks.lm_config import LMConfig
from cspd_jax.training.config import TextTrainConfig
from cspd_jax.training.step import Purpose, State, descend, first_state, run_key
from cspd_jax.training.text_objective import cross_entropy, divergence, view

Array = jax.Array


class TextMetrics(NamedTuple):
    """Scalars of one step.

    loss: what was minimised, in bits per id. norm: of the gradient before clipping. rate: of learning.
    """

    loss: Array
    norm: Array
    rate: Array


class TextTeacher(NamedTuple):
    """The target of a distillation: its sizes (static) and parameters."""

    config: LMConfig
    params: Any


@functools.partial(jax.jit, static_argnames=("config",))
def init_text_state(config: TextTrainConfig) -> State:
    return first_state(config, init_params(config.model, run_key(config.seed, Purpose.INIT)))


@functools.partial(jax.jit, static_argnames=("config", "target"), donate_argnames=("state",))
def text_step(
    config: TextTrainConfig,
    state: State,
    rows: Array,
    target: LMConfig | None = None,
    target_params: Any = None,
) -> tuple[State, TextMetrics]:
    """rows [B, L]. With a target, `1 - config.data_share` of the loss is KL(target || model)."""
    dtype = jnp.dtype(config.dtype)
    model, share = LM(config.model, dtype), config.data_share
    shown = view(model, jax.random.fold_in(run_key(config.seed, Purpose.STEP), state.step), rows)
    if target is not None:
        teacher = LM(target, dtype).forward(target_params, shown.seen)

    def loss(params):
        logits = model.forward(params, shown.seen)
        if target is None:
            bits = cross_entropy(shown, logits)
        else:
            bits = (1 - share) * divergence(shown, teacher, logits) + share * cross_entropy(shown, logits)
        return bits, bits

    state, bits, norm, rate = descend(config, state, loss)
    return state, TextMetrics(bits, norm, rate)
