"""Many images, in a folder that survives anything: made by one process or several, continued, exported, read.

`run(Job(...), folder)` makes them; `read(folder)` yields them, shard by shard.
"""

from cspd_jax.apps.bulk.folder import Manifest, Record, Shard, read, read_manifest
from cspd_jax.apps.bulk.job import Job
from cspd_jax.apps.bulk.workers import run

__all__ = ["Job", "Manifest", "Record", "Shard", "read", "read_manifest", "run"]
