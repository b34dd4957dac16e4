"""`cspd-jax train`, `distill` and `evaluate` for language models."""

from __future__ import annotations

import argparse
import json
import pathlib
import time
from collections.abc import Callable

from cspd_jax.cli._output import progress
from cspd_jax.errors import UserError

_GLANCE = 64  # held-out rows measured while training


def train(args: argparse.Namespace, config, begun, placement) -> None:
    from cspd_jax.cli.train import finish
    from cspd_jax.parallel import processes
    from cspd_jax.training import presets
    from cspd_jax.training.data.text import Texts
    from cspd_jax.training.placement import gathered
    from cspd_jax.training.run_folder import claimed
    from cspd_jax.training.text.trainer import train_text

    if begun.vae or args.cache or args.stream is not None:
        raise UserError("--vae, --cache and --stream are for folders of images, not for text")
    initial = _initial(begun.init, config.model, args.out)
    begun = begun.with_weights(str(args.out), init=initial and (config.model, initial))
    texts = Texts(config.data)
    with claimed(args.out, args.resume):
        presets.write(config, args.out, begun)
        start = time.monotonic()
        state = train_text(
            config,
            texts,
            args.out,
            resume=args.resume,
            stop_at=args.stop_at,
            on_sample=glance(config, texts, args.out / "held_out.jsonl"),
            initial=initial,
            placement=placement,
            tensorboard=args.tensorboard,
        )
        averaged = gathered(state.ema)
        if processes.is_first():
            report = {"held_out_bits_per_byte": measure(config, averaged, texts)}
            extra = {"corpus": texts.describe()}
            finish(args, config, int(state.step), averaged, start, "lm", extra, **report)


def _initial(name: str | None, config, out: pathlib.Path):
    """The parameters that --init gives a run; None without it, or if the run is past that."""
    from cspd_jax.training.checkpointing import has_checkpoints
    from cspd_jax.training.text.trainer import initial_params
    from cspd_jax.weights import models

    if name is None or has_checkpoints(out):
        return None
    return initial_params(models.load_text(name), config)


def distill(args: argparse.Namespace, config, begun, placement) -> None:
    from cspd_jax.cli.train import finish
    from cspd_jax.networks.lm import LM
    from cspd_jax.parallel import processes, put_whole
    from cspd_jax.training import presets
    from cspd_jax.training.data.text import Texts
    from cspd_jax.training.placement import gathered
    from cspd_jax.training.run_folder import claimed
    from cspd_jax.training.text.distillation import InTurn, TargetTexts, agreement
    from cspd_jax.training.text.objective import tiled
    from cspd_jax.training.text.trainer import TextTeacher, check_vocabulary, train_text
    from cspd_jax.weights import models

    target = models.load_text(begun.target)
    check_vocabulary(config.model, target.config)
    initial = _initial(begun.init, config.model, args.out)
    begun = begun.with_weights(
        str(args.out), target=(target.config, target.params), init=initial and (config.model, initial)
    )
    with claimed(args.out, args.resume):
        presets.write(config, args.out, begun)
        teacher = TextTeacher(target.config, put_whole(placement.mesh, target.params))
        texts = rows = Texts(config.data)
        if begun.origin != "data":
            progress(f"making {begun.samples} samples of the target")
            folder, here = args.out / "samples", TextTeacher(target.config, target.params)
            with processes.first_alone("the samples are made"):
                rows = TargetTexts(here, texts, begun.samples, folder, config.seed)
        if begun.origin == "both":
            rows = InTurn(texts, rows)
        start = time.monotonic()
        state = train_text(
            config,
            rows,
            args.out,
            teacher=teacher,
            resume=args.resume,
            stop_at=args.stop_at,
            on_sample=glance(config, texts, args.out / "held_out.jsonl"),
            initial=initial,
            placement=placement,
            tensorboard=args.tensorboard,
        )
        averaged = gathered(state.ema)
        if processes.is_first():
            held_out, _ = tiled(texts.streams["held-out"], config.data.length)
            found = agreement(target.network, target.params, LM(config.model), averaged, held_out)
            report = {name: round(value, 4) for name, value in found._asdict().items()}
            report["held_out_bits_per_byte"] = measure(config, averaged, texts)
            extra, source = {"corpus": texts.describe()}, "cspd-jax distill"
            finish(args, config, int(state.step), averaged, start, "lm", extra, source, **report)


def measure(config, params, texts, most: int | None = None) -> float:
    """Held-out bits per byte."""
    from cspd_jax.networks.lm import LM
    from cspd_jax.training.text.objective import bits_per_byte

    stream = texts.streams["held-out"]
    return round(bits_per_byte(LM(config.model), params, stream, config.data.length, most), 4)


def glance(config, texts, path: pathlib.Path) -> Callable[[int, object], None]:
    """A callback that measures a few held-out rows and appends the result to a file."""

    def on_sample(step: int, params) -> None:
        bits = measure(config, params, texts, _GLANCE)
        progress(f"step {step}: {bits:.3f} bits per byte on {_GLANCE} held-out rows")
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, "bits_per_byte": bits}) + "\n")

    return on_sample
