"""Parameter trees in one safetensors file, for small models that travel inside a package.

Orbax makes two files per parameter, one of them hidden, which wheels leave out.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import safetensors
from safetensors import flax as arrays

from cspd_jax.checkpoints import _params
from cspd_jax.errors import UserError

SEPARATOR = "/"


def write(path: Path, params: Mapping) -> None:
    """Writes the new file `path`; a parameter is named by its place in the tree."""
    leaves = {SEPARATOR.join(keys): jnp.asarray(leaf) for keys, leaf in _flatten(params)}
    path.write_bytes(arrays.save(leaves))  # save_file would make it readable by its owner only


def read(path: Path, abstract: Mapping, dtype: Any = None) -> dict:
    """The tree at `path` as jax arrays; UserError unless it has exactly the abstract tree's leaves."""
    try:
        leaves = arrays.load_file(path)
    except (safetensors.SafetensorError, OSError, ValueError, KeyError) as error:
        raise UserError(f"{path} is not a readable safetensors file ({error})") from error
    params = _nest(leaves)
    _params.check(params, abstract, str(path))
    if dtype is None:
        return params
    return jax.tree.map(lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, params)


def _flatten(tree: Mapping, prefix: tuple[str, ...] = ()):
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, (*prefix, key))
        else:
            yield (*prefix, key), value


def _nest(leaves: Mapping[str, Any]) -> dict:
    tree: dict = {}
    for name, leaf in leaves.items():
        *parents, last = name.split(SEPARATOR)
        node = tree
        for key in parents:
            node = node.setdefault(key, {})
            if not isinstance(node, dict):
                raise UserError(f"parameter {name} lies below another parameter")
        node[last] = leaf
    return tree
