"""Checkpoint folders: `config.json` and the parameters, in `params/` (Orbax) or `params.safetensors`.

A folder is written beside its final name and renamed, so a folder with that name is always complete. The kind
of a checkpoint determines the class of its configuration and its network.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import ml_dtypes
import numpy as np
from jax.sharding import Mesh

from cspd_jax._utils.files import as_path, check_writable, not_a_folder, write_errors, written_beside
from cspd_jax._utils.json_files import read_object
from cspd_jax._utils.limits import is_there
from cspd_jax._utils.typed import read_fields
from cspd_jax.errors import UserError, check_whole, naming, shown
from cspd_jax.networks import autoencoder, eagle, inception, lm, sphere_vae
from cspd_jax.networks.config import FluxConfig, KLConfig, MARConfig, SphereConfig
from cspd_jax.networks.eagle_config import EagleConfig
from cspd_jax.networks.lm_config import LMConfig
from cspd_jax.networks.nextstep_config import NextStepConfig
from cspd_jax.networks.registry import IMAGE_KINDS
from cspd_jax.networks.sphere_config import SphereVAEConfig
from cspd_jax.parallel import shardings
from cspd_jax.weights import parameters

FORMAT_VERSION = 1
SINGLE_FILE = "params.safetensors"
DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}


_DTYPES = ("float32", "bfloat16", "float16", "float64", "mixed")
_METADATA = (
    ("source", str, "a string"),
    ("source_sha256", str, "a string"),
    ("params_sha256", str, "a string"),
    ("extra", dict, "an object"),
)


class Kind(NamedTuple):
    """A kind of network.

    config_class: a frozen dataclass.
    abstract_params: config -> nested dict of ShapeDtypeStruct.
    """

    config_class: type
    abstract_params: Callable[[Any], Any]


_KINDS: dict[str, Kind] = {
    **{name: Kind(kind.config_class, kind.abstract_params) for name, kind in IMAGE_KINDS.items()},
    "kl16": Kind(KLConfig, autoencoder.abstract_params),
    "flux": Kind(FluxConfig, autoencoder.abstract_params),
    "svae": Kind(SphereVAEConfig, sphere_vae.abstract_params),
    "inception": Kind(inception.InceptionConfig, inception.abstract_params),
    "lm": Kind(LMConfig, lm.abstract_params),
    "eagle": Kind(EagleConfig, eagle.abstract_params),
}


class Checkpoint(NamedTuple):
    """What a checkpoint folder holds.

    kind: the name of the kind.
    config: the kind's frozen dataclass.
    params: nested dict of arrays.
    metadata: the rest of config.json: dtype, params (their number), source, extra, ...
    """

    kind: str
    config: Any
    params: Any
    metadata: dict[str, Any]


def save(
    path: str | os.PathLike,
    kind: str,
    config: Any,
    params: Mapping,
    *,
    source: str | tuple[str, str] | None = None,
    extra: Mapping[str, Any] | None = None,
    single_file: bool = False,
    companions: Mapping[str, Path] | None = None,
) -> dict[str, Any]:
    """Writes a new checkpoint folder, all or nothing, and returns the content of its config.json.

    params: keep their dtype.
    source: where the parameters come from; of a file also its digest.
    extra: anything JSON can hold.
    single_file: store the parameters in one safetensors file instead of Orbax's many.
    companions: files to copy as they are, such as a tokenizer's: place in the folder -> file.
    """
    path = Path(os.path.abspath(as_path(path)))
    check_destination(path)
    parameters.check(params, describe_params(get_kind(kind, str(path)), config, str(path)), str(path))
    name, digest = source if isinstance(source, tuple) else (source, None)
    description = {
        "format_version": FORMAT_VERSION,
        "kind": kind,
        "config": dataclasses.asdict(config),
        "dtype": parameters.common_dtype(params),
        "params": sum(int(leaf.size) for leaf in jax.tree.leaves(params)),
        "params_sha256": parameters.digest(params),
        "source": name,
        "source_sha256": digest,
        "extra": dict(extra or {}),
    }
    try:
        text = json.dumps(description, indent=2) + "\n"
    except (TypeError, ValueError) as error:
        raise UserError(f"extra cannot be written as JSON ({error})") from None
    with write_errors(path), written_beside(path) as partial:
        partial.mkdir()
        if single_file:
            parameters.write_file(partial / SINGLE_FILE, params)
        else:
            parameters.write(partial / "params", params)
        (partial / "config.json").write_text(text, encoding="utf-8")
        for place, file in (companions or {}).items():
            (partial / place).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, partial / place)
        check_destination(path)
    return description


def check_destination(path: str | os.PathLike) -> None:
    """UserError unless a new folder can be made at `path`."""
    path = Path(os.path.abspath(as_path(path, "the new folder")))
    if os.path.lexists(path):
        raise UserError(f"{path} exists already; choose another name or remove it first")
    if not path.parent.is_dir():
        raise UserError(f"{path} cannot be made: {path.parent} {not_a_folder(path.parent)}")
    check_writable(path)


def read_description(path: str | os.PathLike) -> dict[str, Any]:
    """The content of a checkpoint's config.json, with "config" as the kind's dataclass."""
    path = Path(os.path.abspath(as_path(path)))
    if not path.is_dir():
        problem = "is a file" if path.exists() else "does not exist"
        raise UserError(f"{path} {problem}; a checkpoint is a folder made by cspd-jax convert or train")
    file = path / "config.json"
    if not os.path.lexists(file):
        if (path / "report.json").is_file():
            raise UserError(f"{path} is a folder of results, described by its report.json, not a checkpoint")
        raise UserError(f"{path} is not a checkpoint: it has no config.json")
    description = read_object(file)
    if "format_version" not in description and (path / "model").is_dir():
        raise UserError(f"{path} is the folder of a training run; its model is {path / 'model'}")
    if "format_version" not in description and {"model_type", "architectures"} & description.keys():
        raise UserError(
            f"{path} is a folder of Hugging Face's; turn it into a checkpoint by cspd-jax convert"
        )
    _check_version(description.get("format_version"), file)
    kind = get_kind(description.get("kind"), str(file))
    if not (path / "params").is_dir() and not is_there(path / SINGLE_FILE):
        raise UserError(
            f"{path} is not a complete checkpoint: it has neither {SINGLE_FILE} nor a folder params"
        )
    config = read_config(kind, description.get("config"), str(file))
    with naming(file):
        check_whole("params", description.get("params", 1), 1)
        if description.get("dtype") not in (None, *_DTYPES):
            raise UserError(f"dtype is {shown(description['dtype'])}; it must be one of {', '.join(_DTYPES)}")
        for name, type_, told in _METADATA:
            if not isinstance(description.get(name), type_ | None):
                raise UserError(f"{name} is {shown(description[name])}; it must be {told}")
    _check_depth(config, parameters.count(_stored(path)), path)
    return {**description, "config": config}


def _stored(path: Path) -> Path:
    """Where a checkpoint folder has its parameters."""
    single = path / SINGLE_FILE
    return single if single.is_file() else path / "params"


def _check_version(version: Any, file: Path) -> None:
    if type(version) is not int or version < 1:
        raise UserError(f"{file}: format_version is {shown(version)}; it must be {FORMAT_VERSION}")
    if version > FORMAT_VERSION:
        raise UserError(
            f"{file} has format version {shown(version)}, but this version of cspd-jax reads up to"
            f" {FORMAT_VERSION}; upgrade cspd-jax"
        )


def load(path: str | os.PathLike, dtype: Any = None, mesh: Mesh | None = None) -> Checkpoint:
    """Reads a checkpoint folder; its parameters become jax arrays, cast to `dtype` if given.

    mesh: the devices they are spread over. Each process then reads what its devices hold, if that is not
    everything, and the sum of all parameters is not verified.
    """
    path = Path(os.path.abspath(as_path(path)))
    dtype = None if dtype is None else parameters.as_floats(dtype)
    description = read_description(path)
    config, kind = description.pop("config"), description.pop("kind")
    file = _stored(path)
    abstract = describe_params(get_kind(kind, str(path)), config, str(path))
    placed = None if mesh is None else shardings(mesh, abstract, config)
    read = parameters.read_file if file.is_file() else parameters.read
    params = read(file, abstract, dtype, description.get("params_sha256"), placed)
    return Checkpoint(kind, config, params, description)


def _check_depth(config: Any, stored: int, path: Path) -> None:
    """UserError if there are fewer parameters than blocks. To describe a network takes time for each block,
    so this comes before; whether names and shapes fit is checked after."""
    deep = MARConfig | SphereConfig | NextStepConfig | KLConfig | SphereVAEConfig | LMConfig
    if isinstance(config, deep) and config.blocks > stored:
        raise UserError(
            f"{path} has {stored} parameters, too few for the {config.blocks} blocks that its config"
            " describes"
        )


def get_kind(name: Any, where: str) -> Kind:
    """The kind called `name`; `where` names the file in the error message."""
    if not isinstance(name, str) or name not in _KINDS:
        raise UserError(
            f"{where} is of the unknown kind {shown(name)}; known kinds are {', '.join(sorted(_KINDS))}"
        )
    return _KINDS[name]


def kind_with(config: Any) -> Kind | None:
    """The kind of network that has such a configuration; None for your own."""
    return next((kind for kind in _KINDS.values() if type(config) is kind.config_class), None)


def read_config(kind: Kind, values: Any, where: str):
    """A JSON object -> the kind's configuration; it must have exactly its fields, with their types."""
    fields = read_fields(kind.config_class, values, f"{where}: config")
    with naming(where):
        return kind.config_class(**fields)


def describe_params(kind: Kind, config: Any, where: str):
    """The kind's abstract parameters for a configuration that may be nonsense."""
    try:
        return kind.abstract_params(config)
    except UserError:
        raise
    except Exception as error:  # whatever the network stumbles over
        raise UserError(f"{where}: config describes no possible network ({error})") from error
