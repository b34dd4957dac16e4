"""Calibrations of drafters, kept: in the checkpoint folder, or in the user's cache; made when there is none.

Gains depend on the respacing, the guidance and the temperature, so each combination has its own file. They
change how many head calls speculation takes and nothing else: stale or foreign gains are slower, never wrong.
"""

from __future__ import annotations

import contextlib
import hashlib
import secrets
import zipfile
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from cspd_jax.decoders.calibration import CHAINS, Calibration, calibrate
from cspd_jax.decoders.drafter import NoiseCorrected
from cspd_jax.decoders.plain import PlainSettings
from cspd_jax.diffusion.schedule import sampling_schedule
from cspd_jax.errors import UserError
from cspd_jax.keys import image_keys
from cspd_jax.models import ImageModel
from cspd_jax.user_cache import cache_folder

FOLDER = "gains"  # within a checkpoint folder
_SEED = 0  # calibration always uses the same key: the same model has the same gains


class Found(NamedTuple):
    """A calibration, and where it is from: a file, or "calibrated"."""

    calibration: Calibration
    source: str


def find(model: ImageModel, settings: PlainSettings, cfg: float, temperature: float) -> Found | None:
    """The stored calibration for these settings, if there is one."""
    name = file_name(settings, cfg, temperature)
    for path in (_in_checkpoint(model, name), _in_cache(model, name)):
        calibration = path and read(path, model, settings)
        if calibration:
            return Found(calibration, str(path))
    return None


def get(model: ImageModel, settings: PlainSettings, cfg: float, temperature: float) -> Found:
    """The stored calibration, or one made now and put into the user's cache."""
    found = find(model, settings, cfg, temperature)
    if found is None:
        found = Found(measure(model, settings, cfg, temperature), "calibrated")
        if not all(bool(jnp.isfinite(a).all()) for a in jax.tree.leaves(found.calibration)):
            raise UserError(
                "the chains that the drafter is fitted to came out as NaN or infinity: the model diverged;"
                " try a lower temperature or cfg, or steps ddim100"
            )
        with contextlib.suppress(OSError):  # then it is made again next time
            write(_in_cache(model, file_name(settings, cfg, temperature)), found.calibration)
    return found


def measure(model: ImageModel, settings: PlainSettings, cfg: float, temperature: float) -> Calibration:
    """Calibrates on images of the model's first classes."""
    images = max(1, CHAINS // model.config.seq_len)
    keys = image_keys(jax.random.key(_SEED), images)
    labels = jnp.arange(images, dtype=jnp.int32) % model.config.num_classes
    return calibrate(
        model.model, model.params, keys, labels, settings=settings, cfg=cfg, temperature=temperature
    )


def file_name(settings: PlainSettings, cfg: float, temperature: float) -> str:
    guidance = f"-cfg{cfg:g}-{settings.cfg_schedule}" if settings.guided else ""
    return f"{settings.respacing.replace(',', '_')}{guidance}-t{temperature:g}.npz"


def write(path: Path, calibration: Calibration) -> None:
    arrays = {**calibration.drafter._asdict(), "contexts": calibration.contexts}
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    try:
        with open(partial, "wb") as file:
            np.savez(file, **{name: np.asarray(value) for name, value in arrays.items()})
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def read(path: Path, model: ImageModel, settings: PlainSettings) -> Calibration | None:
    """The calibration in a file; None if there is no file. UserError if it is not one for this model."""
    steps, dim = sampling_schedule(settings.respacing).num_steps, model.config.token_dim
    contexts = (1 + settings.guided, None, model.config.decoder_width)
    shapes = {"x0": (dim,), "v": (steps, dim), "gain": (steps,), "gain_f": (steps,), "limit": ()}
    shapes["contexts"] = contexts
    try:
        with np.load(path, allow_pickle=False) as content:
            arrays = {name: content[name] for name in shapes}
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise UserError(f"{path} does not hold gains ({error}); remove it, and it is made anew") from None
    for name, array in arrays.items():
        fits = array.ndim == len(shapes[name]) and all(
            have == want or want is None for have, want in zip(array.shape, shapes[name])
        )
        if not fits or not array.size or array.dtype != np.float32 or not np.isfinite(array).all():
            raise UserError(
                f"{path}: {name} is {array.dtype} {list(array.shape)}, which is not finite float32 of the"
                " model's sizes; remove the file, and it is made anew"
            )
    arrays = {name: jnp.asarray(array) for name, array in arrays.items()}
    return Calibration(contexts=arrays.pop("contexts"), drafter=NoiseCorrected(**arrays))


def digest(model: ImageModel) -> str:
    """Tells models apart: a hash of the sizes, the dtype and a few numbers of every parameter."""
    found = hashlib.sha256(repr((model.config, jnp.dtype(model.model.dtype).name)).encode())
    for leaf in jax.tree.leaves(model.params):
        found.update(np.asarray(leaf.reshape(-1)[:64]).tobytes())
    return found.hexdigest()[:20]


def _in_checkpoint(model: ImageModel, name: str) -> Path | None:
    return model.folder / FOLDER / name if model.folder else None


def _in_cache(model: ImageModel, name: str) -> Path:
    return cache_folder() / FOLDER / digest(model) / name
