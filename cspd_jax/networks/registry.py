"""The kinds of image models. Each kind has a class of configurations, a network, and
functions that make or describe its parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from chex import ArrayTree

from cspd_jax.networks import mar, nextstep, sphere
from cspd_jax.networks.two_parts import TwoPartModel


class ImageKind(NamedTuple):
    """A kind of image model.

    config_class: the class of its configurations, a frozen dataclass.
    network: maps (config, dtype) to the model's pure functions, an
        `image.protocol.TokenModel`.
    init_params: maps (config, key) to fresh parameters.
    abstract_params: maps a config to a nested dict of ShapeDtypeStruct.
    """

    config_class: type
    network: Callable[..., TwoPartModel]
    init_params: Callable[..., dict]
    abstract_params: Callable[..., ArrayTree]


IMAGE_KINDS = {
    "mar": ImageKind(mar.MARConfig, mar.MARModel, mar.init_params, mar.abstract_params),
    "sphere": ImageKind(
        sphere.SphereConfig,
        sphere.SphereModel,
        sphere.init_params,
        sphere.abstract_params,
    ),
    "nextstep": ImageKind(
        nextstep.NextStepConfig,
        nextstep.NextStepModel,
        nextstep.init_params,
        nextstep.abstract_params,
    ),
}


def kind_name(config: object) -> str:
    """Returns the name of a configuration's kind."""
    return next(
        name
        for name, kind in IMAGE_KINDS.items()
        if isinstance(config, kind.config_class)
    )


def kind_of(config: object) -> ImageKind:
    """Returns the kind of a configuration."""
    return IMAGE_KINDS[kind_name(config)]
