"""Parameter trees on disk, checked against the network they belong to.

Checkpoints are written by Orbax, which makes two files per parameter, one of them hidden. Wheels leave hidden
files out, so the small models inside the package are single safetensors files.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import safetensors
from safetensors import flax as arrays

from cspd_jax.errors import UserError

_CONCURRENT_BYTES = 256 * 2**20
_LISTED = 5
_SEPARATOR = "/"


def write(path: Path, params: Mapping) -> None:
    """Writes the tree to the new folder `path`, holding at most one copy of a few leaves at a time."""
    leaves = jax.tree.leaves(params)
    # Orbax refuses a leaf larger than its budget and otherwise copies the whole tree before writing.
    budget = max(_CONCURRENT_BYTES, 2 * max((leaf.nbytes for leaf in leaves), default=0))
    registry = ocp.type_handlers.create_type_handler_registry(
        (jax.Array, ocp.type_handlers.ArrayHandler()),
        (np.ndarray, _numpy_handler()),
    )
    handler = ocp.PyTreeCheckpointHandler(
        save_concurrent_gb=budget / 1e9, use_ocdbt=False, type_handler_registry=registry
    )
    with _quiet(), ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(path, args=ocp.args.PyTreeSave(jax.tree.map(np.asarray, params)))


def _numpy_handler():
    try:
        return ocp.type_handlers.NumpyHandler(deepcopy_host_arrays=False)
    except TypeError:  # older Orbax always copies
        return ocp.type_handlers.NumpyHandler()


@contextlib.contextmanager
def _quiet():
    """Silences Orbax's warning about OCDBT, which is not used here."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def read(path: Path, abstract: Mapping, dtype: Any = None) -> dict:
    """The tree at `path` as jax arrays; UserError unless it has exactly the abstract tree's leaves."""
    try:
        with _quiet(), ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            stored = _tree_metadata(checkpointer.metadata(path))
            check_shapes(stored, abstract, str(path))
            as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), abstract)
            params = checkpointer.restore(path, args=ocp.args.PyTreeRestore(abstract, restore_args=as_numpy))
    except UserError:
        raise
    except Exception as error:  # Orbax and TensorStore raise many types for damaged files
        reason = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        raise UserError(f"{path} cannot be read as Orbax parameters ({reason})") from error
    check_finite(params, str(path))
    return jax.tree.map(lambda leaf: _to_jax(leaf, dtype), params)


def _tree_metadata(metadata: Any) -> Mapping:
    """The tree of leaf descriptions, wherever this Orbax version keeps it."""
    for name in ("item_metadata", "tree"):
        metadata = getattr(metadata, name, metadata)
    if not isinstance(metadata, Mapping):
        raise ValueError("no description of the stored tree")
    return metadata


def _to_jax(leaf: np.ndarray, dtype: Any) -> jax.Array:
    if dtype is not None and jnp.issubdtype(leaf.dtype, jnp.floating):
        leaf = leaf.astype(dtype)
    return jnp.asarray(leaf)


def write_file(path: Path, params: Mapping) -> None:
    """Writes the tree to the new safetensors file `path`; the name of a parameter is its path in the tree."""
    leaves = {_SEPARATOR.join(keys): jnp.asarray(leaf) for keys, leaf in _flatten(params)}
    path.write_bytes(arrays.save(leaves))  # save_file would make it readable by its owner only


def read_file(path: Path, abstract: Mapping, dtype: Any = None) -> dict:
    """The tree in the safetensors file `path`, like `read`."""
    try:
        leaves = arrays.load_file(path)
    except (safetensors.SafetensorError, OSError, ValueError, KeyError) as error:
        raise UserError(f"{path} is not a readable safetensors file ({error})") from error
    params = _nest(leaves)
    check(params, abstract, str(path))
    if dtype is None:
        return params
    return jax.tree.map(lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, params)


def check(params: Mapping, abstract: Mapping, where: str) -> None:
    """UserError unless `params` have the network's leaves and shapes and are finite."""
    check_shapes(params, abstract, where)
    check_finite(params, where)


def check_shapes(params: Mapping, abstract: Mapping, where: str) -> None:
    """UserError unless `params` have the leaves and shapes of the abstract tree."""
    have, want = (
        {path: tuple(leaf.shape) for path, leaf in _named_leaves(tree)} for tree in (params, abstract)
    )
    problems = [f"missing {path}" for path in want if path not in have]
    problems += [f"unknown {path}" for path in have if path not in want]
    problems += [
        f"{path} is {list(have[path])} instead of {list(want[path])}"
        for path in want
        if path in have and have[path] != want[path]
    ]
    if problems:
        more = f" and {len(problems) - _LISTED} more" if len(problems) > _LISTED else ""
        raise UserError(
            f"{where}: the parameters do not fit the network: {'; '.join(problems[:_LISTED])}{more}"
        )


def check_finite(params: Mapping, where: str) -> None:
    """UserError if a parameter holds NaN or infinity."""
    for path, leaf in _named_leaves(params):
        array = np.asarray(leaf)
        if jnp.issubdtype(array.dtype, jnp.floating) and not np.isfinite(array).all():
            raise UserError(f"{where}: parameter {path} holds NaN or infinity")


def common_dtype(params: Mapping) -> str:
    """The dtype of all leaves, or "mixed"."""
    names = {str(leaf.dtype) for leaf in jax.tree.leaves(params)}
    return names.pop() if len(names) == 1 else "mixed"


def _named_leaves(tree: Any, prefix: str = ""):
    for key, value in tree.items():
        path = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _named_leaves(value, f"{path}/")
        else:
            yield path, value


def _flatten(tree: Mapping, prefix: tuple[str, ...] = ()):
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, (*prefix, key))
        else:
            yield (*prefix, key), value


def _nest(leaves: Mapping[str, Any]) -> dict:
    tree: dict = {}
    for name, leaf in leaves.items():
        *parents, last = name.split(_SEPARATOR)
        node = tree
        for key in parents:
            node = node.setdefault(key, {})
            if not isinstance(node, dict):
                raise UserError(f"parameter {name} lies below another parameter")
        node[last] = leaf
    return tree
