"""Sets of 8-bit images on disk, the Inception network of FID, and the features that the
network computes from the images."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import json
import os
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from chex import ArrayTree
from PIL import Image
from tqdm import tqdm

from cspd_jax import weights
from cspd_jax._utils.files import files_in, fingerprint
from cspd_jax.check import UserError
from cspd_jax.converters.inception import PUBLISHED_SHA256
from cspd_jax.networks.inception import Features, Inception, InceptionConfig, resize
from cspd_jax.tools import sample
from cspd_jax.training.data.folder import eight_bits


@dataclasses.dataclass(frozen=True)
class ImageSet:
    """A set of uint8 images in a fixed order.

    path: the file or folder of the images.
    count: the number of images.
    shape: the shape of an image.
    each: returns an iterator over the images.
    """

    path: Path
    count: int
    shape: tuple[int, ...]
    each: Callable[[], Iterator[np.ndarray]]

    def batches(self, size: int) -> Iterator[np.ndarray]:
        """Yields batches of `size` images. The last batch may be smaller."""
        images = self.each()
        while some := list(itertools.islice(images, size)):
            yield np.stack(some)


def open_images(path: str | os.PathLike) -> ImageSet:
    """Opens an .npz file with an array arr_0, a folder of `cspd-jax sample` or
    `generate`, or a folder of PNG or JPEG files."""
    path = Path(path)
    if (made := path / "samples.npz").is_file():
        path = made
    if path.suffix == ".npz" and path.is_file():
        with _opened(path) as (_, (count, *shape), dtype):
            if dtype != np.uint8:
                raise UserError(
                    f"{path}: arr_0 is {dtype}; images are uint8 [N, H, W, 3]"
                )
        return ImageSet(path, count, tuple(shape), lambda: _stored(path))
    if (path / sample.MANIFEST).exists():
        each = lambda: (
            image for shard in sample.read(path, "arr_0") for image in shard["arr_0"]
        )
        there = sum(len(shard["labels"]) for shard in sample.read(path, "labels"))
        if there < (
            images := json.loads((path / sample.MANIFEST).read_text())["images"]
        ):
            raise UserError(
                f"{path} holds {there} of {images} images; repeat the command that"
                " began it"
            )
        return ImageSet(path, there, next(each()).shape, each)
    if not (
        files := files_in(path, (".png", ".jpg", ".jpeg")) if path.is_dir() else []
    ):
        raise UserError(
            f"{path} is neither an .npz file with arr_0 nor a folder of images or of"
            " samples"
        )
    return ImageSet(
        path, len(files), _picture(files[0]).shape, lambda: map(_picture, files)
    )


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[tuple[Any, tuple[int, ...], np.dtype]]:
    """Yields the open array arr_0 of an .npz file, with its shape and type. It can be
    read one image at a time."""
    with zipfile.ZipFile(path) as archive, archive.open("arr_0.npy") as member:
        np.lib.format.read_magic(member)
        shape, _, dtype = np.lib.format.read_array_header_1_0(member)
        yield member, shape, dtype


def _stored(path: Path) -> Iterator[np.ndarray]:
    with _opened(path) as (member, (count, *shape), dtype):
        for _ in range(count):
            yield np.frombuffer(member.read(int(np.prod(shape))), dtype).reshape(shape)


def _picture(file: Path) -> np.ndarray:
    with Image.open(file) as opened:
        return np.asarray(eight_bits(opened).convert("RGB"), np.uint8)


class FeatureNetwork(NamedTuple):
    """An Inception network: its configuration, its parameters, and the SHA-256 of the
    file that the parameters come from."""

    config: InceptionConfig
    params: ArrayTree
    sha256: str

    @property
    def published(self) -> bool:
        """Whether the parameters are the published weights, by which FID is defined."""
        return self.sha256 == PUBLISHED_SHA256


def load_network(path: str | os.PathLike) -> FeatureNetwork:
    """Loads a folder that `cspd-jax convert` made from the published file, or from
    another file of the same form."""
    if (kind := weights.read_description(path)["kind"]) != "inception":
        raise UserError(
            f"{path} is of kind {kind}; --inception takes the Inception network of FID"
        )
    loaded = weights.load(path, np.float32)
    told = loaded.metadata.get("source_sha256") or fingerprint(
        loaded.config, loaded.params
    )
    rounded = "" if loaded.metadata.get("dtype") == "float32" else " rounded"
    return FeatureNetwork(loaded.config, loaded.params, f"{told}{rounded}")


@functools.partial(jax.jit, static_argnums=(0, 1))
def _apply(config: InceptionConfig, how: str, params, images) -> ArrayTree:
    return Inception(config).apply({"params": params}, resize(images, how))


def features(
    network: FeatureNetwork, images: ImageSet, batch: int, how: str = "tf1"
) -> Iterator[Features]:
    """Yields the features of all images as numpy arrays, batch by batch in the order of
    the images."""
    # The last batch is padded, so that all batches use one compiled program.
    size = min(batch, images.count)
    with tqdm(
        total=images.count, desc=images.path.name, unit="image", disable=None
    ) as bar:
        for some in images.batches(batch):
            filled = np.concatenate(
                [some, np.zeros((size - len(some), *images.shape), np.uint8)]
            )
            with jax.default_matmul_precision("highest"):
                made = jax.device_get(
                    _apply(network.config, how, network.params, filled)
                )
            yield Features(*[np.asarray(part)[: len(some)] for part in made])  # type: ignore[arg-type]
            bar.update(len(some))
