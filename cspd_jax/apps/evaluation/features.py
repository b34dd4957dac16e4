"""The Inception network with its weights, and the features it finds in a set of images."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from cspd_jax import weights
from cspd_jax.apps.evaluation.image_files import ImageSet
from cspd_jax.converters.inception import PUBLISHED_SHA256
from cspd_jax.converters.source import convert, digest, make_config, open_source
from cspd_jax.errors import UserError
from cspd_jax.networks.inception import Features, Inception, InceptionConfig, resize


@dataclasses.dataclass(frozen=True, eq=False)
class FeatureNetwork:
    """An Inception network with its parameters.

    path: where it was read from.
    config: its sizes.
    params: in float32.
    sha256: of the file that the weights come from; of the parameters, if nothing says which file that was.
    exact: whether they have been float32 all the way.
    """

    path: Path
    config: InceptionConfig
    params: Any
    sha256: str
    exact: bool = True

    @property
    def published(self) -> bool:
        """Whether these are the weights that FID is defined by, by the file's digest."""
        return self.exact and self.sha256 == PUBLISHED_SHA256

    def identity(self, how: str) -> str:
        """What features depend on: the weights, and how images were resized."""
        return f"{self.sha256}{'' if self.exact else ' rounded'} {how}"


def load_network(path: str | os.PathLike) -> FeatureNetwork:
    """From a folder made by `cspd-jax convert`, or from the published file itself."""
    path = Path(path)
    if not path.is_dir():
        source = open_source(path)
        _check_kind(source.kind, path)
        config = make_config(source)
        params = jax.tree.map(jnp.asarray, convert(source, config))
        return FeatureNetwork(path, config, params, digest(source))
    _check_kind(weights.read_description(path)["kind"], path)
    loaded = weights.load(path, np.float32)
    told = loaded.metadata.get("source_sha256") or loaded.metadata.get("params_sha256")
    exact = loaded.metadata.get("dtype") == "float32"
    return FeatureNetwork(path, loaded.config, loaded.params, str(told), exact)


def _check_kind(kind: str, path: Path) -> None:
    if kind != "inception":
        raise UserError(f"{path} is of kind {kind}; --inception takes the Inception network of FID")


@functools.partial(jax.jit, static_argnums=(0, 1))
def _apply(config: InceptionConfig, how: str, params, images) -> Features:
    made: Any = Inception(config).apply({"params": params}, resize(images, how))
    return made


def features(
    network: FeatureNetwork, images: ImageSet, batch: int, how: str = "tf1", progress: bool = False
) -> Iterator[Features]:
    """The features of all images in their order, a batch at a time, as numpy arrays."""
    size = 0
    with tqdm(total=images.count, desc=images.path.name, unit="image", disable=not progress) as bar:
        for some in images.batches(batch):
            size = max(size, len(some))  # the last batch is filled up, so that one program serves all
            filled = np.concatenate([some, np.zeros((size - len(some), *images.shape), np.uint8)])
            with jax.default_matmul_precision("highest"):
                made = jax.device_get(_apply(network.config, how, network.params, filled))
            rows: list[Any] = [np.asarray(part)[: len(some)] for part in made]
            if not all(np.isfinite(part).all() for part in rows):
                raise UserError(f"{network.path} gives NaN or infinity on images of {images.path}")
            yield Features(*rows)
            bar.update(len(some))
