"""Loads models by name or path: models that come with the package, published weights
(downloaded once, then cached), and checkpoint folders."""

from __future__ import annotations

import difflib
import os
import re
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike

from cspd_jax import parallel, weights
from cspd_jax.check import UserError, check_head_ids
from cspd_jax.converters import eagle, flux, hf
from cspd_jax.converters.source import Source, convert, make_config, open_source
from cspd_jax.models import VAE, HeadModel, ImageModel, TextModel
from cspd_jax.networks.eagle import Eagle
from cspd_jax.networks.lm import LM
from cspd_jax.networks.mar import MAR_PRESETS
from cspd_jax.networks.registry import IMAGE_KINDS

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
    "masked-default": "block-text",
    "masked-whole": "masked-text",
}
NAMES = (*DEFAULTS, *MAR_PRESETS)  # the names of image models
AUTOENCODER = flux.INSIDE  # the autoencoder's folder inside the folder of a model
REPOSITORY = "jadechoghari/mar"
# name -> file in the repository REPOSITORY.
FILES = {name: f"{name}.safetensors" for name in (*MAR_PRESETS, "kl16")}
REVISION_VARIABLE = "CSPD_HUB_REVISION"
# The files of a language model that are downloaded.
_OF_A_MODEL = [
    hf.CONFIG,
    "model*.safetensors",
    hf.INDEX,
    *hf.COMPANIONS,
]
# Endings that only a file has. A repository's name may end in gguf.
_ENDINGS = (
    ".pth",
    ".pt",
    ".ckpt",
    ".bin",
    ".safetensors",
)
SHIPPED = Path(__file__).parent / "defaults"
_KINDS = {  # type -> (its name in messages, the kinds of checkpoints that it covers)
    ImageModel: ("an image model (cspd-jax generate)", tuple(IMAGE_KINDS)),
    TextModel: ("a language model (cspd-jax text, cspd-jax masked)", ("lm",)),
    HeadModel: ("a head (cspd-jax text --draft)", ("eagle",)),
    VAE: ("an autoencoder (--vae)", ("kl16", "flux", "svae")),
}


def load(
    name_or_path: str | os.PathLike,
    dtype: DTypeLike | None = None,
    mesh: Mesh | None = None,
    of: type | None = None,
) -> Any:
    """Loads an `ImageModel`, `TextModel`, `HeadModel` or `VAE`; the checkpoint decides
    which.

    name_or_path: the name of a model that comes with the package (`DEFAULTS`,
        `TEXT_DEFAULTS`); a folder in this package's format or in Hugging Face's; or the
        name of published weights, which are downloaded (extra `hub`): mar-base,
        mar-large, mar-huge, kl16, or OWNER/NAME of a language model. If a folder has
        the name of a model that comes with the package, the package's model is loaded;
        write ./default to load the folder. A folder is preferred to published weights.
    dtype: the type of parameters and activations (default: float32).
    mesh: the devices that share the parameters and the work
        (`cspd_jax.parallel.make_mesh`).
    of: the type that is wanted. If the checkpoint has another type, UserError is raised
        before any parameters are read.
    """
    name = os.fspath(name_or_path)
    dtype = jnp.dtype(jnp.float32 if dtype is None else dtype)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise UserError(f"the type of a model is {dtype}; it must be a floating one")
    there = locate(name)
    path, origin = fetch(name) if there is None else (there, there.name)
    found, source = _outline(path, there is None or _is_published(path))
    _check_kind(found.kind, of, name)
    if source is None:
        found = weights.load(path, dtype, mesh)
    else:

        def put(place: tuple[str, ...], array: np.ndarray) -> jax.Array:
            if mesh is None:
                return jnp.asarray(array)
            placed = parallel.sharding(mesh, "/".join(place), array.shape, found.config)
            return parallel.put(array, placed)

        params = convert(source, found.config, dtype, put)
        found = found._replace(params=params, metadata={"source": origin})
    return _model(name, found, dtype, path if path.is_dir() else None, mesh)


def describe(name_or_path: str | os.PathLike) -> Any:
    """Returns the model with None as its parameters, so that a request can be checked
    against it. Nothing is downloaded."""
    name = os.fspath(name_or_path)
    path = locate(name)
    if path is not None:
        found, _ = _outline(path, _is_published(path))
    elif name in MAR_PRESETS:
        found = weights.Checkpoint("mar", MAR_PRESETS[name], None, {})
    else:
        raise UserError(
            f"{name} is neither a folder nor one of the image models {', '.join(NAMES)}"
        )
    return _model(name, found, jnp.dtype(jnp.float32), path, None)


def own_vae(model: ImageModel) -> str | None:
    """Returns the folder of the autoencoder inside the model's own folder; None if
    there is none."""
    if model.folder is None:
        return None
    folder = model.folder / AUTOENCODER
    return str(folder) if (folder / "config.json").is_file() else None


def shipped_folder(name: str) -> Path | None:
    """Returns the checkpoint folder of a model that comes with the package; None for
    any other name."""
    folder = {**DEFAULTS, **TEXT_DEFAULTS}.get(name)
    return None if folder is None else SHIPPED / folder


def locate(name: str) -> Path | None:
    """Returns the folder that a name stands for; None for a name that is downloaded.
    Raises UserError for any other name."""
    if (shipped := shipped_folder(name)) is not None or os.path.exists(name):
        return shipped or Path(name)
    if name in FILES or is_repository(name):
        return None
    if "/" in name:
        run = Path(name).parent
        if (run / "checkpoints").is_dir():
            weights.read_description(run)  # raises: the run may not have ended
        raise UserError(f"{name} does not exist")
    every = (*DEFAULTS, *TEXT_DEFAULTS, *FILES)
    near = difflib.get_close_matches(name, every)
    advice = f"did you mean {' or '.join(near)}?" if near else ", ".join(every)
    raise UserError(
        f"{name} is no checkpoint folder, no OWNER/NAME on the hub and none of the"
        f" names of models; {advice}"
    )


def _is_published(path: Path) -> bool:
    """Returns whether a folder is in a published format. Such a folder is converted
    while it is read."""
    return hf.is_model_folder(path) or eagle.is_folder(path) or flux.is_folder(path)


def _outline(path: Path, published: bool) -> tuple[weights.Checkpoint, Source | None]:
    """Returns a checkpoint without its parameters; and, if it is in a published format,
    the source to convert, else None."""
    if published:
        source = open_source(path)
        return weights.Checkpoint(
            source.kind, make_config(source), None, {"source": path.name}
        ), source
    told = weights.read_description(path)
    return weights.Checkpoint(told.pop("kind"), told.pop("config"), None, told), None


def _check_kind(kind: str, of: type | None, name: str) -> None:
    if of is None or kind in _KINDS[of][1]:
        return
    found = next((told for told, kinds in _KINDS.values() if kind in kinds), kind)
    raise UserError(f"{name} is {found}; this takes {_KINDS[of][0]}")


def _model(
    name: str,
    found: weights.Checkpoint,
    dtype: DTypeLike,
    folder: Path | None,
    mesh: Mesh | None,
) -> Any:
    """Makes the model of a checkpoint, by its kind."""
    kind, config, params, metadata = found
    if kind == "lm":
        return TextModel(name, LM(config, dtype), params, metadata, folder, mesh)
    if kind == "eagle":
        if params is not None:
            check_head_ids(f"the head in {name}", config, params["ids"])
        return HeadModel(name, Eagle(config, dtype), params, metadata, folder)
    if kind in _KINDS[VAE][1]:
        return VAE(name, config, params, dtype, metadata)
    if kind not in IMAGE_KINDS:
        raise UserError(
            f"{name} is a checkpoint of kind {kind}, which is no model that generates"
        )
    names = tuple((metadata.get("extra") or {}).get("class_names") or ())
    return ImageModel(
        name,
        IMAGE_KINDS[kind].network(config, dtype),
        params,
        metadata,
        folder,
        mesh,
        names,
    )


class Fetched(NamedTuple):
    """A downloaded file or folder.

    path: the path in the local cache.
    origin: OWNER/NAME@COMMIT of the repository. For a file, the name that it has in the
        repository is added.
    """

    path: Path
    origin: str


def fetch(name: str) -> Fetched:
    """Returns the file of published weights (`FILES`), or the folder of a language
    model, from the cache or the network. The environment variable CSPD_HUB_REVISION
    names a branch, or the 40 digits of a commit, which never changes (default: main).
    """
    revision = os.environ.get(REVISION_VARIABLE)
    try:
        import huggingface_hub

        if (file := FILES.get(name)) is not None:
            path = Path(
                huggingface_hub.hf_hub_download(REPOSITORY, file, revision=revision)
            )
            return Fetched(path, f"{REPOSITORY}@{path.parent.name}/{file}")
        path = Path(
            huggingface_hub.snapshot_download(
                name, revision=revision, allow_patterns=_OF_A_MODEL
            )
        )
        return Fetched(path, f"{name}@{path.name}")
    except Exception as error:  # the library and its HTTP client raise many types
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise UserError(
            f"{name} at revision {revision or 'main'} could not be fetched ({reason});"
            ' check the connection and the extra (pip install ".[hub]"), or give the'
            " path of a file or folder you have"
        ) from error


def is_repository(name: str) -> bool:
    """Returns whether a name has the form OWNER/NAME, and is not the name of a file or
    of something in a folder that exists."""
    is_file = name.lower().endswith(_ENDINGS)
    return (
        not is_file
        and re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name) is not None
        and not os.path.isdir(os.path.dirname(name))
    )
