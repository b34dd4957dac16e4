"""The checkpoints of a run, kept by Orbax."""

from __future__ import annotations

import pathlib

import jax
import orbax.checkpoint as ocp

from cspd_jax.errors import UserError
from cspd_jax.training.step import TrainState

_FOLDER = "checkpoints"


class Checkpoints:
    """The numbered checkpoints in `out`/checkpoints, each written atomically; the last `keep` are kept."""

    def __init__(self, out: pathlib.Path, keep: int = 2):
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep, enable_async_checkpointing=False, cleanup_tmp_directories=True
        )
        self._folder = (out / _FOLDER).resolve()
        self._manager = ocp.CheckpointManager(self._folder, options=options)

    def save(self, state: TrainState) -> None:
        self._manager.save(int(state.step), args=ocp.args.StandardSave(state._asdict()), force=True)

    def restore(self, like: TrainState) -> TrainState | None:
        """Returns the newest checkpoint, placed and shaped as `like`; None if there is none yet."""
        if (step := self._manager.latest_step()) is None:
            return None
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like._asdict())
        try:
            return TrainState(**self._manager.restore(step, args=ocp.args.StandardRestore(abstract)))
        except Exception as error:  # Orbax raises whatever the damage leads to
            why = " ".join(str(error).split())[:200]
            raise UserError(
                f"checkpoint {step} in {self._folder} cannot be restored ({why}); remove it, and the run goes"
                " on from the one before"
            ) from error

    def close(self) -> None:
        self._manager.close()


def newest_step(out: pathlib.Path) -> int:
    """Returns the step of the newest checkpoint of a run in this folder; 0 if it has none."""
    folder = out / _FOLDER
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    return max((int(name) for name in names if name.isdecimal()), default=0)
