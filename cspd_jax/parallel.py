"""Many devices: a mesh with a data axis (images, rows) and a model axis (heads, widths,
vocabulary).

JAX's own runtime does the work. A model is placed on a mesh by `place`; rows are spread
over the data axis by `spread`, inside which every group of devices runs by itself and
waits for no other.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from chex import ArrayTree
from jax.experimental.multihost_utils import sync_global_devices
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from cspd_jax.check import UserError
from cspd_jax.info import Calls

Array = jax.Array

DATA = "data"
MODEL = "model"


def parse_mesh(text: str) -> dict[str, int]:
    """Reads "data=4,model=2" as {"data": 4, "model": 2}; an axis that is left out has
    one device."""
    try:
        sizes = {
            name.strip(): int(size)
            for name, size in (part.split("=") for part in text.split(","))
        }
    except ValueError:
        sizes = {}
    if not sizes or sizes.keys() - {DATA, MODEL} or min(sizes.values()) < 1:
        raise UserError(
            f"mesh {text!r} names no devices per axis, as data=4,model=2 does"
        )
    return {DATA: 1, MODEL: 1, **sizes}


def make_mesh(
    sizes: str | Mapping[str, int], devices: Sequence[jax.Device] | None = None
) -> Mesh:
    """Makes a mesh of these sizes, whose product must be the number of devices
    (default: all devices of all processes)."""
    sizes = (
        parse_mesh(sizes) if isinstance(sizes, str) else {DATA: 1, MODEL: 1, **sizes}
    )
    devices = jax.devices() if devices is None else devices
    wanted = math.prod(sizes.values())
    if wanted != len(devices):
        axes = ",".join(f"{name}={size}" for name, size in sizes.items())
        raise UserError(
            f"mesh {axes} is of {wanted} devices, but there are {len(devices)}; the"
            " sizes multiplied must be that number"
        )
    shape = sizes[DATA], sizes[MODEL]
    return jax.make_mesh(
        shape, (DATA, MODEL), axis_types=(AxisType.Auto,) * 2, devices=devices
    )


def default_mesh(
    sizes: str | None = None, devices: Sequence[jax.Device] | None = None
) -> Mesh | None:
    """Makes a mesh of the devices (default: all of all processes), all on the data axis
    unless told; None for a single device."""
    devices = jax.devices() if devices is None else devices
    if sizes is None and len(devices) == 1:
        return None
    return make_mesh({DATA: len(devices)} if sizes is None else sizes, devices)


def common_mesh(*models: object) -> Mesh | None:
    """Returns the mesh that models lie on; UserError if they lie on different ones.
    What has no mesh of its own, such as a drafter without parameters, is left out."""
    meshes = {model.mesh for model in models if hasattr(model, "mesh")}
    if len(meshes) > 1:
        raise UserError(
            "the models lie on different devices; load all of them with the same mesh"
        )
    return meshes.pop() if meshes else None


_INPUTS = 0
_OUTPUTS = 1
_FEATURES = 1

# (the end of a parameter's path, the axis that is cut)
_HEADS = (
    (r"attention/[qkv]/kernel", _OUTPUTS),
    (r"attention/[qkv]/bias", 0),
)
_WITHOUT_HEADS = ((r"attention/[qkv]/kernel", _INPUTS),)
_RULES = (
    # Language models.
    (r"attention/out/kernel", _INPUTS),
    (r"mlp/(up|gate)/kernel", _OUTPUTS),
    (r"mlp/(up|gate)/bias", 0),
    (r"mlp/down/kernel", _INPUTS),
    (r"embed/embedding", _FEATURES),
    (r"head/kernel", _INPUTS),
    (r"image_out_projector/kernel", _INPUTS),
    # MAR.
    (r"attn/(qkv|proj)/kernel", _INPUTS),
    (r"mlp/fc1/kernel", _OUTPUTS),
    (r"mlp/fc1/bias", 0),
    (r"mlp/fc2/kernel", _INPUTS),
    (r"res_blocks_\d+/mlp_0/kernel", _OUTPUTS),
    (r"res_blocks_\d+/mlp_0/bias", 0),
    (r"res_blocks_\d+/mlp_2/kernel", _INPUTS),
    (r"res_blocks_\d+/adaLN_modulation_1/kernel", _INPUTS),
)


def partition(
    path: str, shape: tuple[int, ...], devices: int, config: object = None
) -> PartitionSpec:
    """Says how the parameter at `path` ("layers_0/mlp/up/kernel") is cut for so many
    devices.

    config: of the network; a language model's heads are shared out only if their number
        can be.
    """
    kv_heads = getattr(config, "kv_heads", 0)
    for pattern, axis in (*(_WITHOUT_HEADS if kv_heads % devices else _HEADS), *_RULES):
        if (
            re.fullmatch(rf"(.*/)?{pattern}", path)
            and devices > 1
            and shape[axis] % devices == 0
        ):
            return PartitionSpec(*[None] * axis, MODEL)
    return PartitionSpec()


def shardings(mesh: Mesh, params: ArrayTree, config: object = None) -> Any:
    """Returns the sharding of every parameter of a tree (of arrays or of their shapes):
    cut along the model axis by its name, whole along the data axis. config: of the
    network."""

    def of(path, leaf) -> NamedSharding:
        return sharding(
            mesh,
            tuple(str(getattr(entry, "key", entry)) for entry in path),
            leaf.shape,
            config,
        )

    return jax.tree_util.tree_map_with_path(of, params)


def sharding(
    mesh: Mesh, path: tuple[str, ...], shape: tuple[int, ...], config: object = None
) -> NamedSharding:
    """Returns the sharding of the parameter at `path`."""
    return NamedSharding(
        mesh, partition("/".join(path), tuple(shape), mesh.shape[MODEL], config)
    )


def place(mesh: Mesh, params: ArrayTree, config: object = None) -> ArrayTree:
    """Places parameters, which every process must have whole, so that each device holds
    its share."""
    return jax.tree.map(put, params, shardings(mesh, params, config))


def replicate(mesh: Mesh, tree: ArrayTree) -> ArrayTree:
    """Puts numbers and arrays that every process has on every device, whole; those
    already on the mesh stay."""

    def on_mesh(array: Any) -> jax.Array:
        array = array if hasattr(array, "shape") else jnp.asarray(array)
        return (
            array
            if getattr(getattr(array, "sharding", None), "mesh", None) == mesh
            else put(array, whole)
        )

    whole = NamedSharding(mesh, PartitionSpec())
    return jax.tree.map(on_mesh, tree)


def put(array: Any, sharding: NamedSharding) -> jax.Array:
    """Spreads an array that every process has whole; each copies only what its devices
    hold."""
    if sharding.is_fully_addressable:
        return jax.device_put(array, sharding)
    if jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(
            put(jax.random.key_data(array), sharding), impl=jax.random.key_impl(array)
        )
    return jax.make_array_from_callback(array.shape, sharding, array.__getitem__)


@contextlib.contextmanager
def first_alone(what: str) -> Iterator[None]:
    """Has the first process run the block before the others do, who then find on disk
    what it left there."""
    if jax.process_index() > 0:
        sync_global_devices(what)
    yield
    if jax.process_index() == 0:
        sync_global_devices(what)


def spread(
    function: Callable[[ArrayTree, ArrayTree], ArrayTree],
    mesh: Mesh,
    rows: ArrayTree,
    shared: ArrayTree,
) -> ArrayTree:
    """Returns function(rows, shared), with the rows spread over the data axis. Inside
    `jit` only.

    Each group of devices along the data axis runs the function on its own rows, with
    its own loops, and no message passes between groups. Within a group the compiler
    divides the work as `shared` is placed along the model axis.

    rows: a pytree of arrays [N, ...]; the last one is repeated until the groups share
        them evenly.
    shared: a pytree of arrays that all groups use.

    What the function returns is by row, [rows, ...], but for its `Calls`. Groups make
    theirs at the same time, so those in sequence are the ones of the group that made
    most. What comes out is whole everywhere.
    """
    count = len(jax.tree.leaves(rows)[0])
    groups = mesh.shape[DATA]
    index = jnp.minimum(jnp.arange(-(-count // groups) * groups), count - 1)
    is_calls = lambda node: isinstance(node, Calls)
    join = lambda calls: Calls(
        jnp.max(calls.sequential), jnp.sum(calls.rows, dtype=calls.rows.dtype)
    )

    def each(
        of_calls: Callable[[Calls], Calls],
        of_rows: Callable[[Array], Array],
        tree: ArrayTree,
    ) -> ArrayTree:
        one = lambda node: of_calls(node) if is_calls(node) else of_rows(node)
        return jax.tree.map(one, tree, is_leaf=is_calls)

    apart = lambda calls: Calls(calls.sequential[None], calls.rows[None])

    def by_group(rows, shared):
        return each(apart, lambda a: a, function(rows, shared))

    split = PartitionSpec(DATA)
    whole = PartitionSpec()
    results = jax.shard_map(
        by_group,
        mesh=mesh,
        in_specs=(split, whole),
        out_specs=split,
        axis_names={DATA},
        check_vma=False,
    )(jax.tree.map(lambda a: a[index], rows), shared)
    joined = each(join, lambda a: a[:count], results)
    return jax.lax.with_sharding_constraint(joined, NamedSharding(mesh, whole))
