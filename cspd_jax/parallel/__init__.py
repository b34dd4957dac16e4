"""Many devices: a mesh with a data axis (images, rows) and a model axis (heads, widths, vocabulary).

JAX's own runtime does the work. A model is placed on a mesh by `place`; rows are spread over the data axis by
`map_rows`, inside which every group of devices runs by itself and waits for no other. `map_rows`,
`split_rows`, `sharding` and `put` are for code inside `jit`, or that places arrays itself, and do not check
what they get.
"""

from cspd_jax.parallel.mesh import DATA, MODEL, common_mesh, default_mesh, make_mesh, parse_mesh
from cspd_jax.parallel.placement import place, put, replicate, sharding, shardings
from cspd_jax.parallel.rows import Join, Joins, even, map_rows, split_rows

__all__ = [
    "DATA",
    "MODEL",
    "Join",
    "Joins",
    "common_mesh",
    "default_mesh",
    "even",
    "make_mesh",
    "map_rows",
    "parse_mesh",
    "place",
    "put",
    "replicate",
    "sharding",
    "shardings",
    "split_rows",
]
