"""Arrays that take long to make: made once, kept in a file, and checked when they are read."""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
import zipfile
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from cspd_jax.errors import UserError


def kept(path: pathlib.Path, origin: str, make: Callable[[], np.ndarray]) -> np.ndarray:
    """The array in the file `path`, made if there is none. origin: names what it depends on."""
    if path.exists():
        return _read(path, origin)
    samples = make()
    unfinished = path.with_suffix(".partial")
    with open(unfinished, "wb") as file:
        np.savez(file, samples=samples, origin=origin)
    os.replace(unfinished, path)
    return samples


def _read(path: pathlib.Path, origin: str) -> np.ndarray:
    try:
        with np.load(path, allow_pickle=False) as stored:
            samples, stored_origin = stored["samples"], str(stored["origin"])
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise UserError(f"{path} is damaged ({error}); delete it and it will be made again") from None
    if stored_origin != origin:
        raise UserError(f"{path} was made by another target or seed; delete that folder or choose another")
    return samples


def fingerprint(config: Any, params: Any, *more: Any) -> str:
    """Names what a model's samples depend on: sizes, weights, and what else is given (JSON)."""
    digest = hashlib.sha256(json.dumps([repr(config), *more]).encode())
    for leaf in jax.tree.leaves(params):
        digest.update(np.asarray(leaf).tobytes())
    return digest.hexdigest()
