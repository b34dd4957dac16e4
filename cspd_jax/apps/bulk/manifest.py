"""`manifest.json`: everything that defines a job, so that whoever continues it makes the same images."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from cspd_jax._utils import limits
from cspd_jax._utils.files import as_path
from cspd_jax._utils.json_files import read_object
from cspd_jax._utils.typed import read_fields
from cspd_jax.errors import UserError, check_whole, naming, shown

NAME = "manifest.json"
KIND = "samples"
VERSION = 1
MOST_IMAGES = 2**31 - 2**20  # images are numbered in int32, the surplus of the last batch too
_MOST_SIDE = 2**14  # pixels along an image
# What may differ between the processes that make the same images: where a model is, words for people, and
# gains of drafters, which a process takes from the folder.
_NOT_COMPARED = ("target.name", "vae.name", "method.draft.name", "gains_sha256", "why")
_SAID = {"sampler.known.sha256": "the hash of what stays (--image, --keep)"}


@dataclasses.dataclass(frozen=True)
class Manifest:
    """A job, as JSON.

    format_version: of this file.
    kind: "samples".
    made_by: the version of cspd_jax.
    target: name, weights_sha256 and dtype of the model.
    vae: name and weights_sha256 of the autoencoder that decodes; None without.
    method: name, criterion, options and draft model.
    sampler: settings of the sampler, guidance and temperature.
    seed: of the key of all images.
    first: number of the first image.
    images: how many there are.
    shard_size: images of a shard, but for the first and the last.
    batch: images generated side by side.
    labels: `turn`, the length of the list that labels are taken from in turn: image i has entry i mod turn;
        `listed`, whether it is in labels.npy (otherwise it is 0, 1, 2, ...); its `sha256`, as int32.
    image_shape: H, W, C; empty if images are not stored.
    token_shape: L, d
    tokens: whether tokens are stored.
    gains_sha256: of gains.npz, which the drafters of denoising steps are read from; empty without.
    lossless: whether the method promises the plain sampler's distribution.
    why: one clause, for people.
    """

    format_version: int
    kind: str
    made_by: str
    target: Mapping[str, Any]
    vae: Mapping[str, Any] | None
    method: Mapping[str, Any]
    sampler: Mapping[str, Any]
    seed: int
    first: int
    images: int
    shard_size: int
    batch: int
    labels: Mapping[str, Any]
    image_shape: tuple[int, ...]
    token_shape: tuple[int, ...]
    tokens: bool
    gains_sha256: str
    lossless: bool
    why: str

    def __post_init__(self):
        check_whole("first", self.first, 0, MOST_IMAGES)
        check_whole("images", self.images, 1, MOST_IMAGES)
        check_whole("first + images", self.first + self.images, 1, MOST_IMAGES)
        check_whole("shard_size", self.shard_size, 1, MOST_IMAGES)
        check_whole("batch", self.batch, 1, self.shard_size)
        for name, length, most in (("image_shape", 3, _MOST_SIDE), ("token_shape", 2, limits.IMAGE_TOKENS)):
            shape = getattr(self, name)
            if len(shape) not in ({3, 0} if length == 3 else {2}) or not all(1 <= n <= most for n in shape):
                raise UserError(f"{name} is {shown(list(shape))}; it must be {length} sizes from 1 to {most}")
        if not self.image_shape and not self.tokens:
            raise UserError("it stores neither images nor tokens")

    @property
    def shards(self) -> int:
        """How many there are. Shard boundaries are at multiples of the shard size, wherever a job begins:
        an image then has the same neighbours in every job, and the same bits."""
        return -(-(self.first + self.images) // self.shard_size) - self.first // self.shard_size

    def bounds_of(self, index: int) -> tuple[int, int]:
        """The first image of a shard, and the one after its last."""
        start = (self.first // self.shard_size + index) * self.shard_size
        end = self.first + self.images
        return max(start, self.first), min(start + self.shard_size, end)

    @property
    def job(self) -> str:
        """The SHA-256 of everything that defines the images."""
        told = {name: value for name, value in _flat(self.to_json()) if name not in _NOT_COMPARED}
        return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()

    def to_json(self) -> dict[str, Any]:
        return json.loads(json.dumps(dataclasses.asdict(self)))

    def check_same(self, stored: Manifest, where: object) -> None:
        """UserError if the folder `where` holds other images, or more; the sentence names what differs."""
        here, there = dict(_flat(self.to_json())), dict(_flat(stored.to_json()))
        if stored.images < self.images:
            there["images"] = self.images
        names = sorted(here.keys() | there.keys())
        differ = [n for n in names if n not in _NOT_COMPARED and here.get(n) != there.get(n)]
        if differ:
            told = [
                f"{_SAID.get(n, n)} is {shown(there.get(n))} there and {shown(here.get(n))} here"
                for n in differ[:8]
            ]
            more = f"; and {len(differ) - 8} more" if len(differ) > 8 else ""
            raise UserError(
                f"{where} holds other samples ({'; '.join(told)}{more}); say what was said there, or choose"
                " another --out"
            )


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """("a.b", value) of nested objects."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def is_folder_of_samples(folder: str | os.PathLike) -> bool:
    return (Path(folder) / NAME).is_file()


def read_manifest(folder: str | os.PathLike) -> Manifest:
    """The manifest of a folder of samples; UserError if that is not what it is."""
    path = as_path(folder) / NAME
    values = read_object(path)
    if values.get("kind") != KIND:
        raise UserError(f"{path} is of kind {shown(values.get('kind'))}; that of samples is {KIND!r}")
    if values.get("format_version") != VERSION:
        told = shown(values.get("format_version"))
        raise UserError(f"{path} has format {told}; this version of cspd-jax reads format {VERSION}")
    with naming(path):
        fields = read_fields(Manifest, values, "the manifest")
        for name in ("target", "method", "sampler", "labels", "vae"):
            if not isinstance(fields[name], dict) and not (name == "vae" and fields[name] is None):
                raise UserError(f"{name} is {shown(fields[name])}; it must be an object")
        return Manifest(**fields)
