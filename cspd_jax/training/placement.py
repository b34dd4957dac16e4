"""Where the state and the batches of a run lie: on one device, or spread over a mesh."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from cspd_jax.errors import UserError
from cspd_jax.parallel import DATA, MODEL, default_mesh, processes, put, shardings

_SMALL = 2**10  # numbers; a smaller array is whole on every device


class Placement:
    """The devices of a run.

    Every array of the state is cut along the model axis by its name, and along the data axis where it is
    longest, so that no device holds a whole state. Batches are spread over the data axis. Neither is part of
    what defines a run: it can go on with other devices.
    """

    def __init__(self, batch: int, mesh: Mesh | None = None):
        self.mesh = mesh or default_mesh() or Mesh(np.array(jax.devices()[:1]).reshape(1, 1), (DATA, MODEL))
        if batch % (devices := self.mesh.shape[DATA]):
            raise UserError(f"a batch of {batch} cannot be spread evenly over {devices} devices")

    def of_state(self, state: Any, config: Any = None) -> Any:
        """Returns the sharding of every array of a state. config: of the network."""
        return jax.tree.map(self._cut, state, shardings(self.mesh, state, config))

    def _cut(self, array: Any, placed: NamedSharding) -> NamedSharding:
        """Cuts an array also along the data axis, where it is longest and not cut yet."""
        devices = self.mesh.shape[DATA]
        axes = [*placed.spec, *[None] * (array.ndim - len(placed.spec))]
        free = [i for i, axis in enumerate(axes) if axis is None and array.shape[i] % devices == 0]
        if devices == 1 or array.size < _SMALL or not free:
            return placed
        axes[max(free, key=lambda i: array.shape[i])] = DATA
        return NamedSharding(self.mesh, PartitionSpec(*axes))

    def put_state(self, state: Any, config: Any = None) -> Any:
        """Places the state so that each device holds its share."""
        return jax.tree.map(put, state, self.of_state(state, config))

    def put_batch(self, batch: Any) -> Any:
        """Spreads a pytree of arrays [B, ...], which every process has, over the data axis."""
        spread = NamedSharding(self.mesh, PartitionSpec(DATA))
        return jax.tree.map(lambda array: put(np.asarray(array), spread), batch)


def gathered(tree: Any) -> Any:
    """Returns a pytree of arrays in this process's memory, wherever their parts are; all processes must ask
    for it."""
    if processes.is_alone():
        return tree
    return jax.tree.map(
        lambda a: (
            np.asarray(a)
            if a.is_fully_addressable or a.is_fully_replicated
            else np.asarray(multihost_utils.process_allgather(a, tiled=True))
        ),
        tree,
    )
