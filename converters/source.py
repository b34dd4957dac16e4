"""Opens a published checkpoint in any supported file format, describes its content and
converts it.

The converters' error messages do not name the file. This module puts its name before
them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jax.typing import DTypeLike

from cspd_jax._utils.files import file_sha256
from cspd_jax.check import UserError
from cspd_jax.converters import (
    eagle,
    flux,
    gguf,
    gguf_tokenizer,
    hf,
    inception,
    kl16,
    lm,
    mar,
    nextstep,
    sphere,
    sphere_vae,
)
from cspd_jax.converters._tables import Args, Format, Options, Put, Shapes, Tensor
from cspd_jax.converters.safetensors_file import open_safetensors
from cspd_jax.converters.torch_file import LazyTensor, Namespace, open_checkpoint

_CONVERTERS: dict[str, Any] = {
    "mar": mar,
    "sphere": sphere,
    "nextstep": nextstep,
    "kl16": kl16,
    "flux": flux,
    "svae": sphere_vae,
    "inception": inception,
    "lm": lm,
    "eagle": eagle,
}
# The beginnings of names by which a kind is recognised. Kinds are tried in this order.
_NAMES = {
    "sphere": ("cls_embedding.", "head.net.", "pos_for_diff."),
    "svae": ("encoder.register_token.", sphere_vae.PREFIX),
    "mar": ("diffloss.", "encoder_blocks.", "decoder_blocks.", "z_proj"),
    "kl16": ("quant_conv.", "post_quant_conv."),
    "flux": ("encoder.", "decoder."),
    "inception": ("Conv2d_1a_3x3.", "Mixed_"),
}
# The state dicts of a training checkpoint. The first one that exists is taken.
_STATE_DICTS = (
    "model_ema",
    "ema",
    "model",
)


@dataclasses.dataclass(frozen=True)
class Source:
    """A checkpoint, whose weights are not read yet, and its description.

    path: the file or folder.
    kind: mar, sphere, nextstep, kl16, flux, svae, inception, lm or eagle.
    tensors: the tensors by their names in the checkpoint.
    args: the training arguments or the configuration that the checkpoint stores.
    folder: the folder of a language model, a head or a NextStep-1 model; else None.
    gguf: the content of a GGUF file; else None.
    """

    path: Path
    kind: str
    tensors: Mapping[str, Tensor]
    args: Args
    folder: hf.Folder | None = None
    gguf: gguf.GGUF | None = None

    @property
    def format(self) -> Format:
        """The layout of the tensors."""
        return gguf.FORMAT if self.gguf else _CONVERTERS[self.kind].FORMAT

    @property
    def companions(self) -> tuple[Path, ...]:
        """The files that are copied beside the converted weights."""
        return self.folder.companions if self.folder else ()

    def tokenizer_files(self) -> dict[str, bytes]:
        """Returns the contents of tokenizer files by name, which are made from the
        metadata of a GGUF file. Returns {} for other checkpoints."""
        with _naming(self.path):
            return gguf_tokenizer.files(self.gguf.metadata) if self.gguf else {}

    @property
    def remark(self) -> str | None:
        """A remark about the conversion for the user; None if there is none."""
        if (
            self.gguf is None
            or (why := gguf_tokenizer.missing(self.gguf.metadata)) is None
        ):
            return None
        return f"no tokenizer is converted, so that prompts are ids: {why}"

    @property
    def autoencoder(self) -> Source | None:
        """The autoencoder that comes with the model: in the file of a SphereAR
        checkpoint, or in the folder of a NextStep-1 model; else None."""
        if self.kind == "nextstep" and flux.is_folder(self.path / flux.INSIDE):
            return open_source(self.path / flux.INSIDE)
        if self.kind == "sphere" and (inside := _of_svae(self.tensors)):
            return Source(self.path, "svae", inside, {})
        return None

    @property
    def shapes(self) -> Shapes:
        return Shapes(
            {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}
        )

    @property
    def dtype(self) -> str:
        kinds = sorted(
            {
                getattr(tensor, "stored", str(tensor.dtype))
                for tensor in self.tensors.values()
            }
        )
        return kinds[0] if len(kinds) == 1 else "mixed (" + ", ".join(kinds) + ")"

    @property
    def num_params(self) -> int:
        shapes = self.format.parameters(self.shapes).values()
        return sum(int(np.prod(shape, dtype=object)) for shape in shapes)


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Turns any error that a file's content raises in a converter into a UserError,
    whose message names the file."""
    try:
        yield
    except (
        ArithmeticError,
        AttributeError,
        LookupError,
        TypeError,
        ValueError,
    ) as error:
        told = (
            str(error)
            if isinstance(error, UserError)
            else f"{type(error).__name__}: {error}"
        )
        raise UserError(
            told if told.startswith(str(path)) else f"{path}: {told}"
        ) from error


def open_source(path: str | os.PathLike, weights: str | None = None) -> Source:
    """Opens a file or a model folder.

    weights: the name of a training checkpoint's state dict (default: the first of
        model_ema, ema and model that exists).
    """
    path = Path(path)
    if not path.exists():
        raise UserError(f"{path} does not exist")
    with _naming(path):
        if path.is_dir() or path.suffix == ".safetensors" or gguf.is_gguf(path):
            if weights is not None:
                raise UserError(
                    f"{path} holds a single set of weights; --weights is for .pth files"
                )
            return _open_folder(path) if path.is_dir() else _open_file(path)
        tree = open_checkpoint(path)
        tensors = _state_dict(tree, path, weights)
        args = tree.get("args")
        return _of_file(
            path, tensors, args if isinstance(args, Namespace | dict) else {}
        )


def _open_folder(path: Path) -> Source:
    if flux.is_folder(path):
        source = open_source(flux.weights(path))
        return dataclasses.replace(source, args=hf.published_config(path))
    if eagle.is_folder(path):
        folder = eagle.open_folder(path)
        kind = "eagle"
    else:
        folder = hf.open_folder(path)
        kind = (
            "nextstep"
            if folder.config.get("model_type") == nextstep.MODEL_TYPE
            else "lm"
        )
    return Source(path, kind, folder.tensors, folder.config, folder)


def _open_file(path: Path) -> Source:
    if path.suffix == ".safetensors":
        return _of_file(path, open_safetensors(path), {})
    found = gguf.open_gguf(path)
    return Source(path, "lm", found.tensors, found.metadata, gguf=found)


def _of_file(path: Path, tensors: Mapping[str, Tensor], args: Args) -> Source:
    """Returns the source of a single file, whose kind is recognised by the names of the
    tensors."""
    for kind, names in _NAMES.items():
        if any(name.startswith(names) for name in tensors):
            return Source(
                path, kind, (kind == "svae" and _of_svae(tensors)) or tensors, args
            )
    if (path.parent / hf.CONFIG).is_file():
        raise UserError(
            f"{path} is one file of a model folder; give the folder, {path.parent}"
        )
    raise UserError(
        f"{path} is neither a MAR, a SphereAR, a KL-16, a FLUX-type, an S-VAE nor an"
        f" Inception checkpoint; its tensors are: {', '.join(list(tensors)[:8])}"
    )


def _of_svae(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    prefix = sphere_vae.PREFIX
    return {
        n.removeprefix(prefix): tensor
        for n, tensor in tensors.items()
        if n.startswith(prefix)
    }


def _state_dict(tree: Any, path: Path, weights: str | None) -> dict[str, LazyTensor]:
    found = [name for name in _STATE_DICTS if isinstance(tree.get(name), dict)]
    if weights is not None and weights not in found:
        raise UserError(
            f"{path} holds no {weights!r} weights; it has: {', '.join(map(str, tree))}"
        )
    state = tree[weights or found[0]] if found else tree
    for name, value in state.items():
        if not isinstance(name, str) or not isinstance(value, LazyTensor):
            raise UserError(
                f"{path}: entry {name} of the weights is a {type(value).__name__}, not"
                " a tensor"
            )
    return state


def make_config(source: Source, options: Options = Options()) -> Any:
    """Makes the configuration that fits the checkpoint. Its class depends on the
    checkpoint's kind."""
    converter = _CONVERTERS[source.kind]
    inside = source.autoencoder
    with _naming(source.path):
        if source.gguf:
            return gguf.make_config(source.gguf)
        if source.folder:
            return converter.make_config(source.folder, options)
        if source.kind == "sphere" and inside and options.vae_stride is None:
            options = dataclasses.replace(
                options, vae_stride=make_config(inside).stride
            )
        return converter.make_config(source.shapes, source.args, options)


def check(source: Source, config: object) -> None:
    """Raises UserError if `convert` would refuse the names, shapes or types of the
    tensors. Does not read the values of tensors."""
    with _naming(source.path):
        source.format.check(config, source.tensors)
    if source.autoencoder:
        check(source.autoencoder, make_config(source.autoencoder))


def convert(
    source: Source,
    config: object,
    dtype: DTypeLike = np.float32,
    put: Put | None = None,
) -> dict:
    """Returns the Flax tree of parameters as numpy arrays. If `put` is given, the tree
    has the value that `put` returns for each path and array."""
    with _naming(source.path):
        return source.format.convert(config, source.tensors, dtype, put)


def digest(source: Source) -> str:
    """Returns the SHA-256 of a file. For a folder, returns the SHA-256 of the output of
    `sha256sum config.json *.safetensors`."""
    if source.folder is None:
        return file_sha256(source.path)
    lines = "".join(
        f"{file_sha256(file)}  {file.name}\n" for file in source.folder.files
    )
    return hashlib.sha256(lines.encode()).hexdigest()
