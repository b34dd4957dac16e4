"""Images to be made by one of the samplers, without a model around the network."""

import jax.numpy as jnp

from cspd_jax.image import Batch, Plain, resolve
from cspd_jax.models import ImageModel


def batch_of(network, params, keys, labels, options, draft=None, **injected):
    """Returns a batch whose drafters of denoising steps are not calibrated."""
    model = ImageModel("tests", network, params)
    labels = jnp.asarray(labels)
    recipe = resolve(model, Plain(), options, len(labels))
    return Batch(network, Plain(), params, keys, labels, recipe, draft, **injected)
