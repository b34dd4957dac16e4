"""The checkpoints of a run: the newest one that is as it was written."""

from __future__ import annotations

import contextlib
import hashlib
import json
import pathlib
import sys

import jax
import orbax.checkpoint as ocp

from cspd_jax._utils.files import write_text
from cspd_jax.errors import UserError
from cspd_jax.parallel import processes
from cspd_jax.training.placement import whole
from cspd_jax.training.step import TrainState


class Checkpoints:
    """The numbered checkpoints in `out`/checkpoints, each written atomically; the last `keep` are kept.

    Their SHA-256 sums are in `out`/checkpoints.json. A checkpoint that was being written when its process
    died has a temporary name. It is never restored, and it is removed when the run is resumed. One that
    cannot be restored, or has another sum, is put aside into `out`/damaged.
    """

    def __init__(self, out: pathlib.Path, keep: int = 2):
        self._folder, self._sums, self._damaged = (
            out / "checkpoints",
            out / "checkpoints.json",
            out / "damaged",
        )
        self._options = ocp.CheckpointManagerOptions(
            max_to_keep=keep, enable_async_checkpointing=False, cleanup_tmp_directories=True
        )
        self._open()

    def _open(self) -> None:
        self._manager = ocp.CheckpointManager(self._folder.resolve(), options=self._options)

    def save(self, state: TrainState) -> None:
        step, found = int(state.step), _sum(state)
        self._manager.save(step, args=ocp.args.StandardSave(state._asdict()), force=True)
        if not processes.is_first():
            return
        kept = {str(s) for s in self._manager.all_steps()}
        sums = {**self._read_sums(), str(step): found}
        write_text(self._sums, json.dumps({s: value for s, value in sums.items() if s in kept}) + "\n")

    def restore(self, like: TrainState) -> TrainState | None:
        """The newest checkpoint, with the structure, shapes and placement of `like`; None if there never was
        one, UserError if none is left."""
        problems = []
        while (step := self._manager.latest_step()) is not None:
            try:
                return self._restored(step, like)
            except Exception as error:  # Orbax raises whatever the damage leads to
                problem = " ".join(str(error).split())[:200] or type(error).__name__
                problems.append(f"step {step}: {problem}")
                self._put_aside(step)
        if problems:
            raise UserError(
                f"no checkpoint in {self._folder} can be restored ({'; '.join(problems)}); they are in"
                f" {self._damaged}; start the run again in another folder"
            )
        if sums := self._read_sums():
            raise UserError(
                f"{self._folder} lacks the checkpoints of this run (steps {', '.join(sums)}); put them back,"
                " or start the run again in another folder"
            )
        return None

    def _restored(self, step: int, like: TrainState) -> TrainState:
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like._asdict())
        state = TrainState(**self._manager.restore(step, args=ocp.args.StandardRestore(abstract)))
        if int(state.step) != step:
            raise ValueError(f"it holds step {int(state.step)}")
        if self._read_sums().get(str(step), found := _sum(state)) != found:
            raise ValueError("its numbers are not those that were written")
        return state

    def _put_aside(self, step: int) -> None:
        print(f"checkpoint {step} is damaged; it is put aside into {self._damaged}", file=sys.stderr)
        self._manager.close()
        if processes.is_first():
            self._move(step)
        processes.meet(f"checkpoint {step} is put aside")
        self._open()

    def _move(self, step: int) -> None:
        self._damaged.mkdir(exist_ok=True)
        number, place = 0, self._damaged / str(step)
        while place.exists():
            number += 1
            place = self._damaged / f"{step}-{number}"
        (self._folder / str(step)).rename(place)

    def _read_sums(self) -> dict[str, str]:
        with contextlib.suppress(OSError, ValueError):
            sums = json.loads(self._sums.read_text(encoding="utf-8"))
            if isinstance(sums, dict):
                return sums
        return {}

    def close(self) -> None:
        self._manager.close()


def _sum(state: TrainState) -> str:
    digest = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(state._asdict()):
        digest.update(jax.tree_util.keystr(path).encode())
        digest.update(whole(leaf).tobytes())
    return digest.hexdigest()
