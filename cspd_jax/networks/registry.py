"""The kinds of image models: for each the class of its configuration, its functions,
its parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from chex import ArrayTree

from cspd_jax.networks import mar, nextstep, sphere
from cspd_jax.networks.two_parts import TwoPartModel


class ImageKind(NamedTuple):
    """A kind of image model.

    network: (config, dtype) -> its pure functions, an `image.protocol.TokenModel`.
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
    """Returns the kind that a configuration is of."""
    return next(
        name
        for name, kind in IMAGE_KINDS.items()
        if isinstance(config, kind.config_class)
    )


def kind_of(config: object) -> ImageKind:
    return IMAGE_KINDS[kind_name(config)]
