"""Parameter trees on disk, checked against the network they belong to.

Checkpoints are written by Orbax, which makes two files per parameter, one of them hidden. Wheels leave hidden
files out, so the small models inside the package are single safetensors files.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import hashlib
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import safetensors
from jax.sharding import NamedSharding
from safetensors import numpy as arrays

from cspd_jax._utils.json_files import read_object
from cspd_jax.converters.safetensors_file import open_safetensors
from cspd_jax.errors import UserError, shown
from cspd_jax.parallel import put

_CONCURRENT_BYTES = 256 * 2**20
_LISTED = 5
_SEPARATOR = "/"
_FLOATS = ("float16", "bfloat16", "float32", "float64")


def as_floats(dtype: Any) -> np.dtype:
    """A type of parameters; UserError for what no model can be loaded as."""
    try:
        dtype = jnp.dtype(dtype)
    except TypeError:
        raise UserError(f"dtype {dtype!r} is unknown; use float32 or bfloat16") from None
    if dtype.name not in _FLOATS or not dtype.isnative:
        raise UserError(f"dtype {dtype} is none that models run in; use float32 or bfloat16")
    if jax.dtypes.canonicalize_dtype(dtype) != dtype:
        raise UserError(f"dtype {dtype} needs jax.config.update('jax_enable_x64', True) before")
    return dtype


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
    with _quiet(), ocp.Checkpointer(handler, **_by_itself()) as checkpointer:
        checkpointer.save(path, args=ocp.args.PyTreeSave(jax.tree.map(np.asarray, params)))


def _by_itself() -> dict[str, Any]:
    """Of several processes, Orbax otherwise waits for all of them."""
    if jax.process_count() == 1:
        return {}
    index = jax.process_index()
    options = ocp.options.MultiprocessingOptions(
        primary_host=index, active_processes={index}, barrier_sync_key_prefix=f"alone-{index}"
    )
    return {"multiprocessing_options": options}


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


def count(path: Path) -> int:
    """How many parameters are stored in the folder or file `path`; none is read."""
    if path.is_file():
        return len(open_safetensors(path))
    with os.scandir(path) as entries:
        return sum(entry.is_dir() for entry in entries)


def read(
    path: Path, abstract: Mapping, dtype: Any = None, sha256: str | None = None, shardings: Any = None
) -> dict:
    """The tree at `path` as jax arrays; UserError unless it has exactly the abstract tree's leaves.

    sha256: what the `digest` of the stored tree must be, if that is known and the tree is read whole.
    shardings: of the arrays. What is cut is read by each process as far as its devices hold it.
    """
    cut = shardings is not None and not all(s.is_fully_replicated for s in jax.tree.leaves(shardings))
    _check_metadata(path)
    try:
        alone = {} if cut else _by_itself()
        with _quiet(), ocp.Checkpointer(ocp.PyTreeCheckpointHandler(), **alone) as checkpointer:
            stored = _tree_metadata(checkpointer.metadata(path))
            check_shapes(stored, abstract, str(path))
            for place, leaf in _flatten(abstract):
                _check_array(path / ".".join(place), tuple(leaf.shape))
            if cut:
                check_types({name: leaf.dtype for name, leaf in _named_leaves(stored)}, abstract, str(path))
                restored = jax.tree.map(lambda leaf, s: _placed(leaf, s, dtype), abstract, shardings)
            else:
                restored = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), abstract)
            params = checkpointer.restore(path, args=ocp.args.PyTreeRestore(abstract, restore_args=restored))
    except UserError:
        raise
    except Exception as error:  # Orbax and TensorStore raise many types for damaged files
        reason = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        raise UserError(f"{path} cannot be read as Orbax parameters ({reason})") from error
    if cut:
        check_finite(params, str(path))
        return params
    return _accept(params, abstract, str(path), dtype, sha256, shardings)


def _placed(leaf: Any, sharding: NamedSharding, dtype: Any) -> ocp.ArrayRestoreArgs:
    casts = dtype is not None and jnp.issubdtype(leaf.dtype, jnp.floating)
    return ocp.ArrayRestoreArgs(
        restore_type=jax.Array,
        sharding=sharding,
        global_shape=tuple(leaf.shape),
        dtype=dtype if casts else None,
    )


def _check_metadata(path: Path) -> None:
    """UserError if Orbax would read something enormous, or a form that `write` does not use."""
    if (path / "manifest.ocdbt").exists():
        raise UserError(f"{path} is stored as OCDBT, which cspd-jax neither writes nor reads")
    for name in ("_METADATA", "_CHECKPOINT_METADATA"):
        if (path / name).exists():
            read_object(path / name)


def _check_array(folder: Path, shape: tuple[int, ...]) -> None:
    """UserError unless an array's chunks, which TensorStore allocates at once, are no larger than itself."""
    described = read_object(folder / ".zarray")
    chunks = described.get("chunks")
    if (
        not isinstance(chunks, list)
        or len(chunks) != len(shape)
        or any(type(c) is not int or not 1 <= c <= max(n, 1) for c, n in zip(chunks, shape))
    ):
        raise UserError(f"{folder} is stored in chunks {shown(chunks)}, which do not fit its shape {shape}")


def _accept(
    params: dict, abstract: Mapping, where: str, dtype: Any, sha256: str | None, shardings: Any
) -> dict:
    """The numpy arrays that were read, checked, as jax arrays."""
    check_types({name: leaf.dtype for name, leaf in _named_leaves(params)}, abstract, where)
    if sha256 is not None and digest(params) != sha256:
        raise UserError(
            f"{where}: the parameters are not those that were saved (config.json has another params_sha256);"
            " the file is damaged or belongs to another checkpoint, get it again"
        )
    check_finite(params, where)
    if shardings is None:
        return jax.tree.map(lambda leaf: jnp.asarray(_cast(leaf, dtype)), params)
    return jax.tree.map(lambda leaf, sharding: put(_cast(leaf, dtype), sharding), params, shardings)


def digest(params: Mapping) -> str:
    """The SHA-256 of a line for every parameter: its path, dtype, shape and the SHA-256 of its bytes."""

    def line(named: tuple[str, Any]) -> str:
        name, array = named[0], np.ascontiguousarray(named[1])
        content = hashlib.sha256(array.reshape(-1).view(np.uint8).data).hexdigest()
        return f"{name} {array.dtype} {list(np.shape(named[1]))} {content}\n"

    with concurrent.futures.ThreadPoolExecutor() as pool:  # hashing does not hold the interpreter
        lines = pool.map(line, sorted(_named_leaves(params), key=lambda named: named[0]))
        return hashlib.sha256("".join(lines).encode()).hexdigest()


def _tree_metadata(metadata: Any) -> Mapping:
    """The tree of leaf descriptions, wherever this Orbax version keeps it."""
    for name in ("item_metadata", "tree"):
        metadata = getattr(metadata, name, metadata)
    if not isinstance(metadata, Mapping):
        raise ValueError("no description of the stored tree")
    return metadata


def _cast(leaf: np.ndarray, dtype: Any) -> np.ndarray:
    return leaf.astype(dtype) if dtype is not None and jnp.issubdtype(leaf.dtype, jnp.floating) else leaf


def write_file(path: Path, params: Mapping) -> None:
    """Writes the tree to the new safetensors file `path`; the name of a parameter is its path in the tree."""
    leaves = {_SEPARATOR.join(keys): np.ascontiguousarray(leaf) for keys, leaf in _flatten(params)}
    path.write_bytes(arrays.save(leaves))  # save_file would make it readable by its owner only


def read_file(
    path: Path, abstract: Mapping, dtype: Any = None, sha256: str | None = None, shardings: Any = None
) -> dict:
    """The tree in the safetensors file `path`, like `read`."""
    stored = open_safetensors(path)  # their names and shapes; the bytes are read once these are known to fit
    _check_same({name: tensor.shape for name, tensor in stored.items()}, abstract, str(path))
    try:
        leaves = arrays.load_file(path)
    except (safetensors.SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is not a readable safetensors file ({error})") from error
    return _accept(_nest(leaves), abstract, str(path), dtype, sha256, shardings)


def check(params: Mapping, abstract: Mapping, where: str) -> None:
    """UserError unless `params` have the network's leaves and shapes and are finite."""
    check_shapes(params, abstract, where)
    check_types({name: leaf.dtype for name, leaf in _named_leaves(params)}, abstract, where)
    check_finite(params, where)


def check_shapes(params: Mapping, abstract: Mapping, where: str) -> None:
    """UserError unless `params` have the leaves and shapes of the abstract tree."""
    _check_same({path: tuple(leaf.shape) for path, leaf in _named_leaves(params)}, abstract, where)


def _check_same(have: Mapping[str, tuple[int, ...]], abstract: Mapping, where: str) -> None:
    want = {path: tuple(leaf.shape) for path, leaf in _named_leaves(abstract)}
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


def check_types(have: Mapping[str, Any], abstract: Mapping, where: str) -> None:
    """UserError if a parameter is not floating point where that of the network is."""
    for path, leaf in _named_leaves(abstract):
        if jnp.issubdtype(leaf.dtype, jnp.floating) and not jnp.issubdtype(have[path], jnp.floating):
            raise UserError(f"{where}: parameter {path} has type {have[path]}; weights are floating point")


def check_finite(params: Mapping, where: str) -> None:
    """UserError if a parameter holds NaN or infinity."""
    for path, leaf in _named_leaves(params):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            continue
        if not (jnp if isinstance(leaf, jax.Array) else np).isfinite(leaf).all():
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
        node[last] = leaf
    return tree
