"""Many devices: a mesh with a data axis (images, rows) and a model axis (heads, widths,
vocabulary).

JAX's own runtime does the work. `place` puts a model on a mesh. `spread` spreads rows
over the data axis, where every group of devices runs by itself and waits for no other
group.
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


def make_mesh(
    sizes: str | Mapping[str, int], devices: Sequence[jax.Device] | None = None
) -> Mesh:
    """Makes a mesh with these numbers of devices per axis, which are 1 for an axis that
    is left out. Their product must be the number of the given devices (default: all
    devices of all processes). "data=4,model=2" is short for {"data": 4, "model": 2}."""
    if isinstance(sizes, str):
        try:
            named = (part.split("=") for part in sizes.split(","))
            sizes = {name.strip(): int(size) for name, size in named}
        except ValueError:
            raise UserError(
                f"mesh {sizes!r} names no devices per axis, as data=4,model=2 does"
            ) from None
    sizes = {DATA: 1, MODEL: 1, **sizes}
    devices = jax.devices() if devices is None else devices
    numbers = sizes.values()
    fits = math.prod(numbers) == len(devices) and min(numbers) > 0
    if not fits or sizes.keys() - {DATA, MODEL}:
        axes = ",".join(f"{name}={size}" for name, size in sizes.items())
        raise UserError(
            f"mesh {axes} does not divide the {len(devices)} devices; its axes are"
            f" {DATA} and {MODEL}, and the sizes multiplied must be that number"
        )
    shape = sizes[DATA], sizes[MODEL]
    return jax.make_mesh(
        shape, (DATA, MODEL), axis_types=(AxisType.Auto,) * 2, devices=devices
    )


def default_mesh(
    sizes: str | None = None, devices: Sequence[jax.Device] | None = None
) -> Mesh | None:
    """Makes a mesh of the given devices (default: all devices of all processes).
    Without sizes all devices are on the data axis, and the result is None for a single
    device."""
    devices = jax.devices() if devices is None else devices
    if sizes is None and len(devices) == 1:
        return None
    return make_mesh({DATA: len(devices)} if sizes is None else sizes, devices)


def common_mesh(*models: object) -> Mesh | None:
    """Returns the mesh on which the models lie. Raises a UserError if they lie on
    different meshes. An object without a mesh of its own, such as a drafter without
    parameters, is ignored."""
    meshes = {model.mesh for model in models if hasattr(model, "mesh")}
    if len(meshes) > 1:
        raise UserError(
            "the models lie on different devices; load all of them with the same mesh"
        )
    return meshes.pop() if meshes else None


_INPUTS = 0
_OUTPUTS = 1
_FEATURES = 1

# The end of a parameter's path, and the axis that is cut.
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
    """Returns how the parameter at `path` ("layers_0/mlp/up/kernel") is cut for a
    number of devices.

    config: the configuration of the network. The heads of a language model are divided
        among the devices only if the number of devices divides the number of key heads.

    For example, the kernel [K, N] at this path is cut along N for 2 devices, if N is
    even.
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
    """Returns the sharding of every parameter of a tree, which holds arrays or their
    shapes. A parameter is cut along the model axis according to its name, and is whole
    along the data axis.

    config: the configuration of the network.
    """

    def of(path, leaf) -> NamedSharding:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        return sharding(mesh, name, leaf.shape, config)

    return jax.tree_util.tree_map_with_path(of, params)


def sharding(
    mesh: Mesh, path: str, shape: tuple[int, ...], config: object = None
) -> NamedSharding:
    """Returns the sharding of the parameter at `path`, which has this shape."""
    return NamedSharding(mesh, partition(path, shape, mesh.shape[MODEL], config))


def place(mesh: Mesh, params: ArrayTree, config: object = None) -> ArrayTree:
    """Puts parameters on the devices of a mesh, so that each device holds its share.
    Every process must have the whole parameters."""
    return jax.tree.map(put, params, shardings(mesh, params, config))


def replicate(mesh: Mesh, tree: ArrayTree) -> ArrayTree:
    """Copies numbers and arrays, which every process has, to every device of the mesh.
    Arrays that are already on the mesh stay as they are."""

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
    """Spreads an array over devices. Every process has the whole array, and copies only
    the parts that its own devices hold."""
    if sharding.is_fully_addressable:
        return jax.device_put(array, sharding)
    if jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(
            put(jax.random.key_data(array), sharding), impl=jax.random.key_impl(array)
        )
    return jax.make_array_from_callback(array.shape, sharding, array.__getitem__)


@contextlib.contextmanager
def first_alone(what: str) -> Iterator[None]:
    """Lets the first process run the block before the other processes. These then find
    on disk what the first process wrote.

    what: the name of the barrier at which the processes meet.
    """
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
    """Returns function(rows, shared), with the rows spread over the data axis. It must
    be called inside `jit`.

    Each group of devices along the data axis runs the function on its own rows, with
    its own loops, and groups exchange no messages. Within a group the compiler divides
    the work along the model axis, according to the sharding of `shared`.

    rows: a pytree of arrays [N, ...]. The last row is repeated until each group has the
        same number of rows.
    shared: a pytree of arrays that all groups use.

    The function must return arrays by row, [rows, ...], and may return `Calls`. The
    groups make their calls at the same time. So the result has the largest number of
    sequential calls of any group, and the sum of the rows of their calls. Every device
    gets the whole result.

    For example, 5 rows on 2 groups become the rows 0 1 2 and 3 4 4, and the result has
    the first 5 of these 6 rows.
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
