"""Models by name or path: the shipped pair, published weights, checkpoint folders."""

from __future__ import annotations

import dataclasses
import functools
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from cspd_jax import parallel, weights
from cspd_jax._utils.sampling import sampling
from cspd_jax.converters import eagle, flux, hf
from cspd_jax.errors import UserError, check_whole, naming, shown
from cspd_jax.networks.config import MAR_PRESETS, KLConfig, MARConfig, SphereConfig
from cspd_jax.networks.cpu_matmul import by_outputs, gains_by_outputs
from cspd_jax.networks.eagle import Eagle
from cspd_jax.networks.eagle_config import EagleConfig
from cspd_jax.networks.lm import LM
from cspd_jax.networks.lm_config import LMConfig
from cspd_jax.networks.mar import MARModel
from cspd_jax.networks.nextstep_config import NextStepConfig
from cspd_jax.networks.registry import IMAGE_KINDS
from cspd_jax.networks.registry import kind_of as kind_of_config
from cspd_jax.networks.sphere_config import SphereVAEConfig
from cspd_jax.parallel.mesh import check_mesh
from cspd_jax.weights import hub, parameters

ImageConfig = MARConfig | SphereConfig | NextStepConfig
DEFAULTS = {  # name -> folder
    "default": "target",
    "default-draft": "draft",
    "default-causal": "causal",
    "words": "words",
    "words-draft": "words-draft",
    "words-causal": "words-causal",
}
TEXT_DEFAULTS = {
    "text-default": "text-target",
    "text-default-draft": "text-draft",
    "masked-default": "masked-text",
}
NAMES = (*DEFAULTS, *MAR_PRESETS)
_IMAGES = "image"  # in place of the kinds of image models
AUTOENCODER = flux.INSIDE  # within the checkpoint folder of a model that came with one
_MOST_PADDING = 1024  # ids; published models of one tokenizer differ by some hundreds
_SHIPPED = Path(__file__).parents[1] / "defaults"


@dataclasses.dataclass(frozen=True, eq=False)
class ImageModel:
    """An image model with its parameters: a MAR or causal model, or your own.

    name: what it was loaded by.
    network: its pure functions (a `TokenModel`, static under jit). Either it has a `config` with num_classes
        and respacing, or these are its own attributes.
    params: pytree of arrays.
    metadata: the rest of its config.json.
    class_names: one per class, or empty.
    folder: its checkpoint's, if it has one.
    mesh: the devices that its parameters lie on; None is one device.
    """

    name: str
    network: Any
    params: Any = dataclasses.field(repr=False)
    metadata: dict[str, Any] = dataclasses.field(default_factory=dict, repr=False)
    class_names: tuple[str, ...] = ()
    folder: Path | None = None
    mesh: Mesh | None = None

    @property
    def config(self) -> ImageConfig:
        return getattr(self.network, "config", self.network)

    @property
    def sampling(self) -> dict[str, Any]:
        """What its checkpoint says of how it is sampled: `Options(**model.sampling)`; empty if nothing."""
        return sampling(self.metadata)

    def class_name(self, label: int) -> str:
        """The caption of a label: the class's name, its number, or "no class" for -1."""
        check_whole("label", label, -1, self.config.num_classes - 1)
        if label < 0:
            return "no class"
        return self.class_names[label] if self.class_names else str(label)


@dataclasses.dataclass(frozen=True, eq=False)
class TextModel:
    """A language model with its parameters.

    name: what it was loaded by.
    network: its pure functions, static under jit.
    params: pytree of arrays.
    metadata: the rest of its config.json.
    folder: its checkpoint's, if it has one.
    mesh: the devices that its parameters lie on; None is one device.
    """

    name: str
    network: LM
    params: Any = dataclasses.field(repr=False)
    metadata: dict[str, Any] = dataclasses.field(default_factory=dict, repr=False)
    folder: Path | None = None
    mesh: Mesh | None = None

    @property
    def config(self) -> LMConfig:
        return self.network.config

    @functools.cached_property
    def for_decoding(self) -> tuple[LM, Any]:
        """The network and its parameters as passes over few tokens want them.

        On a CPU large kernels lie by outputs, in a copy that is made when this is first asked for.
        """
        if self.mesh is not None or not gains_by_outputs(self.params, self.network.dtype):
            return self.network, self.params
        return dataclasses.replace(self.network, by_outputs=True), by_outputs(self.params)


@dataclasses.dataclass(frozen=True, eq=False)
class HeadModel:
    """A head that drafts from its target's states, with its parameters: see `text.draft_from_states`.

    name: what it was loaded by.
    network: its pure functions, static under jit.
    params: pytree of arrays.
    metadata: the rest of its config.json.
    folder: its checkpoint's.
    """

    name: str
    network: Eagle
    params: Any = dataclasses.field(repr=False)
    metadata: dict[str, Any] = dataclasses.field(default_factory=dict, repr=False)
    folder: Path | None = None

    @functools.cached_property
    def for_decoding(self) -> tuple[Eagle, Any]:
        """As that of a `TextModel`."""
        floats = {name: part for name, part in self.params.items() if name not in ("ids", "embedding")}
        if not gains_by_outputs(floats, self.network.dtype):
            return self.network, self.params
        return dataclasses.replace(self.network, by_outputs=True), {**self.params, **by_outputs(floats)}


@dataclasses.dataclass(frozen=True, eq=False)
class VAE:
    """An autoencoder with its parameters; turns what models make into pixels: a KL-16 the latents of MAR, an
    S-VAE the tokens of SphereAR.

    metadata: the rest of its config.json.
    """

    name: str
    config: KLConfig | SphereVAEConfig
    params: Any = dataclasses.field(repr=False)
    dtype: Any = jnp.float32
    metadata: dict[str, Any] = dataclasses.field(default_factory=dict, repr=False)


def load(name_or_path: str | os.PathLike, dtype: Any = None, mesh: Mesh | None = None) -> ImageModel:
    """An image model by name (`NAMES`; mar-* are downloaded, for which the extra `hub` is needed), checkpoint
    folder, or Hugging Face folder of a NextStep-1 model.

    mesh: the devices that share its parameters and its work (`cspd_jax.parallel.make_mesh`).
    dtype: of parameters and activations, float32 unless given. A folder called like a published model is
    that folder; the shipped models always win (write ./default for a folder of that name).
    """
    dtype = _checked(dtype, mesh)
    name = _as_name(name_or_path)
    if _is_hub_folder(name):
        folder: Path | None
        loaded, folder = _converted(name, Path(name).name, dtype, mesh, _IMAGES), Path(name)
    else:
        loaded, folder = _load(name, _IMAGES, dtype, mesh), _locate(name, _IMAGES)
    network = kind_of_config(loaded.config).network(loaded.config, dtype)
    with naming(name):
        names = class_names(loaded.metadata, loaded.config.num_classes)
    return ImageModel(name, network, loaded.params, loaded.metadata, names, folder, mesh)


def load_text(name_or_path: str | os.PathLike, dtype: Any = None, mesh: Mesh | None = None) -> TextModel:
    """A language model by name (`TEXT_DEFAULTS`), checkpoint folder, Hugging Face folder, or OWNER/NAME on
    the Hugging Face hub, which is downloaded (extra `hub`).

    mesh: the devices that share its parameters and its work (`cspd_jax.parallel.make_mesh`).
    """
    dtype = _checked(dtype, mesh)
    name = _as_name(name_or_path)
    if name not in TEXT_DEFAULTS and hub.is_repository(name) and not os.path.exists(name):
        folder: Path | None
        fetched = hub.fetch_model(name)
        origin = f"{fetched.repository}@{fetched.commit}"
        loaded, folder = _converted(fetched.path, origin, dtype, mesh, "lm"), fetched.path
    elif name not in TEXT_DEFAULTS and hf.is_model_folder(name):
        loaded, folder = _converted(name, Path(name).name, dtype, mesh, "lm"), Path(name)
    else:
        loaded, folder = _load(name, "lm", dtype, mesh), _locate(name, "lm")
    return TextModel(name, LM(loaded.config, dtype), loaded.params, loaded.metadata, folder, mesh)


def load_head(name_or_path: str | os.PathLike, dtype: Any = None) -> HeadModel:
    """A head that drafts from its target's states, by its checkpoint folder."""
    dtype = _checked(dtype)
    name = _as_name(name_or_path)
    if eagle.is_folder(Path(name)):
        loaded = _converted(name, Path(name).name, dtype, None, "eagle")
    else:
        loaded = _load(name, "eagle", dtype)
    check_head_ids(f"the head in {name}", loaded.config, loaded.params["ids"])
    return HeadModel(name, Eagle(loaded.config, dtype), loaded.params, loaded.metadata, Path(name))


def check_head_ids(where: str, config: EagleConfig, ids: Any) -> None:
    """UserError unless the ids of a head are different ones of its target's."""
    ids, most = np.asarray(ids), config.target_ids
    whole = np.issubdtype(ids.dtype, np.integer)
    if not whole or ids.min() < 0 or ids.max() >= most or len(np.unique(ids)) < len(ids):
        raise UserError(f"the ids of {where} are not different ones of the target's {most}")


def is_head(name_or_path: str | os.PathLike) -> bool:
    """Whether a name stands for the checkpoint folder of a head that drafts from its target's states."""
    name = _as_name(name_or_path)
    if not os.path.isfile(os.path.join(name, "config.json")) or eagle.is_folder(Path(name)):
        return eagle.is_folder(Path(name))
    return not hf.is_model_folder(name) and weights.read_description(name)["kind"] == "eagle"


def kind_of(name_or_path: str | os.PathLike) -> str:
    """The kind of the checkpoint that a name or folder stands for: mar, lm, ..."""
    name = _as_name(name_or_path)
    if name in TEXT_DEFAULTS:
        return "lm"
    path = _locate(name, _IMAGES)
    return "mar" if path is None else weights.read_description(path)["kind"]


def shipped_folder(name: str) -> Path | None:
    """The checkpoint folder of a model that comes with the package; None for any other name."""
    folder = {**DEFAULTS, **TEXT_DEFAULTS}.get(name)
    return None if folder is None else _SHIPPED / folder


def load_vae(name_or_path: str | os.PathLike = "kl16", dtype: Any = None) -> VAE:
    """The published KL-16 autoencoder (`"kl16"`, downloaded) or the folder of a converted one, or of
    a converted S-VAE."""
    dtype = _checked(dtype)
    name = _as_name(name_or_path)
    if flux.is_folder(name):
        loaded = _converted(name, Path(name).name, jnp.dtype(jnp.float32 if dtype is None else dtype), None)
    else:
        loaded = _load(name, "kl16", dtype)
    return VAE(name, loaded.config, loaded.params, dtype, loaded.metadata)


def own_vae(model: ImageModel) -> str | None:
    """The folder of the autoencoder that a model came with."""
    folder = model.folder / AUTOENCODER if model.folder else None
    return str(folder) if folder is not None and (folder / "config.json").is_file() else None


def describe(name_or_path: str | os.PathLike) -> ImageModel:
    """The model without its parameters (None), to check a request against; nothing is downloaded."""
    name = _as_name(name_or_path)
    if _is_hub_folder(name):
        return _describe_hub_folder(name)
    path = _locate(name, _IMAGES)
    if path is None:
        return ImageModel(name, MARModel(MAR_PRESETS[name]), None, {})
    metadata = weights.read_description(path)
    _check_kind(metadata.pop("kind"), _IMAGES, name)
    config = metadata.pop("config")
    network = kind_of_config(config).network(config)
    with naming(name):
        names = class_names(metadata, config.num_classes)
    return ImageModel(name, network, None, metadata, names, path)


def _is_hub_folder(name: str) -> bool:
    """Whether an image model's name stands for a Hugging Face folder, which is converted as it is read."""
    return name not in DEFAULTS and hf.is_model_folder(name)


def _describe_hub_folder(name: str) -> ImageModel:
    from cspd_jax.converters.source import make_config, open_source

    source = open_source(name)
    _check_kind(source.kind, _IMAGES, name)
    config = make_config(source)
    network = kind_of_config(config).network(config)
    return ImageModel(name, network, None, {"source": Path(name).name}, folder=Path(name))


def class_names(metadata: dict[str, Any], num_classes: int) -> tuple[str, ...]:
    """The class names a checkpoint carries, if any; UserError for some that cannot be."""
    extra = metadata.get("extra")
    names = extra.get("class_names") if isinstance(extra, dict) else None
    if not names:
        return ()
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UserError(f"class_names of the checkpoint are {shown(names)}; they must be a list of strings")
    if len(names) != num_classes:
        raise UserError(f"the checkpoint names {len(names)} classes; the model has {num_classes}")
    return tuple(names)


def check_vocabularies(target: TextModel, draft: TextModel) -> None:
    """UserError unless two language models can have the same ids, apart from padding of the vocabulary."""
    t, d = target.config, draft.config
    unknown = any(c.known_ids == c.vocab_size for c in (t, d))
    if t.known_ids == d.known_ids or (unknown and abs(t.known_ids - d.known_ids) <= _MOST_PADDING):
        return
    raise UserError(
        f"the vocabularies differ: {target.name} has {t.known_ids} ids and {draft.name} {d.known_ids}, which"
        " is more than padding; a draft needs the target's tokens"
    )


def _as_name(name_or_path: Any) -> str:
    if not isinstance(name_or_path, str | os.PathLike):
        raise UserError(f"a model is named by a string or a path, not by {name_or_path!r:.80}")
    if not os.fspath(name_or_path):
        raise UserError("the name of a model is empty")
    return os.fspath(name_or_path)


def _checked(dtype: Any, mesh: Any = None):
    """The type of the parameters; UserError for what no model can be loaded as, or onto."""
    if mesh is not None:
        check_mesh(mesh)
    return parameters.as_floats(jnp.float32 if dtype is None else dtype)


def _load(name: str | os.PathLike, kind: str, dtype, mesh: Mesh | None = None) -> weights.Checkpoint:
    path = _locate(name, kind)
    if path is None:
        return _published(os.fspath(name), dtype, mesh)
    _check_kind(weights.read_description(path)["kind"], kind, name)
    return weights.load(path, dtype, mesh)


def _locate(name: str | os.PathLike, kind: str) -> Path | None:
    """The checkpoint folder a name stands for; None for a published model."""
    text = os.fspath(name)
    if text in (shipped := {_IMAGES: DEFAULTS, "lm": TEXT_DEFAULTS}.get(kind, {})):
        path = _SHIPPED / shipped[text]
        if not path.is_dir():
            raise UserError(
                f"this copy of cspd-jax was installed without the model {text!r}; train one with"
                " cspd-jax train and give its folder"
            )
        return path
    if os.path.exists(text):
        return Path(text)
    published = {_IMAGES: tuple(MAR_PRESETS), "kl16": ("kl16",)}.get(kind, ())
    if text in published:
        return None
    for other, commands in ((DEFAULTS, "generate"), (TEXT_DEFAULTS, "text or cspd-jax masked")):
        if text in other:
            what = "an image model" if other is DEFAULTS else "a language model"
            raise UserError(f"{text} is {what}; it goes with cspd-jax {commands}")
    names = (*shipped, *published)
    known = f"neither a checkpoint folder nor one of the names {', '.join(names)}" if names else "no folder"
    raise UserError(f"{text} is {known}")


def _check_kind(kind: str, wanted: str, name: str | os.PathLike) -> None:
    what = {_IMAGES: "model", "kl16": "autoencoder", "lm": "language model", "eagle": "head"}
    allowed = {_IMAGES: tuple(IMAGE_KINDS), "kl16": ("kl16", "flux", "svae")}.get(wanted, (wanted,))
    if kind not in allowed:
        head = " (a head goes with cspd-jax text --draft)" if kind == "eagle" else ""
        raise UserError(
            f"{os.fspath(name)} is a checkpoint of kind {kind}{head}; the {what[wanted]} must be of kind"
            f" {' or '.join(allowed)}"
        )


def _published(name: str, dtype, mesh: Mesh | None) -> weights.Checkpoint:
    """Downloads (or finds in the cache) and converts published weights."""
    fetched = hub.fetch(name)
    return _converted(fetched.path, f"{fetched.repository}@{fetched.commit}/{fetched.file}", dtype, mesh)


def _converted(
    path: str | os.PathLike, origin: str, dtype, mesh: Mesh | None, wanted: str | None = None
) -> weights.Checkpoint:
    """A file or folder in a published format, converted as it is read, a tensor at a time. wanted: as for
    `_check_kind`; None for any kind."""
    from cspd_jax.converters.source import Options, convert, make_config, open_source

    source = open_source(path)
    if wanted is not None:
        _check_kind(source.kind, wanted, path)
    config = make_config(source, Options())

    def put(place: tuple[str, ...], array: np.ndarray) -> jax.Array:
        if mesh is None:
            return jnp.asarray(array)
        return parallel.put(array, parallel.sharding(mesh, place, array.shape, config))

    params = convert(source, config, np.dtype(dtype), put)
    return weights.Checkpoint(source.kind, config, params, {"source": origin})
