"""A head that drafts from its target's states, trained on that target's answers."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np

from cspd_jax.errors import UserError
from cspd_jax.networks import narrow
from cspd_jax.networks.eagle_config import EagleConfig, published_layers
from cspd_jax.networks.lm_config import LMConfig
from cspd_jax.parallel import processes, replicate
from cspd_jax.training.config import HeadTrainConfig
from cspd_jax.training.data.prompts import prompt_ids, read_lines
from cspd_jax.training.recipe import Beginning, Tell, Trained, prepare, silent
from cspd_jax.training.run import RunOptions
from cspd_jax.training.text.answers import Answers, check_count, check_prompts
from cspd_jax.training.text.questions import opening, own_questions
from cspd_jax.training.text.states import agreement, frequent_ids, given_by, train_head
from cspd_jax.training.text.trainer import TextTeacher
from cspd_jax.weights import models

_SAMPLES = 4096
_IDS = 8192
_GLANCE = 16  # held-out rows measured while training
Measure = Callable[[Any, int], dict[str, Any]]  # (parameters, rows) -> how well head and target agree


def distill(
    config: HeadTrainConfig,
    out: pathlib.Path,
    begun: Beginning,
    options: RunOptions = RunOptions(),
    tell: Tell = silent,
) -> Trained:
    """Trains a head for the target that `begun` names in the folder `out`."""
    if (target_name := begun.target) is None or (begun.prompts is None and begun.questions is None):
        missing = "--target" if begun.target is None else "--prompts or --questions"
        raise UserError(f"a head learns from a target's answers to prompts; {missing} is missing")
    samples = begun.samples or _SAMPLES
    check_count(samples)
    target = models.load_text(target_name)
    known = target.config.known_ids
    if begun.ids is not None and begun.ids > known:
        raise UserError(f"a head of {begun.ids} ids is more than its target's {known}; give fewer --ids")
    wanted = begun.ids or min(_IDS, known)
    lines = read_lines(pathlib.Path(begun.prompts)) if begun.prompts else []
    if begun.questions:
        opening(target)
    else:
        check_prompts(prompt_ids(target, lines), config.data.length)
    config = dataclasses.replace(config, model=head_config(target.config, wanted))
    prepare(out, options.resume)
    with narrow.products_of(config.products):
        teacher = TextTeacher(target.config, target.params)
        if begun.questions:
            with processes.first_alone("the questions are asked"):
                own = own_questions(target, begun.questions, out / "questions.txt", config.seed)
            lines = [*lines, *own]
        prompts = prompt_ids(target, lines)
        check_prompts(prompts, config.data.length)
        tell(f"making {samples} answers of the target")
        with processes.first_alone("the answers are made"):
            answers = Answers(
                teacher, prompts, config.data.length, samples, out / "answers", config.model.entering,
                config.seed,
            )  # fmt: skip
        frequencies = answers.frequencies(target.config.known_ids)
        ids = frequent_ids(frequencies, config.model.ids, target.config.eos_ids)
        covered = round(float(frequencies[ids].sum() / frequencies.sum()), 4)
        tell(f"{100 * covered:.2f} % of the ids in the answers are among the head's {len(ids)}")
        given = given_by(teacher, ids)

        def measure(params: Any, most: int) -> dict[str, Any]:
            found = agreement(config, teacher, params, given, answers.held_out(most))
            return {"acceptance": round(found.acceptance, 4), "greedy": found.greedy}

        placement = options.placement_for(config)
        on_sample = glance(measure, out / "held_out.jsonl", tell)
        options = dataclasses.replace(options, placement=placement, on_sample=on_sample)
        state = train_head(config, teacher, answers, replicate(placement.mesh, given), out, options)
        trained = Trained.of("eagle", config, state, {"corpus": answers.describe()})
        if processes.is_first():
            trained.report.update({**measure(trained.params, samples), "coverage": covered})
        return trained._replace(params={**trained.params, "ids": np.asarray(ids)})


def head_config(target: LMConfig, ids: int) -> EagleConfig:
    """A head of one of the target's layers, which reads what enters a low, a middle and a high one."""
    if not target.causal:
        raise UserError("a head drafts for causal models, and the target is a masked-diffusion model")
    if ids <= len(target.eos_ids):
        raise UserError(f"a head of {ids} ids has no room for the {len(target.eos_ids)} that end a text")
    layer = dataclasses.replace(
        target, depth=1, vocab_size=ids, known_ids=ids, tie_embeddings=False, parallel_residual=False,
        bos_ids=(), eos_ids=(),
    )  # fmt: skip
    return EagleConfig(layer, published_layers(target.depth), target.width, target.vocab_size)


def glance(measure: Measure, path: pathlib.Path, tell: Tell) -> Callable[[int, Any], None]:
    """An `on_sample` that measures a few held-out rows and appends the result to a file."""

    def on_sample(step: int, params: Any) -> None:
        agreed = measure(params, _GLANCE)
        tell(f"step {step}: a draft is accepted with probability {agreed['acceptance']:.3f}")
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **agreed}) + "\n")

    return on_sample
