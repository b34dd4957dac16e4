"""Checkpoint folders, which hold `config.json` and the parameters in
`params.safetensors`.

A folder is written under another name and then renamed, so that a folder with its final
name is always complete. The kind of a checkpoint determines the class of its
configuration and its network.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
from chex import ArrayTree
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import Mesh
from jax.typing import DTypeLike
from safetensors.numpy import save_file

from cspd_jax._utils.files import check_new_folder, read_object, written_beside
from cspd_jax.check import UserError, naming, shown
from cspd_jax.converters._tables import check_shapes
from cspd_jax.networks import autoencoder, eagle, inception, lm, sphere_vae
from cspd_jax.networks.registry import IMAGE_KINDS, ImageKind
from cspd_jax.parallel import sharding

FORMAT_VERSION = 1
FILE = "params.safetensors"


class Kind(NamedTuple):
    """A kind of network.

    config_class: the class of its configurations, a frozen dataclass.
    abstract_params: maps a config to a nested dict of ShapeDtypeStruct.
    """

    config_class: type
    abstract_params: Callable[..., ArrayTree]


_KINDS: dict[str, Kind | ImageKind] = {
    **IMAGE_KINDS,
    "kl16": Kind(autoencoder.KLConfig, autoencoder.abstract_params),
    "flux": Kind(autoencoder.FluxConfig, autoencoder.abstract_params),
    "svae": Kind(sphere_vae.SphereVAEConfig, sphere_vae.abstract_params),
    "inception": Kind(inception.InceptionConfig, inception.abstract_params),
    "lm": Kind(lm.LMConfig, lm.abstract_params),
    "eagle": Kind(eagle.EagleConfig, eagle.abstract_params),
}


class Checkpoint(NamedTuple):
    """The content of a checkpoint folder.

    kind: the name of the kind.
    config: the configuration, a frozen dataclass of the kind.
    params: the parameters, a nested dict of arrays.
    metadata: the rest of config.json: dtype, params (the number of parameters), source,
        extra, ...
    """

    kind: str
    config: Any
    params: ArrayTree
    metadata: dict[str, Any]


def save(
    path: str | os.PathLike,
    kind: str,
    config: Any,
    params: Mapping,
    *,
    source: str | tuple[str, str] | None = None,
    extra: Mapping[str, object] | None = None,
    companions: Mapping[str, Path] | None = None,
) -> dict[str, object]:
    """Writes a new checkpoint folder, all or nothing, and returns the content of its
    config.json.

    params: the parameters, which keep their dtypes.
    source: the origin of the parameters, or for a file a pair of its name and its
        digest.
    extra: any data that JSON can hold.
    companions: files that are copied unchanged, such as the files of a tokenizer, by
        their places in the folder.
    """
    check_new_folder(path)
    leaves = {
        name: np.asarray(leaf, order="C")
        for name, leaf in flatten_dict(params, sep="/").items()
    }
    wanted = _wanted(leaves, kind, config, path)
    for name, leaf in leaves.items():
        _check_values(leaf, wanted[name].dtype, name, path)
    dtypes = {leaf.dtype.name for leaf in leaves.values()}
    name, source_sha256 = source if isinstance(source, tuple) else (source, None)
    description = {
        "format_version": FORMAT_VERSION,
        "kind": kind,
        "config": dataclasses.asdict(config),
        "dtype": dtypes.pop() if len(dtypes) == 1 else "mixed",
        "params": sum(leaf.size for leaf in leaves.values()),
        "source": name,
        "source_sha256": source_sha256,
        "extra": dict(extra or {}),
    }
    with written_beside(path) as partial:
        partial.mkdir()
        _write(partial / FILE, leaves)
        (partial / "config.json").write_text(
            json.dumps(description, indent=2) + "\n", encoding="utf-8"
        )
        for place, file in (companions or {}).items():
            (partial / place).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, partial / place)
    return description


def load(
    path: str | os.PathLike, dtype: DTypeLike | None = None, mesh: Mesh | None = None
) -> Checkpoint:
    """Reads a checkpoint folder. The parameters become jax arrays, cast to `dtype` if
    it is given.

    mesh: a mesh over whose devices the parameters are spread. Each process then reads
        only the parts that its own devices hold.
    """
    description = read_description(path)
    config = description.pop("config")
    kind = description.pop("kind")
    stored = _stored(Path(path))
    wanted = _wanted(stored, kind, config, path)

    def read(name: str, array: _Stored) -> jax.Array:
        def part(index: Any) -> np.ndarray:
            values = array.read(index)
            _check_values(values, wanted[name].dtype, name, path)
            casts = dtype is not None and jnp.issubdtype(values.dtype, jnp.floating)
            return values.astype(dtype) if casts else values

        if mesh is None:
            return jnp.asarray(part(...))
        placed = sharding(mesh, name, array.shape, config)
        if placed.is_fully_addressable:
            return jax.device_put(part(...), placed)
        return jax.make_array_from_callback(array.shape, placed, part)

    leaves = {name: read(name, array) for name, array in stored.items()}
    return Checkpoint(kind, config, unflatten_dict(leaves, sep="/"), description)


def read_description(path: str | os.PathLike) -> dict[str, Any]:
    """Returns the content of a checkpoint's config.json, with "config" as a dataclass
    of the kind."""
    path = Path(path)
    file = path / "config.json"
    if not file.is_file():
        raise UserError(
            f"{path} is not a checkpoint, which is a folder with config.json and {FILE}"
        )
    description = read_object(file)
    if "format_version" not in description and "begun_with" in description:
        model = path / "model"
        raise UserError(
            f"{path} is the folder of a training run; "
            + (
                f"its model is {model}"
                if model.is_dir()
                else "it has not ended; give its command again, and it goes on"
            )
        )
    if (version := description.get("format_version")) != FORMAT_VERSION:
        raise UserError(
            f"{file} has format version {shown(version)}; this cspd-jax reads"
            f" {FORMAT_VERSION}"
        )
    config_class = _kind(description.get("kind"), file).config_class
    return {
        **description,
        "config": read_config(
            config_class, description.get("config"), f"{file}: config"
        ),
    }


def read_config(cls: type, values: object, where: str) -> Any:
    """Returns the frozen dataclass that a JSON object describes. A field that a file
    does not have yet takes its default."""
    values = values if isinstance(values, Mapping) else {}
    hints = typing.get_type_hints(cls)
    missing = [
        field.name
        for field in dataclasses.fields(cls)
        if field.default is dataclasses.MISSING and field.name not in values
    ]
    unknown = sorted(values.keys() - hints.keys())
    if missing or unknown:
        raise UserError(
            f"{where} does not describe a {cls.__name__}: missing {missing}, unknown"
            f" {unknown}"
        )

    def field(name: str, value: object) -> object:
        if dataclasses.is_dataclass(hints[name]):
            return read_config(hints[name], value, f"{where} field {name}")
        return tuple(value) if isinstance(value, list) else value

    with naming(where):
        return cls(**{name: field(name, value) for name, value in values.items()})


def _kind(name: object, where: str | os.PathLike) -> Kind | ImageKind:
    if name not in _KINDS:
        raise UserError(
            f"{where} is of the unknown kind {shown(name)}; known are"
            f" {', '.join(_KINDS)}"
        )
    return _KINDS[name]


def _write(file: Path, leaves: dict[str, np.ndarray]) -> None:
    file.touch()
    mode = file.stat().st_mode  # save_file would let only the owner read
    save_file(leaves, file)
    file.chmod(mode)


class _Stored(NamedTuple):
    """A parameter on disk.

    shape: the shape of the parameter.
    read: maps an index, which is `...` for the whole parameter, to the numbers at the
        index.
    """

    shape: tuple[int, ...]
    read: Callable[[Any], np.ndarray]


def _stored(path: Path) -> dict[str, _Stored]:
    """Returns the parameters of a checkpoint by their paths in the tree. This reads no
    numbers yet."""
    try:
        file = safetensors.safe_open(path / FILE, framework="np")
    except safetensors.SafetensorError as error:
        raise UserError(
            f"{path / FILE} is not a complete safetensors file ({error})"
        ) from None
    slices = {name: file.get_slice(name) for name in sorted(file.keys())}
    return {
        name: _Stored(tuple(found.get_shape()), found.__getitem__)
        for name, found in slices.items()
    }


def _wanted(
    found: Mapping[str, Any], kind: str, config: Any, where: str | os.PathLike
) -> dict[str, Any]:
    """Returns the network's parameters by name, as shapes and types. Raises a UserError
    unless the arrays have their names and shapes."""
    wanted = flatten_dict(_kind(kind, where).abstract_params(config), sep="/")
    shapes_of = lambda arrays: {
        name: tuple(array.shape) for name, array in arrays.items()
    }
    with naming(where):
        check_shapes(shapes_of(found), shapes_of(wanted))
    return wanted


def _check_values(
    values: np.ndarray, wanted: DTypeLike, name: str, where: str | os.PathLike
) -> None:
    """Raises a UserError if the values are whole numbers where the network has
    floating-point numbers or the other way round, or not finite."""
    floating = jnp.issubdtype(values.dtype, jnp.floating)
    if floating != jnp.issubdtype(wanted, jnp.floating):
        raise UserError(
            f"{where}: parameter {name} is stored as {values.dtype}, and is {wanted} in"
            " the network"
        )
    if floating and not np.isfinite(values).all():
        raise UserError(f"{where}: parameter {name} holds NaN or infinity")
