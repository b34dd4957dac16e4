"""The kinds of image models: for each the class of its configuration, its functions,
its parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from cspd_jax.networks import mar, nextstep, sphere
from cspd_jax.networks.mar import MARConfig
from cspd_jax.networks.nextstep import NextStepConfig
from cspd_jax.networks.sphere import SphereConfig


class ImageKind(NamedTuple):
    """A kind of image model.

    network: (config, dtype) -> its pure functions, an `image.protocol.TokenModel`.
    """

    config_class: type
    network: Callable[..., Any]
    init_params: Callable[[Any, Any], Any]
    abstract_params: Callable[[Any], Any]


IMAGE_KINDS = {
    "mar": ImageKind(MARConfig, mar.MARModel, mar.init_params, mar.abstract_params),
    "sphere": ImageKind(
        SphereConfig, sphere.SphereModel, sphere.init_params, sphere.abstract_params
    ),
    "nextstep": ImageKind(
        NextStepConfig,
        nextstep.NextStepModel,
        nextstep.init_params,
        nextstep.abstract_params,
    ),
}


def kind_name(config: Any) -> str:
    """Returns the kind that a configuration is of."""
    return next(
        name
        for name, kind in IMAGE_KINDS.items()
        if isinstance(config, kind.config_class)
    )


def kind_of(config: Any) -> ImageKind:
    return IMAGE_KINDS[kind_name(config)]
