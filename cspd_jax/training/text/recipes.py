"""Language models from text, drafts from a target, and heads that draft from a target's states."""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from cspd_jax.errors import UserError
from cspd_jax.networks import narrow
from cspd_jax.networks.eagle_config import EagleConfig, published_layers
from cspd_jax.networks.lm import LM, init_params
from cspd_jax.networks.lm_config import LMConfig
from cspd_jax.parallel import processes, replicate
from cspd_jax.training.config import HeadTrainConfig, TextTrainConfig
from cspd_jax.training.data.prompts import prompt_ids, read_lines
from cspd_jax.training.data.source import Batches
from cspd_jax.training.data.text import Texts
from cspd_jax.training.placement import Placement, gathered
from cspd_jax.training.run import Learning, OnSample, Tell, Trained, begin, run
from cspd_jax.training.step import Metrics, Purpose, TrainState, descend, first_state, run_key
from cspd_jax.training.text import states
from cspd_jax.training.text.answers import Answers, check_prompts
from cspd_jax.training.text.distillation import InTurn, TargetTexts, agreement
from cspd_jax.training.text.objective import (
    TextTeacher,
    bits_per_byte,
    cross_entropy,
    divergence,
    tiled,
    view,
    within,
)
from cspd_jax.weights import models
from cspd_jax.weights.models import TextModel

Array = jax.Array
_GLANCE = 64  # held-out rows that a language model is measured on while training
_GLANCE_OF_HEADS = 16


def train(
    config: TextTrainConfig,
    out: pathlib.Path,
    init: str | None = None,
    mesh: Mesh | None = None,
    tell: Tell = print,
) -> Trained:
    """Trains a language model on text in the folder `out`. init: names the weights it starts from."""
    first = _first_state(config, init)
    begin(out, config, command="train", init=init)
    texts, placement = Texts(config.data), Placement(config.batch, mesh)
    state = run(config, out, first, from_rows(config, texts), placement, _glances(config, texts, out, tell))
    params = gathered(state.ema)
    report = {}
    if processes.is_first():
        report["held_out_bits_per_byte"] = measure(config, params, texts)
    return Trained("lm", config, params, {"corpus": texts.describe()}, report)


def distill(
    config: TextTrainConfig,
    out: pathlib.Path,
    target: str | None = None,
    init: str | None = None,
    origin: str = "data",
    samples: int = 4096,
    mesh: Mesh | None = None,
    tell: Tell = print,
) -> Trained:
    """Trains a draft for the language model of that name in the folder `out`, and measures how well they
    agree.

    origin: whether it learns on rows of the "data", on so many `samples` of the "target", or "both".
    """
    target = target or ("text-default" if config.model.causal else "masked-default")
    model = models.load_text(target)
    check_vocabulary(config.model, model.config)
    first = _first_state(config, init)
    begin(out, config, command="distill", target=target, init=init, origin=origin, samples=samples)
    texts = Texts(config.data)
    rows: Batches = texts
    if origin != "data":
        tell(f"making {samples} samples of the target")
        teacher = TextTeacher(model.config, model.params)
        with processes.first_alone("the samples are made"):
            made = TargetTexts(teacher, texts, samples, out / "samples", config.seed)
        rows = made if origin == "target" else InTurn(texts, made)
    placement = Placement(config.batch, mesh)
    learning = from_rows(config, rows, TextTeacher(model.config, replicate(placement.mesh, model.params)))
    state = run(config, out, first, learning, placement, _glances(config, texts, out, tell))
    params = gathered(state.ema)
    report: dict[str, Any] = {}
    if processes.is_first():
        held_out, _ = tiled(texts.streams["held-out"], config.data.length)
        agreed = agreement(model.network, model.params, LM(config.model), params, held_out)
        report = {name: round(value, 4) for name, value in agreed._asdict().items()}
        report["held_out_bits_per_byte"] = measure(config, params, texts)
    return Trained("lm", config, params, {"corpus": texts.describe()}, report)


def distill_head(
    config: HeadTrainConfig,
    out: pathlib.Path,
    target: str,
    prompts: pathlib.Path,
    samples: int = 4096,
    ids: int = 8192,
    mesh: Mesh | None = None,
    tell: Tell = print,
) -> Trained:
    """Trains a head that drafts from its target's states, on the target's answers, in the folder `out`.

    prompts: a file with one prompt per line.
    samples: answers that are made.
    ids: how many of the target's ids the head has, the answers' most frequent ones.
    """
    model = models.load_text(target)
    config = dataclasses.replace(config, model=head_config(model.config, min(ids, model.config.known_ids)))
    rows = prompt_ids(model, read_lines(prompts))
    check_prompts(rows, config.data.length)
    begin(out, config, command="distill", target=target, prompts=str(prompts), samples=samples)
    with narrow.products_of(config.products):
        tell(f"making {samples} answers of the target")
        teacher, layers = TextTeacher(model.config, model.params), config.model.entering
        with processes.first_alone("the answers are made"):
            answers = Answers(
                teacher, rows, config.data.length, samples, out / "answers", layers, config.seed
            )
        frequencies = answers.frequencies(model.config.known_ids)
        kept = states.frequent_ids(frequencies, config.model.ids, model.config.eos_ids)
        covered = round(float(frequencies[kept].sum() / frequencies.sum()), 4)
        tell(f"{100 * covered:.2f} % of the ids in the answers are among the head's {len(kept)}")
        given = states.given_by(teacher, kept)

        def agreed(params: Any, most: int) -> dict[str, Any]:
            found = states.agreement(config, teacher, params, given, answers.held_out(most))
            return {"acceptance": round(found.acceptance, 4), "greedy": found.greedy}

        placement = Placement(config.batch, mesh)
        on_all = replicate(placement.mesh, given)
        learning = Learning(
            lambda step: answers.batch(step, config.batch, seed=config.seed),
            lambda _, state, batch: states.head_step(config, state, batch, on_all),
            "rows",
        )
        first = first_state(config, states.first_params(config.model, teacher, kept, config.seed))
        on_sample = _told(lambda params: agreed(params, _GLANCE_OF_HEADS), out, tell)
        state = run(config, out, first, learning, placement, on_sample)
        params = gathered(state.ema)
        report = {**agreed(params, samples), "coverage": covered} if processes.is_first() else {}
        params = {**params, "ids": np.asarray(kept)}
        return Trained("eagle", config, params, {"corpus": answers.describe()}, report)


def head_config(target: LMConfig, ids: int) -> EagleConfig:
    """Returns a head like one of the target's layers; it reads what enters a low, a middle and a high one."""
    if not target.causal:
        raise UserError("a head drafts for causal models, and the target is a masked-diffusion model")
    layer = dataclasses.replace(
        target, depth=1, vocab_size=ids, known_ids=ids, tie_embeddings=False, parallel_residual=False,
        bos_ids=(), eos_ids=(),
    )  # fmt: skip
    return EagleConfig(layer, published_layers(target.depth), target.width, target.vocab_size)


def check_vocabulary(draft: LMConfig, target: LMConfig) -> None:
    """Raises UserError unless the two models have the same ids with the same meaning.

    A causal draft may have the first ones only.
    """
    fewer = draft.causal and target.causal and draft.vocab_size < target.known_ids
    sizes = () if fewer else ("vocab_size",)
    for name in (*sizes, "causal", "bos_ids", "eos_ids", "mask_ids"):
        have, want = getattr(draft, name), getattr(target, name)
        if have != want:
            raise UserError(f"the draft's {name} is {have}, the target's is {want}; they must be equal")


def from_rows(config: TextTrainConfig, rows: Batches, teacher: TextTeacher | None = None) -> Learning:
    """Returns how a model learns rows of text; with a teacher, to predict what that predicts."""
    target = (None, None) if teacher is None else teacher
    return Learning(
        lambda step: rows.batch(step, config.batch, seed=config.seed),
        lambda _, state, batch: text_step(config, state, batch, *target),
        "rows",
    )


@functools.partial(jax.jit, static_argnames=("config", "target"), donate_argnames=("state",))
def text_step(
    config: TextTrainConfig,
    state: TrainState,
    rows: Array,
    target: LMConfig | None = None,
    target_params: Any = None,
) -> tuple[TrainState, Metrics]:
    """Takes one step on rows [B, L], from the data or towards a target. The loss is in bits per id.

    With a target the loss is (1 - share) KL(target || model) + share * cross-entropy, share = `data_share`.
    """
    dtype = jnp.dtype(config.dtype)
    model, share = LM(config.model, dtype), config.data_share
    shown = view(model, jax.random.fold_in(run_key(config.seed, Purpose.STEP), state.step), rows)
    known = within(shown, config.model.vocab_size)
    teacher = None if target is None else LM(target, dtype).forward(target_params, shown.seen)

    def loss(params):
        logits = model.forward(params, known.seen)
        bits = cross_entropy(known, logits)
        if teacher is not None:
            bits = (1 - share) * divergence(shown, teacher, logits) + share * bits
        return bits, {"loss": bits}

    return descend(config, state, loss)


def _first_state(config: TextTrainConfig, init: str | None) -> TrainState:
    """Returns the state of a run that starts from the named model, or from random weights."""
    if init is None:
        return init_state(config)
    return first_state(config, initial_params(models.load_text(init), config.model))


@functools.partial(jax.jit, static_argnames=("config",))
def init_state(config: TextTrainConfig) -> TrainState:
    """Returns the state of a run that starts from random weights."""
    return first_state(config, init_params(config.model, run_key(config.seed, Purpose.INIT)))


# Fields that may differ between a causal model and the masked-diffusion model that starts from its weights.
_CHANGED = ("family", "vocab_size", "known_ids", "max_positions", "causal", "shifted", "mask_ids")


def initial_params(model: TextModel, config: LMConfig) -> Any:
    """Returns the parameters that a run of `config` starts from: those of an equal model or, if this one is
    masked with shifted predictions, of a causal one.

    A causal model's hidden state i - 1 predicts the token at i, as a shifted model's does, so it already
    knows most of what the other has to learn. Dream was initialised in this way.
    """
    if model.config == config:
        return model.params
    same = dataclasses.replace(model.config, **{name: getattr(config, name) for name in _CHANGED}) == config
    if model.config.causal and config.shifted and same:
        return _with_new_ids(model.params, config)
    raise UserError(
        f"--init {model.name} has other sizes than the model of this run; choose its preset or --set"
    )


def _with_new_ids(params: dict, config: LMConfig) -> dict:
    """Extends `params` to the vocabulary of `config`: new ids, such as the mask, start as the mean of the
    others."""
    params = dict(params)

    def padded(table, axis: int):
        count = config.vocab_size - table.shape[axis]
        new = jnp.repeat(jnp.mean(table, axis=axis, keepdims=True), count, axis=axis)
        return jnp.concatenate([table, new], axis=axis)

    params["embed"] = {"embedding": padded(params["embed"]["embedding"], axis=0)}
    if not config.tie_embeddings:
        params["head"] = {"kernel": padded(params["head"]["kernel"], axis=1)}
    return params


def measure(config: TextTrainConfig, params: Any, texts: Texts, most: int | None = None) -> float:
    """Measures the bits per byte of held-out text."""
    stream = texts.streams["held-out"]
    return round(bits_per_byte(LM(config.model), params, stream, config.data.length, most), 4)


def _glances(config: TextTrainConfig, texts: Texts, out: pathlib.Path, tell: Tell) -> OnSample:
    return _told(lambda params: {"bits_per_byte": measure(config, params, texts, _GLANCE)}, out, tell)


def _told(found_of: Callable[[Any], dict[str, Any]], out: pathlib.Path, tell: Tell) -> OnSample:
    """Returns an `on_sample` that measures on a few held-out rows, and appends the result to
    `held_out.jsonl`."""

    def on_sample(step: int, params: Any) -> None:
        found = {"step": step, **found_of(params)}
        tell(", ".join(f"{name} {value}" for name, value in found.items()))
        with (out / "held_out.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(found) + "\n")

    return on_sample
