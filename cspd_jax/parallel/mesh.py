"""The mesh: how many devices share the rows, and how many share each model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from cspd_jax.errors import UserError, check_whole, shown

DATA, MODEL = "data", "model"
_LARGEST = 2**20


def parse_mesh(text: str) -> dict[str, int]:
    """ "data=4,model=2" -> {"data": 4, "model": 2}; an axis that is left out has one device."""
    if not isinstance(text, str):
        raise UserError(f"mesh is {shown(text)}; it names devices per axis, for example data=4,model=2")
    sizes = {DATA: 1, MODEL: 1}
    named = set()
    for part in text.split(","):
        name, equals, number = (piece.strip() for piece in part.partition("="))
        known = name in sizes and name not in named and equals
        whole = number.isdecimal() and number.isascii() and len(number) <= 7
        if not known or not whole or not 1 <= int(number) <= _LARGEST:
            raise UserError(
                f"mesh {text!r:.80} is not understood; it names devices per axis, for example data=4,model=2"
            )
        named.add(name)
        sizes[name] = int(number)
    return sizes


def make_mesh(sizes: str | Mapping[str, int], devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh of exactly so many devices (default: all of all processes, which must be as many)."""
    if not isinstance(sizes, str | Mapping) or (not isinstance(sizes, str) and set(sizes) - {DATA, MODEL}):
        raise UserError(f"mesh is {sizes!r:.80}; it gives devices per axis, for example data=4,model=2")
    sizes = parse_mesh(sizes) if isinstance(sizes, str) else {DATA: 1, MODEL: 1, **sizes}
    for axis, size in sizes.items():
        check_whole(f"mesh {axis}", size, 1)
    devices = jax.devices() if devices is None else devices
    if not isinstance(devices, Sequence | np.ndarray) or not all(hasattr(d, "device_kind") for d in devices):
        raise UserError(f"devices is {shown(devices)}; it must be a list of devices such as jax.devices()")
    if len({d.id for d in devices}) < len(devices):
        raise UserError("devices names one device twice")
    wanted = math.prod(sizes.values())
    if wanted != len(devices):
        axes = ",".join(f"{name}={size}" for name, size in sizes.items())
        raise UserError(
            f"mesh {axes} is of {wanted} devices, but there are {len(devices)}; the sizes multiplied must be"
            " that number"
        )
    shape = (sizes[DATA], sizes[MODEL])
    return jax.make_mesh(shape, (DATA, MODEL), axis_types=(AxisType.Auto,) * 2, devices=devices)


def check_mesh(mesh: Any) -> None:
    """UserError unless it is a mesh with both axes."""
    if not isinstance(mesh, Mesh) or set(mesh.axis_names) != {DATA, MODEL}:
        raise UserError(f"mesh is {shown(mesh)}; make one with cspd_jax.parallel.make_mesh")


def default_mesh(sizes: str | None = None, devices: Sequence[Any] | None = None) -> Mesh | None:
    """A mesh of the devices (default: all of all processes), all on the data axis unless told; None for a
    single device."""
    devices = jax.devices() if devices is None else devices
    if sizes is None and len(devices) == 1:
        return None
    return make_mesh({DATA: len(devices)} if sizes is None else sizes, devices)


def common_mesh(*models: Any) -> Mesh | None:
    """The mesh that models lie on (what has no mesh of its own, such as a drafter without parameters, is left
    out); UserError if they lie on different ones."""
    meshes = {getattr(model, "mesh", None) for model in models if hasattr(model, "mesh")}
    if len(meshes) > 1:
        raise UserError("the models lie on different devices; load all of them with the same mesh")
    return meshes.pop() if meshes else None
