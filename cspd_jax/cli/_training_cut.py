"""`cspd-jax distill --cut`: a draft of some layers of a language model, for that model."""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import time
from collections.abc import Callable

from cspd_jax.cli._output import progress
from cspd_jax.errors import UserError

_SAMPLES = 1024
_GLANCE = 16  # held-out rows measured while training


def distill(args: argparse.Namespace, config, begun, placement) -> None:
    from cspd_jax.cli.train import finish
    from cspd_jax.networks.lm import LM
    from cspd_jax.parallel import processes, put_whole
    from cspd_jax.training import presets
    from cspd_jax.training.checkpointing import has_checkpoints
    from cspd_jax.training.data.prompts import prompt_ids, read_lines
    from cspd_jax.training.data.text import TextConfig
    from cspd_jax.training.placement import gathered
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

    if begun.target is None:
        raise UserError("a draft is cut from a target; name it with --target")
    if not isinstance(config.data, TextConfig):
        raise UserError(f"--cut is for language models; {args.preset} is a preset for images")
    begun = dataclasses.replace(begun, samples=begun.samples or _SAMPLES)
    check_count(begun.samples)
    texts = read_lines(pathlib.Path(begun.prompts))
    target = models.load_text(begun.target)
    layers = layers_of(begun.cut)
    config = dataclasses.replace(config, model=cut_config(target.config, layers, begun.ids))
    prompts = prompt_ids(target, texts)
    check_prompts(prompts, config.data.length)
    initial = None
    if not has_checkpoints(args.out):
        initial = cut(target.config, target.params, layers, begun.ids)
        if begun.init is not None:
            initial = initial_params(models.load_text(begun.init), config.model)
    begun = begun.with_weights(
        str(args.out),
        target=(target.config, target.params),
        init=(config.model, initial) if begun.init and initial else None,
    )
    with claimed(args.out, args.resume):
        presets.write(config, args.out, begun)
        teacher = TextTeacher(target.config, target.params)
        progress(f"making {begun.samples} answers of the target")
        folder, length = args.out / "answers", config.data.length
        with processes.first_alone("the answers are made"):
            answers = Answers(teacher, prompts, length, begun.samples, folder, config.seed)
        covered = answers.coverage(begun.ids)
        progress(f"{100 * covered:.2f} % of the ids in the answers are among the first {begun.ids}")

        def measure(params, most: int) -> dict[str, float]:
            found = taught_agreement(*teacher, LM(config.model), params, answers.held_out(most))
            return {name: round(value, 4) for name, value in found._asdict().items()}

        start = time.monotonic()
        state = train_taught(
            config,
            answers,
            args.out,
            put_whole(placement.mesh, last_part(target.config, target.params, begun.ids)),
            resume=args.resume,
            stop_at=args.stop_at,
            on_sample=glance(measure, args.out / "held_out.jsonl"),
            initial=initial,
            placement=placement,
            tensorboard=args.tensorboard,
        )
        averaged = gathered(state.ema)
        if processes.is_first():
            report = {**measure(averaged, begun.samples), "coverage": round(covered, 4)}
            kept = {"layers": list(layers), "from_ids": target.config.known_ids}
            extra, source = {"corpus": answers.describe(), "cut": kept}, "cspd-jax distill"
            finish(args, config, int(state.step), averaged, start, "lm", extra, source, **report)


def layers_of(text: str) -> tuple[int, ...]:
    """The numbers of --cut."""
    parts = text.split(",")
    if not all(part.isascii() and part.isdecimal() and len(part) < 10 for part in parts):
        raise UserError(f"--cut {text:.40} is not a list of layers, counted from 0, such as 0,1,29")
    return tuple(map(int, parts))


def glance(measure: Callable[[object, int], dict], path: pathlib.Path) -> Callable[[int, object], None]:
    """A callback that measures a few held-out rows and appends the result to a file."""

    def on_sample(step: int, params) -> None:
        found = measure(params, _GLANCE)
        progress(f"step {step}: a draft is accepted with probability {found['acceptance']:.3f}")
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **found}) + "\n")

    return on_sample
