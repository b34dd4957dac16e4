"""Checkpoints of a run: written atomically, the last two kept."""

from __future__ import annotations

import pathlib

import jax
import orbax.checkpoint as ocp

from cspd_jax.training.step import State


class Checkpoints:
    """The numbered checkpoints in a folder. A folder that was being written when its process died has a
    temporary name; it is never restored, and removed when the run is resumed."""

    def __init__(self, folder: pathlib.Path, keep: int = 2):
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep, enable_async_checkpointing=False, cleanup_tmp_directories=True
        )
        self._manager = ocp.CheckpointManager(folder.resolve(), options=options)

    def save(self, state: State) -> None:
        self._manager.save(int(state.step), args=ocp.args.StandardSave(state._asdict()), force=True)

    def latest(self) -> int | None:
        """The step of the newest complete checkpoint."""
        return self._manager.latest_step()

    def restore(self, like: State) -> State:
        """The newest checkpoint, with the structure, shapes and placement of `like`."""
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like._asdict())
        restored = self._manager.restore(self.latest(), args=ocp.args.StandardRestore(abstract))
        return State(**restored)

    def close(self) -> None:
        self._manager.close()
