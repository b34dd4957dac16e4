"""Models, each a network with its configuration and its parameters."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from chex import ArrayTree
from jax.sharding import Mesh
from jax.typing import DTypeLike

from cspd_jax.check import UserError, shown
from cspd_jax.networks import autoencoder, mar, nextstep, sphere, sphere_vae
from cspd_jax.networks.eagle import Eagle
from cspd_jax.networks.lm import LM, LMConfig
from cspd_jax.networks.products import by_outputs, gains_by_outputs

ImageConfig: TypeAlias = mar.MARConfig | sphere.SphereConfig | nextstep.NextStepConfig
# The options for which a checkpoint may have values.
SAMPLING = (
    "cfg",
    "cfg_schedule",
    "temperature",
)


@dataclasses.dataclass(frozen=True, eq=False)
class _Model:
    """A network with its parameters.

    name: the name by which the model was loaded.
    network: the pure functions of the model, static under jit.
    params: the parameters, a pytree of arrays.
    metadata: the rest of the checkpoint's config.json.
    folder: the folder of the checkpoint; None without a checkpoint.
    mesh: the mesh on whose devices the parameters lie; None for one device.
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

    network: a `TokenModel`. It has num_classes and respacing in its `config`, or as
        attributes of its own.
    class_names: the name of each class, or empty.
    """

    class_names: tuple[str, ...] = ()

    @property
    def config(self) -> ImageConfig:
        return getattr(self.network, "config", self.network)

    @property
    def sampling(self) -> dict[str, Any]:
        """The sampling options that the checkpoint recommends, possibly none. They are
        used as `Options(**model.sampling)`."""
        found = (self.metadata.get("extra") or {}).get("sampling") or {}
        return {name: found[name] for name in SAMPLING if name in found}

    def class_name(self, label: int) -> str:
        """Returns the caption of a label: the name of the class, or its number if it
        has no name. The caption of -1 is "no class"."""
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
        """The network and its parameters, in the form that is fastest for passes over
        few tokens.

        On a CPU this is a copy in which large kernels lie by outputs. The copy is made
        when the property is first read.
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
    """A head that drafts from its target's hidden states, with its parameters. See
    `text.draft_from_states`."""

    network: Eagle

    @functools.cached_property
    def for_decoding(self) -> tuple[Eagle, ArrayTree]:
        """The network and its parameters, in the same form as
        `TextModel.for_decoding`."""
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


def check_model(model: object, *kinds: type) -> None:
    """Raises UserError unless the model is of one of these kinds."""
    if not isinstance(model, kinds):
        raise UserError(
            f"{shown(model)} is no {kinds[0].__name__}; cspd_jax.load(NAME) returns one"
            " if NAME is the name of such a model"
        )


@dataclasses.dataclass(frozen=True, eq=False)
class VAE:
    """An autoencoder with its parameters, which turns the tokens of an image model into
    pixels. A KL-16 decodes the latents of MAR, and an S-VAE the tokens of SphereAR.

    metadata: the rest of the checkpoint's config.json.
    """

    name: str
    config: autoencoder.KLConfig | sphere_vae.SphereVAEConfig
    params: ArrayTree = dataclasses.field(repr=False)
    dtype: DTypeLike = np.float32
    metadata: dict[str, Any] = dataclasses.field(default_factory=dict, repr=False)
