"""The settings of a run as JSON: in the config.json of its folder, and in that of the model it comes to."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Any

from cspd_jax._utils.files import write_text
from cspd_jax._utils.json_files import read_json
from cspd_jax._utils.typed import read_fields
from cspd_jax.errors import UserError, naming
from cspd_jax.networks.config import MARConfig, SphereConfig
from cspd_jax.networks.eagle_config import EagleConfig
from cspd_jax.networks.lm_config import LMConfig
from cspd_jax.training.config import (
    FlowTrainConfig,
    HeadTrainConfig,
    RunConfig,
    TextTrainConfig,
    TrainConfig,
)
from cspd_jax.training.data.digits import DigitsConfig
from cspd_jax.training.data.folder import FolderConfig
from cspd_jax.training.data.glyphs import GlyphConfig
from cspd_jax.training.data.text import TextConfig
from cspd_jax.training.data.words import WordsConfig

CONFIG_FILE = "config.json"
_DATA = {
    "glyphs": GlyphConfig,
    "words": WordsConfig,
    "digits": DigitsConfig,
    "folder": FolderConfig,
    "text": TextConfig,
}


def to_json(config: RunConfig) -> dict[str, Any]:
    """Returns the settings as a JSON object; `data_kind` names the kind of data set."""
    kind = next(name for name, cls in _DATA.items() if isinstance(config.data, cls))
    return {**dataclasses.asdict(config), "data_kind": kind}


def from_json(values: Any, where: str) -> RunConfig:
    """Returns the settings that `to_json` wrote; UserError, which names `where`, for anything else."""
    if not isinstance(values, dict) or values.get("data_kind") not in _DATA:
        raise UserError(f"{where} does not hold the settings of a run")
    data = _DATA[values["data_kind"]]
    run, model = _classes(data, values.get("model"))
    parts = {"model": model, "data": data}
    own = {name: value for name, value in values.items() if name not in ("data_kind", *parts)}
    with naming(where):
        settings = read_fields(run, own, "the settings", every=False)
        for name, part in parts.items():
            settings[name] = part(**read_fields(part, values.get(name), name, every=False))
        return run(**settings)


def _classes(data: type, model: Any) -> tuple[type[RunConfig], type]:
    """The classes of a run and of its model: only causal image models have class tokens."""
    fields = model if isinstance(model, dict) else {}
    if data is TextConfig:
        return (HeadTrainConfig, EagleConfig) if "entering" in fields else (TextTrainConfig, LMConfig)
    return (FlowTrainConfig, SphereConfig) if "class_tokens" in fields else (TrainConfig, MARConfig)


def read(out: pathlib.Path) -> RunConfig | None:
    """Returns the settings of the run in a folder; None if there is no run."""
    path = out / CONFIG_FILE
    return from_json(read_json(path), str(path)) if path.exists() else None


def write(config: RunConfig, out: pathlib.Path) -> None:
    """Writes the settings of the run in a folder."""
    write_text(out / CONFIG_FILE, json.dumps(to_json(config), indent=2) + "\n")
