"""Images to be made by one of the samplers, without a model around the network."""

from typing import Any

import jax.numpy as jnp

from cspd_jax.image import Batch, Options, Plain, resolve
from cspd_jax.image.recipe import Draft
from cspd_jax.models import ImageModel


def batch_of(
    network: Any,
    params: Any,
    keys: Any,
    labels: Any,
    options: Options,
    draft: Draft | None = None,
    **injected: Any,
) -> Batch:
    """Returns a batch whose drafters of denoising steps are not calibrated."""
    model = ImageModel("tests", network, params)
    labels = jnp.asarray(labels)
    recipe = resolve(model, Plain(), options, len(labels))
    return Batch(network, Plain(), params, keys, labels, recipe, draft, **injected)
