"""The Inception-v3 network of December 2015, whose features are the basis of FID, sFID
and the Inception score.

Submodules have the names of its PyTorch port (`Mixed_6d/branch7x7_1`). The network
differs from the usual Inception-v3 in three ways: average pooling divides by the number
of pixels without padding, the last block pools by the maximum, and there are 1008
outputs. The network is for inference only: normalisation uses the stored mean and
variance.

The spatial features are the node `mixed_6/conv` of the TensorFlow graph. The graph
counts its blocks as `mixed`, `mixed_1`, ..., so `mixed_6` is the third of the four
blocks at 17x17, which the port calls `Mixed_6d` (torch-fidelity's conversion script has
the same table). `conv` is the block's 1x1 branch after the ReLU, `branch1x1`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from cspd_jax.networks.layers import at_least_float32, described

Array = jax.Array

SIDE = 299  # pixels along one side of the images that the network reads
RESIZE = ("tf1", "pytorch-fid")
_SPATIAL = 7  # channels of the spatial features
_EPS = 1e-3


@dataclasses.dataclass(frozen=True)
class InceptionConfig:
    """The sizes of the network.

    divisor: divides the channels of the published network. It is 1; tests use more.
    classes: the number of outputs of the last layer.
    """

    divisor: int = 1
    classes: int = 1008

    @property
    def features(self) -> int:
        return 2048 // self.divisor

    @property
    def spatial(self) -> int:
        """The number of spatial features, which is 2023 in the published network."""
        return 17 * 17 * max(1, _SPATIAL // self.divisor)


class Features(NamedTuple):
    """The features of N images.

    pool: [N, C] the input of the last layer; C is 2048 in the published network.
    spatial: [N, P] the first 7 channels at 17x17 positions, position by position.
    unbiased: [N, K] the logits of 1008 classes without the last layer's bias, which the
        Inception score reads.
    logits: [N, K] the logits with the bias.
    """

    pool: Array
    spatial: Array
    unbiased: Array
    logits: Array


class Layer(NamedTuple):
    """A convolution.

    name: the name of its module.
    width: the number of output channels in the published network.
    kernel: the height and width of the kernel.
    stride: 1, or 2, which halves the sides and does not pad.
    pad: whether a layer with stride 1 keeps height and width.
    """

    name: str
    width: int
    kernel: tuple[int, int] = (1, 1)
    stride: int = 1
    pad: bool = True


Branch = tuple[Layer | tuple[Layer, ...], ...]


class Block(NamedTuple):
    """Branches side by side, and a pooled branch.

    branches: the layers of each branch, one after another. In place of a layer, a tuple
        of layers runs them side by side.
    pooling: average, max, or halve (3x3 at stride 2, with no layer after it).
    pooled: the width of the layer after the pooling.
    """

    branches: tuple[Branch, ...]
    pooling: str = "average"
    pooled: int = 192


def _branch(name: str, *layers: tuple[int, str], last_stride: int = 1) -> Branch:
    """Makes the layers of a branch.

    name: the name of the layer, or of several layers, which are then numbered from 1.
    layers: the width and the kernel of each layer; "7x1" is 7 pixels high.
    last_stride: the stride of the last layer.
    """
    made = []
    for i, (width, kernel) in enumerate(layers, 1):
        high, wide = map(int, kernel.split("x"))
        stride = last_stride if i == len(layers) else 1
        made.append(
            Layer(
                name if len(layers) == 1 else f"{name}_{i}", width, (high, wide), stride
            )
        )
    return tuple(made)


def _fork(name: str) -> tuple[Layer, Layer]:
    """Makes the two parallel layers at the end of a branch at 8x8."""
    return Layer(f"{name}a", 384, (1, 3)), Layer(f"{name}b", 384, (3, 1))


def _at_35(pooled: int) -> Block:
    return Block(
        (
            _branch("branch1x1", (64, "1x1")),
            _branch("branch5x5", (48, "1x1"), (64, "5x5")),
            _branch("branch3x3dbl", (64, "1x1"), (96, "3x3"), (96, "3x3")),
        ),
        pooled=pooled,
    )


def _at_17(inner: int) -> Block:
    high = (inner, "7x1")
    wide = (inner, "1x7")
    return Block(
        (
            _branch("branch1x1", (192, "1x1")),
            _branch("branch7x7", (inner, "1x1"), wide, (192, "7x1")),
            _branch("branch7x7dbl", (inner, "1x1"), high, wide, high, (192, "1x7")),
        )
    )


def _at_8(pooling: str) -> Block:
    return Block(
        (
            _branch("branch1x1", (320, "1x1")),
            (Layer("branch3x3_1", 384), _fork("branch3x3_2")),
            (
                *_branch("branch3x3dbl", (448, "1x1"), (384, "3x3")),
                _fork("branch3x3dbl_3"),
            ),
        ),
        pooling,
    )


_STEM = (
    Layer("Conv2d_1a_3x3", 32, (3, 3), 2),
    Layer("Conv2d_2a_3x3", 32, (3, 3), pad=False),
    Layer("Conv2d_2b_3x3", 64, (3, 3)),
    Layer("Conv2d_3b_1x1", 80),
    Layer("Conv2d_4a_3x3", 192, (3, 3), pad=False),
)
_POOLED_AFTER = ("Conv2d_2b_3x3", "Conv2d_4a_3x3")
_TO_17 = Block(
    (
        _branch("branch3x3", (384, "3x3"), last_stride=2),
        _branch("branch3x3dbl", (64, "1x1"), (96, "3x3"), (96, "3x3"), last_stride=2),
    ),
    "halve",
)
_TO_8 = Block(
    (
        _branch("branch3x3", (192, "1x1"), (320, "3x3"), last_stride=2),
        _branch(
            "branch7x7x3",
            (192, "1x1"),
            (192, "1x7"),
            (192, "7x1"),
            (192, "3x3"),
            last_stride=2,
        ),
    ),
    "halve",
)
_BLOCKS = {
    "Mixed_5b": _at_35(32),
    "Mixed_5c": _at_35(64),
    "Mixed_5d": _at_35(64),
    "Mixed_6a": _TO_17,
    "Mixed_6b": _at_17(128),
    "Mixed_6c": _at_17(160),
    "Mixed_6d": _at_17(160),
    "Mixed_6e": _at_17(192),
    "Mixed_7a": _TO_8,
    "Mixed_7b": _at_8("average"),
    "Mixed_7c": _at_8("max"),
}
_SPATIAL_BLOCK = "Mixed_6d"


class Norm(nn.Module):
    """Normalises channels by stored statistics."""

    @nn.compact
    def __call__(self, x: Array) -> Array:
        names = (("mean", 0.0), ("var", 1.0), ("scale", 1.0), ("bias", 0.0))
        mean, var, scale, bias = (
            self.param(name, nn.initializers.constant(value), x.shape[-1:], jnp.float32)
            for name, value in names
        )
        wide = at_least_float32(x)
        return ((wide - mean) * (scale * jax.lax.rsqrt(var + _EPS)) + bias).astype(
            x.dtype
        )


class Unit(nn.Module):
    """Applies a convolution, a normalisation and ReLU."""

    layer: Layer
    divisor: int
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x: Array) -> Array:
        spec = self.layer
        x = nn.Conv(
            spec.width // self.divisor,
            spec.kernel,
            strides=spec.stride,
            padding="SAME" if spec.pad and spec.stride == 1 else "VALID",
            use_bias=False,
            dtype=self.dtype,
            name="conv",
        )(x)
        return nn.relu(Norm(name="bn")(x))


class Mixed(nn.Module):
    """Applies a block to [N, H, W, C]. Returns the outputs of its branches, one after
    another in the channels, and the output of the first branch alone."""

    block: Block
    divisor: int
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x: Array) -> tuple[Array, Array]:
        def unit(layer: Layer, x: Array) -> Array:
            return Unit(layer, self.divisor, self.dtype, name=layer.name)(x)

        results = []
        for branch in self.block.branches:
            y = x
            for step in branch:
                fork = (step,) if isinstance(step, Layer) else step
                y = jnp.concatenate([unit(layer, y) for layer in fork], axis=-1)
            results.append(y)
        pooled = _POOLINGS[self.block.pooling](x)
        if self.block.pooling != "halve":
            pooled = unit(Layer("branch_pool", self.block.pooled), pooled)
        return jnp.concatenate([*results, pooled], axis=-1), results[0]


_halve = functools.partial(nn.max_pool, window_shape=(3, 3), strides=(2, 2))
_POOLINGS: dict[str, Callable[[Array], Array]] = {
    "average": lambda x: nn.avg_pool(
        x, (3, 3), (1, 1), "SAME", count_include_pad=False
    ),
    "max": lambda x: nn.max_pool(x, (3, 3), (1, 1), "SAME"),
    "halve": _halve,
}


class Inception(nn.Module):
    """Maps images [N, 299, 299, 3] in about [-1, 1] to Features."""

    config: InceptionConfig
    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, x: Array) -> Features:
        divisor = self.config.divisor
        x = x.astype(self.dtype)
        for layer in _STEM:
            x = Unit(layer, divisor, self.dtype, name=layer.name)(x)
            if layer.name in _POOLED_AFTER:
                x = _halve(x)
        spatial = jnp.zeros((len(x), 0))
        for name, block in _BLOCKS.items():
            x, first = Mixed(block, divisor, self.dtype, name=name)(x)
            if name == _SPATIAL_BLOCK:
                spatial = at_least_float32(first[..., : max(1, _SPATIAL // divisor)])
        pool = at_least_float32(x).mean(axis=(1, 2))
        last = nn.Dense(self.config.classes, name="fc")
        logits = last(pool)
        unbiased = pool @ last.variables["params"]["kernel"]
        return Features(pool, spatial.reshape(len(spatial), -1), unbiased, logits)


def resize(images: Array, how: str = "tf1", dtype=jnp.float32) -> Array:
    """Resizes uint8 images [N, H, W, 1 or 3] to [N, 299, 299, 3] in about [-1, 1]. A
    grey image gets three equal channels.

    With "tf1", pixel i of the result is read at i * (side / 299), by interpolation
    between the two pixels next to this place, and becomes (x - 128) / 128. The
    TensorFlow graph, ADM's evaluator and torch-fidelity do this. With "pytorch-fid",
    the pixel is read at (i + 1/2) * (side / 299) - 1/2 and becomes x / 127.5 - 1.
    Neither way smooths an image before it makes the image smaller.

    For example, with "tf1" and a side of 598, pixel i is read at the place 2 i.
    """
    x = images.astype(dtype)
    for axis in (2, 1):
        below, above, share = _places(images.shape[axis], how)
        shares = jnp.asarray(share, dtype).reshape(
            [-1 if i == axis else 1 for i in range(4)]
        )
        low = jnp.take(x, below, axis)
        high = jnp.take(x, above, axis)
        x = low + (high - low) * shares
    x = (x - 128) / 128 if how == "tf1" else x / 127.5 - 1
    return jnp.broadcast_to(x, (*x.shape[:3], 3))


def _places(side: int, how: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns, for each of 299 pixels, the two pixels between which it lies, and its
    distance from the first of them."""
    index = np.arange(SIDE)
    at = (
        index * (side / SIDE)
        if how == "tf1"
        else np.maximum((index + 0.5) * (side / SIDE) - 0.5, 0)
    )
    below = np.minimum(np.floor(at).astype(int), side - 1)
    return below, np.minimum(below + 1, side - 1), at - below


def init_params(config: InceptionConfig, key: Array) -> dict:
    """Makes fresh parameters."""
    return Inception(config).init(key, jnp.zeros((1, SIDE, SIDE, 3)))["params"]


abstract_params = functools.cache(described(init_params))
