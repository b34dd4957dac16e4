"""A checkpoint folder: `config.json` and the parameters, in `params/` (Orbax) or `params.safetensors`.

Written beside its final name and renamed, so that a folder of that name is always complete.
"""

from __future__ import annotations

import dataclasses
import json
import os
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import ml_dtypes
import numpy as np

from cspd_jax.checkpoints import _params, _single
from cspd_jax.checkpoints.kinds import describe_params, get_kind, read_config
from cspd_jax.errors import UserError

FORMAT_VERSION = 1
SINGLE_FILE = "params.safetensors"
DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}


class Checkpoint(NamedTuple):
    kind: str
    config: Any  # the kind's frozen dataclass
    params: Any  # nested dict of arrays
    metadata: dict[str, Any]  # the rest of config.json: dtype, params (their number), source, extra, ...


def save(
    path: str | os.PathLike,
    kind: str,
    config: Any,
    params: Mapping,
    *,
    source: str | None = None,
    source_sha256: str | None = None,
    extra: Mapping[str, Any] | None = None,
    single_file: bool = False,
) -> dict[str, Any]:
    """Writes a new checkpoint folder and returns what its config.json says.

    `params` keep their dtype. `extra` is anything JSON can hold. `single_file` puts the parameters in one
    safetensors file instead of Orbax's many. Either the whole folder appears or nothing.
    """
    path = Path(os.path.abspath(path))
    check_destination(path)
    _params.check(params, describe_params(get_kind(kind, str(path)), config, str(path)), str(path))
    description = {
        "format_version": FORMAT_VERSION,
        "kind": kind,
        "config": dataclasses.asdict(config),
        "dtype": _params.common_dtype(params),
        "params": sum(int(leaf.size) for leaf in jax.tree.leaves(params)),
        "source": source,
        "source_sha256": source_sha256,
        "extra": dict(extra or {}),
    }
    text = json.dumps(description, indent=2) + "\n"
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    try:
        partial.mkdir()
        if single_file:
            _single.write(partial / SINGLE_FILE, params)
        else:
            _params.write(partial / "params", params)
        (partial / "config.json").write_text(text, encoding="utf-8")
        check_destination(path)
        partial.rename(path)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return description


def check_destination(path: str | os.PathLike) -> None:
    """UserError unless a new folder can be made at `path`."""
    path = Path(os.path.abspath(path))
    if os.path.lexists(path):
        raise UserError(f"{path} exists already; choose another name or remove it first")
    if not path.parent.is_dir():
        raise UserError(f"{path} cannot be made: the folder {path.parent} does not exist")


def read_description(path: str | os.PathLike) -> dict[str, Any]:
    """The content of a checkpoint's config.json with "config" as the kind's dataclass."""
    path = Path(os.path.abspath(path))
    if not path.is_dir():
        problem = "is a file" if path.exists() else "does not exist"
        raise UserError(f"{path} {problem}; a checkpoint is a folder made by cspd-jax convert or train")
    file = path / "config.json"
    try:
        description = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path} is not a checkpoint: it has no config.json") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{file} is not readable JSON ({error})") from None
    if not isinstance(description, dict):
        raise UserError(f"{file} must hold a JSON object")
    _check_version(description.get("format_version"), file)
    kind = get_kind(description.get("kind"), str(file))
    if not (path / "params").is_dir() and not (path / SINGLE_FILE).is_file():
        raise UserError(f"{path} is not a complete checkpoint: it has no folder params")
    return {**description, "config": read_config(kind, description.get("config"), str(file))}


def _check_version(version: Any, file: Path) -> None:
    if type(version) is not int or version < 1:
        raise UserError(f"{file}: format_version is {version!r}; it must be {FORMAT_VERSION}")
    if version > FORMAT_VERSION:
        raise UserError(
            f"{file} has format version {version}, but this version of cspd-jax reads up to {FORMAT_VERSION};"
            " upgrade cspd-jax"
        )


def load(path: str | os.PathLike, dtype: Any = None) -> Checkpoint:
    """Reads a checkpoint folder; its parameters become jax arrays, cast to `dtype` if that is given."""
    path = Path(os.path.abspath(path))
    description = read_description(path)
    config, kind = description.pop("config"), description.pop("kind")
    abstract = describe_params(get_kind(kind, str(path)), config, str(path))
    if (path / SINGLE_FILE).is_file():
        params = _single.read(path / SINGLE_FILE, abstract, dtype)
    else:
        params = _params.read(path / "params", abstract, dtype)
    return Checkpoint(kind, config, params, description)
