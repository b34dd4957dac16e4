"""Opens a published checkpoint of any supported file format and says what it holds."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from cspd_jax._utils import limits
from cspd_jax._utils.files import as_path, file_sha256
from cspd_jax.converters import (
    eagle,
    flux,
    gguf,
    gguf_tokenizer,
    hf,
    hf_lm,
    inception,
    kl16,
    mar,
    nextstep,
    sphere,
    sphere_vae,
)
from cspd_jax.converters._tables import Format, Put, Tensor, check_type
from cspd_jax.converters.gguf_file import is_gguf
from cspd_jax.converters.safetensors_file import open_safetensors
from cspd_jax.converters.torch_file import LazyTensor, Namespace, open_checkpoint, total_bytes
from cspd_jax.errors import UserError

_MOST_SHARING = 2
_SPHERE_NAMES = ("cls_embedding.", "head.net.", "pos_for_diff.")
_MAR_NAMES = ("diffloss.", "encoder_blocks.", "decoder_blocks.", "z_proj")
_KL16_NAMES = ("encoder.", "decoder.", "quant_conv.", "post_quant_conv.")
_INCEPTION_NAMES = ("Conv2d_1a_3x3.", "Mixed_")
_FORMATS: dict[str, Format] = {
    "mar": mar.FORMAT,
    "sphere": sphere.FORMAT,
    "nextstep": nextstep.FORMAT,
    "kl16": kl16.FORMAT,
    "flux": kl16.FORMAT,
    "svae": sphere_vae.FORMAT,
    "inception": inception.FORMAT,
    "lm": hf_lm.FORMAT,
    "eagle": eagle.FORMAT,
}
_STATE_DICTS = ("model_ema", "ema", "model")  # of a training checkpoint; the first is taken


@dataclasses.dataclass(frozen=True)
class Source:
    """The weights of a checkpoint, not yet read, and what it says about itself.

    path: the file or folder.
    kind: mar, sphere, nextstep, kl16, flux, svae, inception, lm or eagle.
    tensors: by their names in the checkpoint.
    args: the training arguments or the configuration stored in it.
    folder: that of a language model, a head or a NextStep-1 model, else None.
    gguf: what the file says, if it is a GGUF file, else None.
    """

    path: Path
    kind: str
    tensors: Mapping[str, Tensor]
    args: Mapping[str, Any]
    folder: hf.Folder | None = None
    gguf: gguf.GGUF | None = None

    @property
    def companions(self) -> tuple[Path, ...]:
        """Files that belong beside the converted weights."""
        return self.folder.companions if self.folder else ()

    def tokenizer_files(self) -> dict[str, bytes]:
        """Further such files, name -> content, made of what a single file says of its tokenizer."""
        return gguf_tokenizer.files(self.args, str(self.path)) if self.gguf else {}

    @property
    def remark(self) -> str | None:
        """What a user should know of the conversion."""
        if self.gguf is None or (why := gguf_tokenizer.missing(self.args)) is None:
            return None
        return f"no tokenizer is converted, so that prompts are ids: {why}"

    @property
    def autoencoder(self) -> Source | None:
        """That of a SphereAR checkpoint, which lies in the same file, or of a NextStep-1 model, in the same
        folder."""
        if self.kind == "nextstep" and flux.is_folder(self.path / flux.INSIDE):
            return _open_flux(self.path / flux.INSIDE)
        inside = {name: tensor for name, tensor in self.tensors.items() if name.startswith("vae.")}
        return Source(self.path, "svae", inside, {}) if self.kind == "sphere" and inside else None

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}

    @property
    def dtype(self) -> str:
        kinds = sorted({getattr(tensor, "stored", str(tensor.dtype)) for tensor in self.tensors.values()})
        return kinds[0] if len(kinds) == 1 else "mixed (" + ", ".join(kinds) + ")"

    @property
    def num_params(self) -> int:
        parameters = _FORMATS[self.kind].parameters(self.shapes)
        return sum(int(np.prod(shape, dtype=object)) for shape in parameters.values())


@dataclasses.dataclass(frozen=True)
class Options:
    """What the caller knows better than the file; None means not given.

    heads: attention heads of a MAR model's encoder and decoder, or of a causal model.
    patch_size: latents along one side of a token (MAR).
    steps: of the sampler (MAR, SphereAR, NextStep-1).
    vae_stride: pixels per latent (MAR, SphereAR, NextStep-1).
    groups: of the group normalisation (KL-16, FLUX-type autoencoders).
    """

    heads: tuple[int, ...] | None = None
    patch_size: int | None = None
    steps: str | None = None
    vae_stride: int | None = None
    groups: int | None = None

    def refuse_others(self, kind: str) -> None:
        """UserError if an option does not apply to checkpoints of this kind."""
        applies = {
            "kl16": ("groups",),
            "flux": ("groups",),
            "mar": ("heads", "patch_size", "steps", "vae_stride"),
            "sphere": ("heads", "steps", "vae_stride"),
            "nextstep": ("steps", "vae_stride"),
        }.get(kind, ())
        for field in dataclasses.fields(self):
            if getattr(self, field.name) is not None and field.name not in applies:
                flag = "--" + field.name.replace("_", "-")
                raise UserError(f"{flag} does not apply to a checkpoint of kind {kind}; leave it out")
        wanted = {
            "mar": (2, "two numbers ENC,DEC, for example 12,12"),
            "sphere": (1, "one number, for example 12"),
        }.get(kind)
        if wanted and self.heads is not None and len(self.heads) != wanted[0]:
            raise UserError(f"--heads of a checkpoint of kind {kind} is {wanted[1]}")


def open_source(path: str | os.PathLike, weights: str | None = None) -> Source:
    """Opens a file or a model folder.

    `weights` names the state dict of a training checkpoint; otherwise it is the first that is there of
    model_ema, ema and model.
    """
    path = as_path(path, "the checkpoint")
    in_gguf = not path.is_dir() and is_gguf(path)
    if path.is_dir() or path.suffix == ".safetensors" or in_gguf:
        if weights is not None:
            raise UserError(f"{path} holds a single set of weights; --weights is for .pth files")
        if path.is_dir():
            if flux.is_folder(path):
                return _open_flux(path)
            if eagle.is_folder(path):
                folder = eagle.open_folder(path)
                return Source(path, "eagle", folder.tensors, folder.config, folder)
            folder = hf.open_folder(path)
            if nextstep.is_nextstep(folder):
                return Source(path, "nextstep", folder.tensors, folder.config, folder)
            return Source(path, "lm", hf_lm.weights(folder), folder.config, folder)
        if in_gguf:
            found = gguf.open_gguf(path)
            return Source(path, "lm", found.tensors, found.metadata, gguf=found)
        tensors: Mapping[str, Tensor] = open_safetensors(path)
        return Source(path, _kind(tensors, path), tensors, {})
    tree = open_checkpoint(path)
    tensors, args = _state_dict(tree, path, weights), tree.get("args")
    return Source(path, _kind(tensors, path), tensors, args if isinstance(args, Namespace | dict) else {})


def _open_flux(folder: Path) -> Source:
    file, settings = flux.open_folder(folder)
    return dataclasses.replace(open_source(file), args=settings)


def _state_dict(tree: Any, path: Path, weights: str | None) -> dict[str, LazyTensor]:
    if not isinstance(tree, dict):
        raise UserError(f"{path} holds a {type(tree).__name__}, not a dictionary of weights")
    found = [name for name in _STATE_DICTS if isinstance(tree.get(name), dict)]
    if weights is not None and weights not in found:
        raise UserError(f"{path} holds no {weights!r} weights; it has: {_some(tree)}")
    state = tree[weights or found[0]] if found else tree
    for name, value in state.items():
        if not isinstance(name, str) or not isinstance(value, LazyTensor):
            raise UserError(f"{path}: entry {name} of the weights is a {type(value).__name__}, not a tensor")
    # Tensors may share a storage, as tied ones do; a thousand of them would make a thousand copies of it.
    size, total = limits.file_size(path), total_bytes(state.values())
    if total > _MOST_SHARING * size:
        raise UserError(
            f"{path} has {size} bytes, but its {len(state)} tensors would take {total}; save each tensor once"
        )
    return state


def _kind(tensors: Mapping[str, Tensor], path: Path) -> str:
    if sphere_vae.is_alone(tensors):
        return "svae"
    if any(name.startswith(_SPHERE_NAMES) for name in tensors):
        return "sphere"
    if any(name.startswith(_MAR_NAMES) for name in tensors):
        return "mar"
    if any(name.startswith(_KL16_NAMES) for name in tensors):
        return "kl16" if any("quant_conv" in name for name in tensors) else "flux"
    if any(name.startswith(_INCEPTION_NAMES) for name in tensors):
        return "inception"
    if (path.parent / hf.CONFIG).is_file():
        raise UserError(f"{path} is one file of a model folder; give the folder, {path.parent}")
    raise UserError(
        f"{path} is neither a MAR, a SphereAR, a KL-16, a FLUX-type, an S-VAE nor an Inception checkpoint;"
        f" its tensors are: {_some(tensors)}"
    )


def _some(names: Mapping) -> str:
    listed = [str(name)[:80] for name in list(names)[:8]]
    return ", ".join(listed) + (f" and {len(names) - 8} more" if len(names) > 8 else "") if listed else "none"


def make_config(source: Source, options: Options = Options()):
    """The configuration that fits the file, of the class that its kind has."""
    options.refuse_others(source.kind)
    where = str(source.path)
    if source.gguf:
        return gguf.make_config(source.gguf)
    if source.folder:
        if source.kind == "nextstep":
            return nextstep.make_config(source.folder, steps=options.steps, vae_stride=options.vae_stride)
        if source.kind == "eagle":
            return eagle.make_config(source.folder)
        return hf_lm.make_config(source.folder)
    if source.kind == "kl16":
        return kl16.make_config(source.shapes, where, groups=options.groups)
    if source.kind == "flux":
        return flux.make_config(source.shapes, source.args, where, groups=options.groups)
    if source.kind == "svae":
        return sphere_vae.make_config(source.shapes, where)
    if source.kind == "sphere":
        heads = None if options.heads is None else options.heads[0]
        stride = options.vae_stride
        if stride is None and source.autoencoder:
            stride = make_config(source.autoencoder).stride
        return sphere.make_config(source.shapes, where, heads=heads, steps=options.steps, vae_stride=stride)
    if source.kind == "inception":
        return inception.make_config(source.shapes, where)
    return mar.make_config(
        source.shapes,
        where,
        args=source.args,
        heads=options.heads,
        patch_size=options.patch_size,
        steps=options.steps,
        vae_stride=options.vae_stride,
    )


def _format(source: Source) -> Format:
    return gguf.FORMAT if source.gguf else _FORMATS[source.kind]


def check(source: Source, config) -> None:
    """UserError unless `convert` would find every tensor, by names, shapes and types. Reads no number."""
    shapes, where = source.shapes, str(source.path)
    if source.kind == "lm" and source.folder:
        shapes = hf_lm.without_the_copy(config, shapes)
    for entry in _format(source).plan(config, shapes, where):
        check_type(source.tensors[entry.name], entry.name, where)
    if source.autoencoder:
        check(source.autoencoder, make_config(source.autoencoder))


def convert(source: Source, config, dtype=np.float32, put: Put | None = None) -> dict:
    """The Flax parameter tree of numpy arrays, or of what `put` makes of each path and array."""
    return _format(source).convert(config, source.tensors, str(source.path), dtype, put)


def digest(source: Source) -> str:
    """The SHA-256 of the file; of a folder, that of the output of `sha256sum config.json *.safetensors`."""
    if source.folder is None:
        return file_sha256(source.path)
    lines = "".join(f"{file_sha256(file)}  {file.name}\n" for file in source.folder.files)
    return hashlib.sha256(lines.encode()).hexdigest()
