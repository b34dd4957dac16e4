"""Parameters on a mesh."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from cspd_jax.errors import UserError
from cspd_jax.parallel.mesh import MODEL, check_mesh
from cspd_jax.parallel.rules import partition


def shardings(mesh: Mesh, params: Any, config: Any = None) -> Any:
    """The sharding of every parameter of a tree (of arrays or of their shapes): cut along the model axis by
    `rules`, whole along the data axis. config: of the network."""
    _check(mesh, params)

    def of(path, leaf) -> NamedSharding:
        return sharding(mesh, tuple(str(getattr(entry, "key", entry)) for entry in path), leaf.shape, config)

    return jax.tree_util.tree_map_with_path(of, params)


def sharding(mesh: Mesh, path: tuple[str, ...], shape: tuple[int, ...], config: Any = None) -> NamedSharding:
    """The sharding of the parameter at `path`."""
    return NamedSharding(mesh, partition("/".join(path), tuple(shape), mesh.shape[MODEL], config))


def place(mesh: Mesh, params: Any, config: Any = None) -> Any:
    """The parameters, each device holding its share. Every process must have them whole."""
    return jax.tree.map(put, params, shardings(mesh, params, config))


def replicate(mesh: Mesh, tree: Any) -> Any:
    """A pytree of arrays that every process has, whole on every device; those already on the mesh stay."""
    _check(mesh, tree)

    def on_mesh(array: Any) -> jax.Array:
        return array if getattr(getattr(array, "sharding", None), "mesh", None) == mesh else put(array, whole)

    whole = NamedSharding(mesh, PartitionSpec())
    return jax.tree.map(on_mesh, tree)


def _check(mesh: Any, tree: Any) -> None:
    check_mesh(mesh)
    if not all(hasattr(leaf, "shape") for leaf in jax.tree.leaves(tree)):
        raise UserError("what is to be placed on devices is not all arrays")


def put(array: Any, sharding: NamedSharding) -> jax.Array:
    """An array that every process has whole, spread by `sharding`; each copies only what its devices hold."""
    if sharding.is_fully_addressable:
        return jax.device_put(array, sharding)
    if jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key):
        data = put(jax.random.key_data(array), sharding)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(array))
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])
