"""Language models from text, and drafts from a target."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Callable
from typing import Any

from cspd_jax.errors import UserError
from cspd_jax.networks.lm import LM
from cspd_jax.networks.lm_config import LMConfig
from cspd_jax.parallel import processes, replicate
from cspd_jax.training.checkpointing import newest_step
from cspd_jax.training.config import TextTrainConfig
from cspd_jax.training.data.text import Texts
from cspd_jax.training.recipe import Beginning, Tell, Trained, prepare, silent
from cspd_jax.training.run import RunOptions
from cspd_jax.training.text.distillation import InTurn, TargetTexts, agreement
from cspd_jax.training.text.objective import bits_per_byte, tiled
from cspd_jax.training.text.trainer import Rows, TextTeacher, check_vocabulary, initial_params, train_text
from cspd_jax.weights import models
from cspd_jax.weights.tokenizers import END_OF_TEXT

_SAMPLES = 4096
_GLANCE = 64  # held-out rows measured while training


def train(
    config: TextTrainConfig,
    out: pathlib.Path,
    begun: Beginning,
    options: RunOptions = RunOptions(),
    tell: Tell = silent,
) -> Trained:
    """Trains a language model on text in the folder `out`."""
    if config.data_share:
        raise UserError("data_share is for drafts that are distilled; training on the data has no other part")
    ids = max((END_OF_TEXT, *config.model.mask_ids)) + 1
    if config.model.known_ids < ids:
        raise UserError(f"model.known_ids is {config.model.known_ids}; texts are bytes, and have {ids} ids")
    initial = _starting_weights(begun.init, config.model, out)
    texts = Texts(config.data)
    prepare(out, options.resume)
    on_sample = glance(config, texts, out / "held_out.jsonl", tell)
    state = train_text(config, texts, out, dataclasses.replace(options, on_sample=on_sample, initial=initial))
    trained = Trained.of("lm", config, state, {"corpus": texts.describe()})
    if processes.is_first():
        trained.report["held_out_bits_per_byte"] = measure(config, trained.params, texts)
    return trained


def distill(
    config: TextTrainConfig,
    out: pathlib.Path,
    begun: Beginning,
    options: RunOptions = RunOptions(),
    tell: Tell = silent,
) -> Trained:
    """Trains a draft for the language model that `begun` names, in the folder `out`, and measures how well
    they agree."""
    target = models.load_text(begun.target or ("text-default" if config.model.causal else "masked-default"))
    check_vocabulary(config.model, target.config)
    initial = _starting_weights(begun.init, config.model, out)
    texts = Texts(config.data)
    prepare(out, options.resume)
    rows = _drafts_rows(config, begun, TextTeacher(target.config, target.params), texts, out, tell)
    placement = options.placement_for(config)
    teacher = TextTeacher(target.config, replicate(placement.mesh, target.params))
    on_sample = glance(config, texts, out / "held_out.jsonl", tell)
    options = dataclasses.replace(options, placement=placement, on_sample=on_sample, initial=initial)
    state = train_text(config, rows, out, options, teacher)
    trained = Trained.of("lm", config, state, {"corpus": texts.describe()})
    if processes.is_first():
        held_out, _ = tiled(texts.streams["held-out"], config.data.length)
        agreed = agreement(target.network, target.params, LM(config.model), trained.params, held_out)
        trained.report.update({name: round(value, 4) for name, value in agreed._asdict().items()})
        trained.report["held_out_bits_per_byte"] = measure(config, trained.params, texts)
    return trained


def _drafts_rows(
    config: TextTrainConfig,
    begun: Beginning,
    teacher: TextTeacher,
    texts: Texts,
    out: pathlib.Path,
    tell: Tell,
) -> Rows:
    """What the draft learns on: the data, the target's own continuations, or both in turn."""
    if begun.origin in (None, "data"):
        return texts
    count = begun.samples or _SAMPLES
    tell(f"making {count} samples of the target")
    with processes.first_alone("the samples are made"):
        made = TargetTexts(teacher, texts, count, out / "samples", config.seed)
    return InTurn(texts, made) if begun.origin == "both" else made


def _starting_weights(name: str | None, config: LMConfig, out: pathlib.Path) -> Any:
    """The parameters that --init gives a run; None without it, or if the run is past that."""
    if name is None or newest_step(out):
        return None
    return initial_params(models.load_text(name), config)


def measure(config: TextTrainConfig, params: Any, texts: Texts, most: int | None = None) -> float:
    """Bits per byte of held-out text."""
    stream = texts.streams["held-out"]
    return round(bits_per_byte(LM(config.model), params, stream, config.data.length, most), 4)


def glance(
    config: TextTrainConfig, texts: Texts, path: pathlib.Path, tell: Tell
) -> Callable[[int, Any], None]:
    """An `on_sample` that measures a few held-out rows and appends the result to a file."""

    def on_sample(step: int, params: Any) -> None:
        bits = measure(config, params, texts, _GLANCE)
        tell(f"step {step}: {bits:.3f} bits per byte on {_GLANCE} held-out rows")
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, "bits_per_byte": bits}) + "\n")

    return on_sample
