"""Models: a network with its configuration and its parameters."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from chex import ArrayTree
from jax.sharding import Mesh
from jax.typing import DTypeLike

from cspd_jax.networks import autoencoder, mar, nextstep, sphere, sphere_vae
from cspd_jax.networks.eagle import Eagle
from cspd_jax.networks.lm import LM, LMConfig
from cspd_jax.networks.products import by_outputs, gains_by_outputs

ImageConfig: TypeAlias = mar.MARConfig | sphere.SphereConfig | nextstep.NextStepConfig
# The options that a checkpoint may have values for.
SAMPLING = (
    "cfg",
    "cfg_schedule",
    "temperature",
)


@dataclasses.dataclass(frozen=True, eq=False)
class _Model:
    """A network with its parameters.

    name: what it was loaded by.
    network: its pure functions, static under jit.
    params: pytree of arrays.
    metadata: the rest of its config.json.
    folder: its checkpoint's, if it has one.
    mesh: the devices that its parameters lie on; None is one device.
    """

    name: str
    network: Any
    params: ArrayTree = dataclasses.field(repr=False)
    metadata: dict[str, Any] = dataclasses.field(default_factory=dict, repr=False)
    folder: Path | None = None
    mesh: Mesh | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class ImageModel(_Model):
    """An image model with its parameters: a MAR or causal model, or your own.

    network: a `TokenModel`. Either it has a `config` with num_classes and respacing, or
        these are its own attributes.
    class_names: one per class, or empty.
    """

    class_names: tuple[str, ...] = ()

    @property
    def config(self) -> ImageConfig:
        return getattr(self.network, "config", self.network)

    @property
    def sampling(self) -> dict[str, Any]:
        """Returns what its checkpoint says of its sampling:
        `Options(**model.sampling)`; perhaps nothing."""
        found = (self.metadata.get("extra") or {}).get("sampling") or {}
        return {name: found[name] for name in SAMPLING if name in found}

    def class_name(self, label: int) -> str:
        """Returns the caption of a label: the class's name, its number, or "no class"
        for -1."""
        if label < 0:
            return "no class"
        return self.class_names[label] if self.class_names else str(label)


@dataclasses.dataclass(frozen=True, eq=False)
class TextModel(_Model):
    """A language model with its parameters."""

    network: LM

    @property
    def config(self) -> LMConfig:
        return self.network.config

    @functools.cached_property
    def for_decoding(self) -> tuple[LM, ArrayTree]:
        """Returns the network and its parameters as passes over few tokens want them.

        On a CPU large kernels lie by outputs, in a copy that is made when this is first
        asked for.
        """
        if self.mesh is not None or not gains_by_outputs(
            self.params, self.network.dtype
        ):
            return self.network, self.params
        return dataclasses.replace(self.network, by_outputs=True), by_outputs(
            self.params
        )


@dataclasses.dataclass(frozen=True, eq=False)
class HeadModel(_Model):
    """A head that drafts from its target's states, with its parameters: see
    `text.draft_from_states`."""

    network: Eagle

    @functools.cached_property
    def for_decoding(self) -> tuple[Eagle, ArrayTree]:
        """Returns the network and its parameters as `TextModel.for_decoding` does."""
        floats = {
            name: part
            for name, part in self.params.items()
            if name not in ("ids", "embedding")
        }
        if not gains_by_outputs(floats, self.network.dtype):
            return self.network, self.params
        return dataclasses.replace(self.network, by_outputs=True), {
            **self.params,
            **by_outputs(floats),
        }


@dataclasses.dataclass(frozen=True, eq=False)
class VAE:
    """An autoencoder with its parameters; turns what models make into pixels: a KL-16
    the latents of MAR, an S-VAE the tokens of SphereAR.

    metadata: the rest of its config.json.
    """

    name: str
    config: autoencoder.KLConfig | sphere_vae.SphereVAEConfig
    params: ArrayTree = dataclasses.field(repr=False)
    dtype: DTypeLike = np.float32
    metadata: dict[str, Any] = dataclasses.field(default_factory=dict, repr=False)
