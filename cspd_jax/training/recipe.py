"""What all recipes share. A recipe is a whole run: from the settings and what it begins with to a model."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from cspd_jax import weights
from cspd_jax._utils.files import remove, scratch_beside, write_errors, written_beside
from cspd_jax.errors import UserError
from cspd_jax.training.config import RunConfig
from cspd_jax.training.placement import gathered
from cspd_jax.training.settings import to_json
from cspd_jax.training.step import TrainState
from cspd_jax.weights.folder import OWN_ENTRIES

Tell = Callable[[str], object]  # is told of long work before it begins


def silent(_: str) -> None:
    """A `Tell` that listens to nothing."""


@dataclasses.dataclass(frozen=True)
class Beginning:
    """What a run begins with besides its settings; None is what the recipe usually takes.

    init: the model whose weights it starts from.
    vae: the autoencoder whose latents it learns.
    target: of a draft, the model that it drafts for.
    origin: whether a draft learns on data, target or both.
    samples: how many samples, or answers, of the target.
    ids: of a head, how many ids it has.
    prompts: of a head, a file of them.
    questions: of a head, how many the target asks itself.
    """

    init: str | None = None
    vae: str | None = None
    target: str | None = None
    origin: str | None = None
    samples: int | None = None
    ids: int | None = None
    prompts: str | None = None
    questions: int | None = None


def prepare(out: pathlib.Path, resume: bool) -> None:
    """Makes the folder of a run; UserError if it is occupied and the run is not to be resumed."""
    if out.exists() and not out.is_dir():
        raise UserError(f"{out} is a file; name a folder for the run")
    if not resume and out.exists() and any(out.iterdir()):
        raise UserError(f"{out} is not empty; choose another folder, or continue that run with --resume")
    with write_errors(out):
        out.mkdir(parents=True, exist_ok=True)


class Trained(NamedTuple):
    """What a run has come to.

    kind: of the checkpoint.
    config: the settings.
    step: steps taken; fewer than `config.steps` if the run was stopped early.
    params: the averaged weights.
    extra: for the config.json of the model.
    report: what was measured of them.
    """

    kind: str
    config: RunConfig
    step: int
    params: Any
    extra: dict[str, Any]
    report: dict[str, Any]

    @classmethod
    def of(cls, kind: str, config: RunConfig, state: TrainState, extra: dict[str, Any]) -> Trained:
        """Of several processes all call it; the first one adds a report."""
        return cls(kind, config, int(state.step), gathered(state.ema), extra, {})

    def save(self, path: pathlib.Path, source: str) -> dict[str, Any]:
        """Writes the checkpoint folder of the model, and returns its description. What else a folder that is
        there holds, such as gains, which know their weights, stays."""
        if not all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(self.params)):
            raise UserError(
                f"{path} is not written: training diverged, and parameters are NaN or infinite (metrics.jsonl"
                " says from which step on); begin again with a lower --learning-rate"
            )
        extra = {**self.extra, "training": to_json(self.config)}
        with scratch_beside(path) as before, written_beside(path) as partial:
            description = weights.save(
                partial, self.kind, self.config.model, self.params, source=source, extra=extra
            )
            if path.is_symlink() or not path.is_dir():
                remove(path)
            else:
                path.rename(before)
                for entry in before.iterdir():
                    if entry.name not in OWN_ENTRIES:
                        entry.rename(partial / entry.name)
        return description
