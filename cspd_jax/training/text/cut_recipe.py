"""A draft of some layers of a language model, trained on that model's answers."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Callable
from typing import Any

from cspd_jax.errors import UserError
from cspd_jax.networks.lm import LM
from cspd_jax.parallel import processes, replicate
from cspd_jax.training import settings_file
from cspd_jax.training.checkpointing import has_checkpoints
from cspd_jax.training.config import TextTrainConfig
from cspd_jax.training.data.prompts import prompt_ids, read_lines
from cspd_jax.training.provenance import Provenance
from cspd_jax.training.recipe import Tell, Trained, silent
from cspd_jax.training.run import RunOptions
from cspd_jax.training.run_folder import claimed
from cspd_jax.training.text.cached_teacher import (
    Answers,
    check_count,
    check_prompts,
    taught_agreement,
    train_taught,
)
from cspd_jax.training.text.cut import cut, cut_config, last_part
from cspd_jax.training.text.trainer import TextTeacher, initial_params
from cspd_jax.weights import models

_SAMPLES = 1024
_GLANCE = 16  # held-out rows measured while training
Measure = Callable[[Any, int], dict[str, float]]  # (parameters, rows) -> how well draft and target agree


def distill(
    config: TextTrainConfig,
    out: pathlib.Path,
    begun: Provenance,
    options: RunOptions = RunOptions(),
    tell: Tell = silent,
) -> Trained:
    """Cuts a draft from the target that `begun` names and trains it in the folder `out`."""
    if (target_name := begun.target) is None:
        raise UserError("a draft is cut from a target; name it with --target")
    samples = begun.samples or _SAMPLES
    begun = dataclasses.replace(begun, samples=samples)
    check_count(samples)
    assert begun.prompts and begun.cut and begun.ids, "the command line asks for all three"
    ids, texts = begun.ids, read_lines(pathlib.Path(begun.prompts))
    target = models.load_text(target_name)
    layers = layers_of(begun.cut)
    config = dataclasses.replace(config, model=cut_config(target.config, layers, ids))
    prompts = prompt_ids(target, texts)
    check_prompts(prompts, config.data.length)
    initial = None
    if not has_checkpoints(out):
        initial = cut(target.config, target.params, layers, ids)
        if begun.init is not None:
            initial = initial_params(models.load_text(begun.init), config.model)
    begun = begun.with_weights(
        str(out),
        target=(target.config, target.params),
        init=(config.model, initial) if begun.init and initial else None,
    )
    with claimed(out, options.resume):
        settings_file.write(config, out, begun)
        teacher = TextTeacher(target.config, target.params)
        answers = _answers(teacher, prompts, config, samples, out, tell)
        covered = answers.coverage(ids)
        tell(f"{100 * covered:.2f} % of the ids in the answers are among the first {ids}")

        def measure(params: Any, most: int) -> dict[str, float]:
            agreed = taught_agreement(*teacher, LM(config.model), params, answers.held_out(most))
            return {name: round(value, 4) for name, value in agreed._asdict().items()}

        placement = options.placement_for(config)
        head = replicate(placement.mesh, last_part(target.config, target.params, ids))
        on_sample = glance(measure, out / "held_out.jsonl", tell)
        options = dataclasses.replace(options, placement=placement, on_sample=on_sample, initial=initial)
        state = train_taught(config, answers, out, head, options)
        kept = {"layers": list(layers), "from_ids": target.config.known_ids}
        trained = Trained.of("lm", config, state, {"corpus": answers.describe(), "cut": kept})
        if processes.is_first():
            trained.report.update({**measure(trained.params, samples), "coverage": round(covered, 4)})
        return trained


def _answers(
    teacher: TextTeacher, prompts: Any, config: TextTrainConfig, samples: int, out: pathlib.Path, tell: Tell
) -> Answers:
    tell(f"making {samples} answers of the target")
    with processes.first_alone("the answers are made"):
        return Answers(teacher, prompts, config.data.length, samples, out / "answers", config.seed)


def layers_of(text: str) -> tuple[int, ...]:
    """The numbers of --cut."""
    parts = text.split(",")
    if not all(part.isascii() and part.isdecimal() and len(part) < 10 for part in parts):
        raise UserError(f"--cut {text:.40} is not a list of layers, counted from 0, such as 0,1,29")
    return tuple(map(int, parts))


def glance(measure: Measure, path: pathlib.Path, tell: Tell) -> Callable[[int, Any], None]:
    """An `on_sample` that measures a few held-out rows and appends the result to a file."""

    def on_sample(step: int, params: Any) -> None:
        agreed = measure(params, _GLANCE)
        tell(f"step {step}: a draft is accepted with probability {agreed['acceptance']:.3f}")
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **agreed}) + "\n")

    return on_sample
