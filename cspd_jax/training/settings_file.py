"""The settings of a run as JSON, and in the config.json of its folder."""

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
from cspd_jax.networks.sphere_config import SphereVAEConfig
from cspd_jax.parallel import processes
from cspd_jax.training.config import (
    FlowTrainConfig,
    HeadTrainConfig,
    RunConfig,
    TextTrainConfig,
    TrainConfig,
    VAETrainConfig,
)
from cspd_jax.training.data.digits import DigitsConfig
from cspd_jax.training.data.folder import FolderConfig
from cspd_jax.training.data.glyphs import GlyphConfig
from cspd_jax.training.data.text import TextConfig
from cspd_jax.training.data.words import WordsConfig
from cspd_jax.training.provenance import Provenance

CONFIG_FILE = "config.json"
_BEGUN = "begun_with"
_DATA = {
    "glyphs": GlyphConfig,
    "words": WordsConfig,
    "digits": DigitsConfig,
    "folder": FolderConfig,
    "text": TextConfig,
}


def to_json(config: RunConfig) -> dict[str, Any]:
    """The settings as a JSON object; `data_kind` names the kind of data set."""
    kind = next(name for name, cls in _DATA.items() if isinstance(config.data, cls))
    return {**dataclasses.asdict(config), "data_kind": kind}


def from_json(values: Any, where: str = "a run") -> RunConfig:
    """The inverse of `to_json`; UserError if the values are not the settings of a run."""
    if not isinstance(values, dict) or values.get("data_kind") not in tuple(_DATA):
        raise UserError(
            f"{where} does not hold the settings of a run: its data_kind is none of {', '.join(_DATA)}"
        )
    data = _DATA[values["data_kind"]]
    run, model = _classes(data, values.get("model"))
    parts = {"model": model, "data": data}
    settings = {name: value for name, value in values.items() if name not in ("data_kind", *parts)}
    settings = read_fields(run, settings, f"{where}:", every=False)
    for name, part in parts.items():
        fields = read_fields(part, values.get(name), f"{where}: {name}", every=False)
        with naming(where):
            settings[name] = part(**fields)
    with naming(where):
        return run(**settings)


def check(config: RunConfig) -> None:
    """UserError for settings that the run's own config.json could not be read with again."""
    from_json(json.loads(json.dumps(to_json(config))), "the run's settings")


def _classes(data: type, model: Any) -> tuple[type[RunConfig], type]:
    """Those of a run and of its model: causal image models have a number of class tokens, and autoencoders
    one of latent dimensions."""
    if data is TextConfig:
        is_head = isinstance(model, dict) and "entering" in model
        return (HeadTrainConfig, EagleConfig) if is_head else (TextTrainConfig, LMConfig)
    if isinstance(model, dict) and "class_tokens" in model:
        return FlowTrainConfig, SphereConfig
    if isinstance(model, dict) and "latent_dim" in model:
        return VAETrainConfig, SphereVAEConfig
    return TrainConfig, MARConfig


def read(out: pathlib.Path) -> RunConfig | None:
    """The settings of the run in a folder; None if there is no run."""
    stored = _stored(out)
    return None if stored is None else stored[0]


def read_begun(out: pathlib.Path) -> Provenance | None:
    """What the run in a folder began with; None if there is no run, or one that does not say."""
    stored = _stored(out)
    return None if stored is None else stored[1]


def _stored(out: pathlib.Path) -> tuple[RunConfig, Provenance | None] | None:
    path = out / CONFIG_FILE
    if not path.exists():
        return None
    values = read_json(path)
    try:
        begun = values.pop(_BEGUN, None) if isinstance(values, dict) else None
        return from_json(values, str(path)), None if begun is None else Provenance.from_json(begun)
    except TypeError as error:  # a field is missing
        raise UserError(f"{path} does not hold the settings of a run ({error})") from None


def write(config: RunConfig, out: pathlib.Path, begun: Provenance | None = None) -> None:
    """Writes the settings of the run in a folder, and what it began with (None: as it stands there). Of
    several processes the first one writes."""
    if not processes.is_first():
        return
    values = to_json(config)
    begun = read_begun(out) if begun is None else begun
    if begun is not None:
        values[_BEGUN] = begun.to_json()
    write_text(out / CONFIG_FILE, json.dumps(values, indent=2) + "\n")
