"""Whole training runs as functions. `train` trains a model on data or a draft model on
a target, and `distill_head` trains a head on a target's states."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import platform
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from chex import ArrayTree
from jax.sharding import Mesh

from cspd_jax import hub, weights
from cspd_jax.check import UserError
from cspd_jax.image.pixels import patchify
from cspd_jax.models import ImageModel, TextModel
from cspd_jax.networks import lm
from cspd_jax.networks.lm import LM, LMConfig
from cspd_jax.networks.mar import MARConfig
from cspd_jax.networks.registry import kind_name, kind_of
from cspd_jax.networks.sphere import SphereConfig
from cspd_jax.parallel import replicate
from cspd_jax.training import run as runs
from cspd_jax.training.config import HeadTrainConfig, RunConfig, TrainConfig, to_json
from cspd_jax.training.data.source import shuffled
from cspd_jax.training.data.text import CORPUS, prompt_ids, read_lines
from cspd_jax.training.image import distillation, flow, mar
from cspd_jax.training.run import (
    INIT,
    Learning,
    TrainState,
    begin,
    first_state,
    run_key,
)
from cspd_jax.training.text import objective, rows, states

Array = jax.Array
_HELD_OUT_ONE_IN = 16  # of this many prompts, one is held out from training
_MEASURED = 64  # the most held-out prompts on which acceptance is measured
_LEARNING: dict[type, Any] = {MARConfig: mar, SphereConfig: flow, LMConfig: objective}


def train(
    config: Any,
    out: pathlib.Path,
    init: str | None = None,
    target: str | None = None,
    origin: str = "data",
    samples: int = 4096,
    mesh: Mesh | None = None,
) -> dict[str, object]:
    """Trains an image model or a language model in the folder `out`. Returns a report.

    init: the name of the model from whose weights the run starts (default: random
        weights).
    target: the name of the target, if the trained model is to be its draft. The draft
        then learns the target's distributions, and the report says how often its drafts
        are accepted. Without `init` the first half of the steps learn the data, because
        an untrained draft is too far from the target.
    origin: the rows on which a language model learns a target: rows of the "data", rows
        that the "target" generates, or "both".
    samples: the number of rows that the target generates.
    mesh: the devices (default: all).
    """
    is_text = isinstance(config.model, LMConfig)
    if not is_text:
        check_fit(config)
    if target is not None:
        model: Any = hub.load(target, of=TextModel if is_text else ImageModel)
        check_pair(config.model, model.config)
    if init is None:
        first = init_state(config)
    else:
        first = first_state(config, initial_params(hub.load(init), config.model))
    begin(out, config, init=init, target=target, origin=origin, samples=samples)
    mesh = mesh or runs.all_devices()
    learning = _LEARNING[type(config.model)].learning(config)
    if target is not None:
        pair = model.network, model.params
        network = type(model.network)(model.config, jnp.dtype(config.dtype))
        teacher = network, replicate(mesh, model.params)
        taught = (objective if is_text else distillation).learning(config, teacher)
        if is_text and origin != "data":
            own = rows.continuations(
                pair, config.data, samples, out / "samples.npz", config.seed
            )
            taught = on_rows(config, taught, own, origin == "both")
        learning = data_first(config, learning, taught) if init is None else taught
    state = runs.run(config, out, first, learning, mesh)
    report: Mapping[str, object] = {}
    if is_text:
        report = objective.measure(
            config.data, LM(config.model), state.ema, *(pair if target else ())
        )
    elif target is not None:
        report = distillation.measure(model, config, state.ema)
    return finished(
        out, config, state.ema, report, "train" if target is None else "distill"
    )


def finished(
    out: pathlib.Path,
    config: RunConfig,
    params: ArrayTree,
    report: Mapping[str, object],
    command: str,
) -> dict[str, object]:
    """Writes the model of a run, unless it is written already, and returns the report.
    Only the first process writes."""
    extra: dict[str, object] = {"training": to_json(config)}
    if isinstance(config.model, LMConfig):
        kind = "lm"
        extra["corpus"] = {"corpus": CORPUS, "python": platform.python_version()}
    elif isinstance(config, HeadTrainConfig):
        kind = "eagle"
    else:
        kind = kind_name(config.model)
        extra["class_names"] = list(config.data.class_names)
    path = out / "model"
    if jax.process_index() == 0 and not path.exists():
        weights.save(
            path, kind, config.model, params, source=f"cspd-jax {command}", extra=extra
        )
    return {**report, "steps": config.steps, "model": str(path)}


def data_first(config: RunConfig, before: Learning, then: Learning) -> Learning:
    """Returns a `Learning` with the batches of `then`. The first half of the steps
    learn as in `before`, the second half as in `then`."""
    stage = lambda number: before if number < config.steps // 2 else then
    return Learning(then.batch, lambda number, *more: stage(number).step(number, *more))


def on_rows(
    config: RunConfig, learning: Learning, own: np.ndarray, both: bool
) -> Learning:
    """Returns a `Learning` with the steps of `learning` and batches of the rows `own`
    [N, L]. If `both` is true, batches of the data and of these rows alternate."""

    def batch(step: int) -> np.ndarray:
        index = step // 2 if both else step
        if both and step % 2 == 0:
            return learning.batch(index)
        return own[
            shuffled(len(own), index, config.batch, seed=config.seed, split="train")
        ]

    return Learning(batch, learning.step)


def distill_head(
    config: HeadTrainConfig,
    out: pathlib.Path,
    target: str,
    prompts: pathlib.Path,
    samples: int = 4096,
    ids: int = 8192,
    mesh: Mesh | None = None,
) -> dict[str, object]:
    """Trains a head in the folder `out`. The head drafts from its target's states, and
    learns from the target's answers to prompts. Returns a report that says how often
    the drafts are accepted.

    prompts: a file with one prompt per line.
    samples: the number of answers that the target writes.
    ids: the number of ids that the head has. They are the ids of the target that are
        most frequent in the answers.
    mesh: the devices (default: all).
    """
    model = hub.load(target, of=TextModel)
    layers = model.config
    known = layers.known_ids
    config = dataclasses.replace(
        config, model=states.head_config(layers, min(ids, known))
    )
    questions = prompt_ids(model, read_lines(prompts))
    begin(out, config, target=target, prompts=str(prompts), samples=samples)
    pair = model.network, model.params
    entering = config.model.entering
    length = config.data.length
    asked = [
        prompt for number, prompt in enumerate(questions) if number % _HELD_OUT_ONE_IN
    ]
    taught = rows.answers(
        pair, asked, length, samples, out / "answers.npz", entering, config.seed
    )
    frequencies = np.bincount(taught.answered, minlength=known)
    frequent = states.frequent_ids(frequencies, config.model.ids, layers.eos_ids)
    given = states.given_by(layers, model.params, frequent)
    params = states.first_params(
        config.model, model.params, layers.depth, given, config.seed
    )
    mesh = mesh or runs.all_devices()
    learning = states.learning(config, taught, replicate(mesh, given))
    state = runs.run(config, out, first_state(config, params), learning, mesh)
    params = {**state.ema, "ids": frequent}
    report = states.measure(
        config, pair, params, questions[::_HELD_OUT_ONE_IN][:_MEASURED]
    )
    report["coverage"] = round(
        float(frequencies[frequent].sum() / frequencies.sum()), 4
    )
    return finished(out, config, params, report, "distill")


@functools.partial(jax.jit, static_argnames=("config",))
def init_state(config: RunConfig) -> TrainState:
    """Returns the state of a run that starts from random weights."""
    key = run_key(config.seed, INIT)
    init_params = (
        lm.init_params
        if isinstance(config.model, LMConfig)
        else kind_of(config.model).init_params
    )
    params = init_params(config.model, key)
    if isinstance(config, TrainConfig) and config.on_grid:
        params = {
            **params,
            "backbone": mar.on_grid(jax.random.fold_in(key, 1), params["backbone"]),
        }
    return first_state(config, params)


# Fields of the configuration that may differ between a masked-diffusion model and the
# causal model from whose weights it starts.
_CHANGED = (
    "family",
    "vocab_size",
    "known_ids",
    "max_positions",
    "causal",
    "block",
    "shifted",
    "mask_ids",
)


def initial_params(model: Any, config: Any) -> ArrayTree:
    """Returns the parameters of `model`, from which a run starts whose network has the
    configuration `config`.

    The configurations must be equal, with one exception: a masked-diffusion model can
    start from a causal model. New ids, such as the mask, then start as the mean of the
    other ids. The hidden state i - 1 of a causal model predicts the token at i, so a
    masked-diffusion model with shifted predictions knows most of what it has to learn
    from the beginning. Dream was initialised in this way.
    """
    if model.config == config:
        return model.params
    causal = (
        isinstance(config, LMConfig)
        and isinstance(model, TextModel)
        and model.config.causal
    )
    changed = {name: getattr(config, name) for name in _CHANGED} if causal else {}
    if not causal or dataclasses.replace(model.config, **changed) != config:
        raise UserError(
            f"--init {model.name} has other sizes than the model of this run; choose"
            " its preset or --set"
        )

    def padded(table: Array, axis: int) -> Array:
        new = jnp.repeat(
            jnp.mean(table, axis, keepdims=True),
            config.vocab_size - table.shape[axis],
            axis,
        )
        return jnp.concatenate([table, new], axis)

    params = {
        **model.params,
        "embed": {"embedding": padded(model.params["embed"]["embedding"], 0)},
    }
    if not config.tie_embeddings:
        params["head"] = {"kernel": padded(params["head"]["kernel"], 1)}
    return params


# Fields of the configuration that a draft has in common with its target.
_SHARED: dict[type, tuple[str, ...]] = {
    LMConfig: ("vocab_size", "causal", "bos_ids", "eos_ids", "mask_ids"),
    MARConfig: (
        "token_dim",
        "seq_len",
        "num_classes",
        "patch_size",
        "vae_stride",
        "respacing",
    ),
}


def check_pair(draft: object, target: object) -> None:
    """Raises UserError unless a draft with the configuration `draft` can learn the
    target."""
    if type(draft) not in _SHARED:
        raise UserError(
            "a draft of a causal image model is trained on the data, by cspd-jax train"
        )
    for name in _SHARED[type(draft)]:
        have = getattr(draft, name)
        want = getattr(target, name, None)
        if have != want:
            raise UserError(
                f"the draft's {name} is {have}, the target's is {want}; they must be"
                " equal: choose another --preset, or --set it"
            )


def check_fit(config: RunConfig) -> None:
    """Raises UserError unless the image model has the same tokens and classes as the
    data. It makes an image of the data, so a missing package is noticed here, before
    anything is compiled."""
    model = config.model
    data = config.data
    tokens = patchify(data.batch(0, 1).images, model.patch_size)
    found = (*tokens.shape[1:], len(data.class_names))
    wanted = model.seq_len, model.token_dim, model.num_classes
    if found != wanted:
        raise UserError(
            "the data has {} tokens of dimension {} in {} classes,".format(*found)
            + " the model {} of dimension {} in {}".format(*wanted)
        )
