"""The training loop of language models, and the weights a run can start from."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from cspd_jax.errors import UserError
from cspd_jax.networks.lm import LM, init_params
from cspd_jax.networks.lm_config import LMConfig
from cspd_jax.training.config import RunConfig, TextTrainConfig
from cspd_jax.training.run import RunOptions, Steps, run
from cspd_jax.training.step import Purpose, TrainState, descend, first_state, run_key
from cspd_jax.training.text.objective import cross_entropy, divergence, view, within
from cspd_jax.weights.models import TextModel

Array = jax.Array


class Rows(Protocol):
    """Rows of ids to learn from. Batch `index` never depends on which batches were made before it."""

    def batch(self, index: int, size: int, *, seed: int = 0) -> Any:
        """[size, length] int32, or what else the step takes."""


class TextTeacher(NamedTuple):
    """The target of a distillation.

    config: its configuration (static under jit).
    params: its parameters.
    """

    config: LMConfig
    params: Any


class TextMetrics(NamedTuple):
    """Scalars of one step.

    loss: what was minimised, in bits per id.
    norm: global norm of the gradient before clipping.
    rate: learning rate.
    """

    loss: Array
    norm: Array
    rate: Array


def train_text(
    config: TextTrainConfig,
    rows: Rows,
    out: pathlib.Path,
    options: RunOptions = RunOptions(),
    teacher: TextTeacher | None = None,
) -> TrainState:
    """Trains in the folder `out` and returns the final state.

    teacher: with one, the model learns to predict what the teacher predicts.
    """
    if teacher is not None:
        check_vocabulary(config.model, teacher.config)
    target = (None, None) if teacher is None else teacher

    def step(state: TrainState, batch: Array) -> tuple[TrainState, TextMetrics]:
        return text_step(config, state, batch, *target)

    return train_rows(config, rows, out, step, options, init_text_state(config))


def train_rows(
    config: RunConfig,
    rows: Rows,
    out: pathlib.Path,
    step_on: Callable[[TrainState, Any], tuple[TrainState, TextMetrics]],
    options: RunOptions,
    first: TrainState,
) -> TrainState:
    """As `train_text`, with any step on a batch of the rows, from any state."""
    placement = options.placement_for(config)

    def steps(state: TrainState, end: int) -> Steps:
        placed = jax.tree.map(lambda array: array.sharding, state)
        for step in range(int(state.step), end):
            batch = placement.put_batch(rows.batch(step, config.batch, seed=config.seed))
            state, metrics = step_on(state, batch)
            state = jax.device_put(state, placed)
            jax.block_until_ready(metrics)
            yield step + 1, state, metrics

    options = dataclasses.replace(options, placement=placement)
    return run(config, out, first, steps, options, unit="rows")


def check_vocabulary(draft: LMConfig, target: LMConfig) -> None:
    """UserError unless the two models have the same ids with the same meaning.

    A causal draft may have the first ones only.
    """
    fewer = draft.causal and target.causal and draft.vocab_size < target.known_ids
    sizes = () if fewer else ("vocab_size",)
    for name in (*sizes, "causal", "bos_ids", "eos_ids", "mask_ids"):
        have, want = getattr(draft, name), getattr(target, name)
        if have != want:
            raise UserError(f"the draft's {name} is {have}, the target's is {want}; they must be equal")


@functools.partial(jax.jit, static_argnames=("config",))
def init_text_state(config: TextTrainConfig) -> TrainState:
    """The state of a run that starts from random weights."""
    return first_state(config, init_params(config.model, run_key(config.seed, Purpose.INIT)))


@functools.partial(jax.jit, static_argnames=("config", "target"), donate_argnames=("state",))
def text_step(
    config: TextTrainConfig,
    state: TrainState,
    rows: Array,
    target: LMConfig | None = None,
    target_params: Any = None,
) -> tuple[TrainState, TextMetrics]:
    """One optimiser step on rows [B, L], from the data or towards a target.

    With a target the loss is (1 - share) KL(target || model) + share * cross-entropy, share = `data_share`.
    """
    dtype = jnp.dtype(config.dtype)
    model, share, ids = LM(config.model, dtype), config.data_share, config.model.vocab_size
    shown = view(model, jax.random.fold_in(run_key(config.seed, Purpose.STEP), state.step), rows)

    def loss_of(shown):
        if target is not None:
            teacher = LM(target, dtype).forward(target_params, shown.seen)

        def loss(params):
            known = within(shown, ids)
            logits = model.forward(params, known.seen)
            if target is None:
                bits = cross_entropy(known, logits)
            else:
                bits = (1 - share) * divergence(shown, teacher, logits) + share * cross_entropy(known, logits)
            return bits, bits

        return loss

    state, update = descend(config, state, loss_of, shown)
    return state, TextMetrics(update.aux, update.norm, update.rate)


# Fields that may differ between a causal model and the masked-diffusion model that starts from its weights.
_CHANGED = ("family", "vocab_size", "known_ids", "max_positions", "causal", "shifted", "mask_ids")


def initial_params(model: TextModel, config: LMConfig) -> Any:
    """The parameters that a run of `config` starts from, given --init `model`.

    They are those of an equal model or, if this one is masked with shifted predictions, of a causal one.

    A causal model's hidden state i - 1 predicts the token at i, as a shifted model's does, so it already
    knows most of what the other has to learn. Dream was initialised in this way.
    """
    if model.config == config:
        return model.params
    if model.config.causal and not config.causal and _same_sizes(model.config, config):
        return _with_new_ids(model.params, config)
    raise UserError(
        f"--init {model.name} has other sizes than the model of this run; choose its preset or --set"
    )


def _same_sizes(causal: LMConfig, masked: LMConfig) -> bool:
    changes = {name: getattr(masked, name) for name in _CHANGED}
    return (
        masked.shifted
        and causal.vocab_size <= masked.vocab_size
        and dataclasses.replace(causal, **changes) == masked
    )


def _with_new_ids(params: dict, config: LMConfig) -> dict:
    """`params` for the vocabulary of `config`: new ids, such as the mask, start as the mean of the others."""
    params = dict(params)

    def padded(table, axis: int):
        count = config.vocab_size - table.shape[axis]
        new = jnp.repeat(jnp.mean(table, axis=axis, keepdims=True), count, axis=axis)
        return jnp.concatenate([table, new], axis=axis)

    params["embed"] = {"embedding": padded(params["embed"]["embedding"], axis=0)}
    if not config.tie_embeddings:
        params["head"] = {"kernel": padded(params["head"]["kernel"], axis=1)}
    return params
