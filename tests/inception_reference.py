"""The FID Inception network in plain PyTorch, with random weights that numpy alone can make again.

It has the sizes of the Inception-v3 paper, the names of the published file, and the three deviations of the
TensorFlow graph of December 2015: average pooling that does not count padding, maximum pooling in the last
block, and 1008 outputs.
"""

from __future__ import annotations

import zlib

import numpy as np

SEED = 20151205
# The blocks: name -> (pooling, width of the pooled branch, branches of (name, width, kernel, stride)).
# A tuple of layers in the place of one runs them side by side.
_A = (
    [("branch1x1", 64, (1, 1), 1)],
    [("branch5x5_1", 48, (1, 1), 1), ("branch5x5_2", 64, (5, 5), 1)],
    [("branch3x3dbl_1", 64, (1, 1), 1), ("branch3x3dbl_2", 96, (3, 3), 1), ("branch3x3dbl_3", 96, (3, 3), 1)],
)
_B = (
    [("branch3x3", 384, (3, 3), 2)],
    [("branch3x3dbl_1", 64, (1, 1), 1), ("branch3x3dbl_2", 96, (3, 3), 1), ("branch3x3dbl_3", 96, (3, 3), 2)],
)
_D = (
    [("branch3x3_1", 192, (1, 1), 1), ("branch3x3_2", 320, (3, 3), 2)],
    [
        ("branch7x7x3_1", 192, (1, 1), 1),
        ("branch7x7x3_2", 192, (1, 7), 1),
        ("branch7x7x3_3", 192, (7, 1), 1),
        ("branch7x7x3_4", 192, (3, 3), 2),
    ],
)
_E = (
    [("branch1x1", 320, (1, 1), 1)],
    [("branch3x3_1", 384, (1, 1), 1), (("branch3x3_2a", 384, (1, 3), 1), ("branch3x3_2b", 384, (3, 1), 1))],
    [("branch3x3dbl_1", 448, (1, 1), 1), ("branch3x3dbl_2", 384, (3, 3), 1),
     (("branch3x3dbl_3a", 384, (1, 3), 1), ("branch3x3dbl_3b", 384, (3, 1), 1))],
)  # fmt: skip


def _c(inner: int):
    return (
        [("branch1x1", 192, (1, 1), 1)],
        [("branch7x7_1", inner, (1, 1), 1), ("branch7x7_2", inner, (1, 7), 1),
         ("branch7x7_3", 192, (7, 1), 1)],
        [("branch7x7dbl_1", inner, (1, 1), 1), ("branch7x7dbl_2", inner, (7, 1), 1),
         ("branch7x7dbl_3", inner, (1, 7), 1), ("branch7x7dbl_4", inner, (7, 1), 1),
         ("branch7x7dbl_5", 192, (1, 7), 1)],
    )  # fmt: skip


BLOCKS = {
    "Mixed_5b": ("average", 32, _A),
    "Mixed_5c": ("average", 64, _A),
    "Mixed_5d": ("average", 64, _A),
    "Mixed_6a": ("halve", None, _B),
    "Mixed_6b": ("average", 192, _c(128)),
    "Mixed_6c": ("average", 192, _c(160)),
    "Mixed_6d": ("average", 192, _c(160)),
    "Mixed_6e": ("average", 192, _c(192)),
    "Mixed_7a": ("halve", None, _D),
    "Mixed_7b": ("average", 192, _E),
    "Mixed_7c": ("max", 192, _E),
}
STEM = (
    ("Conv2d_1a_3x3", 3, 32, 3, 2, 0),
    ("Conv2d_2a_3x3", 32, 32, 3, 1, 0),
    ("Conv2d_2b_3x3", 32, 64, 3, 1, 1),
    ("Conv2d_3b_1x1", 64, 80, 1, 1, 0),
    ("Conv2d_4a_3x3", 80, 192, 3, 1, 0),
)


def shapes(divisor: int = 1, classes: int = 1008) -> dict[str, tuple[int, ...]]:
    """name -> shape of every tensor that matters; `divisor` makes a narrower network."""
    found: dict[str, tuple[int, ...]] = {}

    def add(name: str, entering: int, leaving: int, kernel: tuple[int, int]) -> None:
        found[f"{name}.conv.weight"] = (leaving, entering, *kernel)
        for leaf in ("weight", "bias", "running_mean", "running_var"):
            found[f"{name}.bn.{leaf}"] = (leaving,)

    for name, entering, leaving, side, _, _ in STEM:
        entering = entering if entering == 3 else entering // divisor
        add(name, entering, leaving // divisor, (side, side))
    channels = 192 // divisor
    for block, (_, pooled, branches) in BLOCKS.items():
        total = channels if pooled is None else pooled // divisor
        for branch in branches:
            width = channels
            for step in branch:
                side_by_side = step if isinstance(step[0], tuple) else (step,)
                for name, leaving, kernel, _ in side_by_side:
                    add(f"{block}.{name}", width, leaving // divisor, kernel)
                width = sum(leaving // divisor for _, leaving, _, _ in side_by_side)
            total += width
        if pooled is not None:
            add(f"{block}.branch_pool", channels, pooled // divisor, (1, 1))
        channels = total
    return {**found, "fc.weight": (classes, channels), "fc.bias": (classes,)}


def weights(divisor: int = 1, classes: int = 1008) -> dict[str, np.ndarray]:
    """Random float32 tensors; each depends on its name and shape alone."""
    return {name: _random(name, shape) for name, shape in shapes(divisor, classes).items()}


def _random(name: str, shape: tuple[int, ...]) -> np.ndarray:
    rng = np.random.default_rng([SEED, zlib.crc32(name.encode())])
    if name.endswith("running_var"):
        return rng.uniform(0.5, 1.5, shape).astype(np.float32)
    if len(shape) == 1:
        around = 1.0 if name.endswith("bn.weight") else 0.0
        return (around + 0.1 * rng.standard_normal(shape)).astype(np.float32)
    fan_in = int(np.prod(shape[1:]))
    spread = (2 / fan_in) ** 0.5 if len(shape) == 4 else 4 / fan_in**0.5
    return rng.standard_normal(shape, np.float32) * np.float32(spread)


def images(count: int = 2, height: int = 40, width: int = 56) -> np.ndarray:
    """uint8 [N, H, W, 3]: waves of different lengths with noise."""
    rng = np.random.default_rng(SEED)
    y, x = np.mgrid[:height, :width]
    made = []
    for i in range(count):
        phase = rng.uniform(0, 6.28, 3)
        wave = np.sin(x[..., None] / (3 + 4 * i) + y[..., None] / (5 + i) + phase)
        made.append(128 + 90 * wave + 20 * rng.standard_normal((height, width, 3)))
    return np.clip(np.stack(made), 0, 255).astype(np.uint8)


def resized(images: np.ndarray, how: str):
    """uint8 [N, H, W, 3] -> float64 torch tensor [N, 3, 299, 299]."""
    import torch
    from torch.nn import functional

    x = torch.as_tensor(images).permute(0, 3, 1, 2).double()
    if how == "pytorch-fid":
        x = functional.interpolate(x / 255, size=(299, 299), mode="bilinear", align_corners=False)
        return 2 * x - 1
    return (_as_tensorflow_1(_as_tensorflow_1(x, 2), 3) - 128) / 128


def _as_tensorflow_1(x, axis: int):
    """Output i is read at i * (size / 299), and beyond the last pixel is the last pixel."""
    import torch

    size = x.shape[axis]
    at = torch.arange(299, dtype=torch.float64) * (size / 299)
    below = at.floor().long()
    above = torch.clamp(below + 1, max=size - 1)
    share = (at - below).reshape([-1 if i == axis else 1 for i in range(4)])
    return x.index_select(axis, below) * (1 - share) + x.index_select(axis, above) * share


def outputs(weights: dict[str, np.ndarray], x, average_counts_padding: bool = False) -> dict[str, np.ndarray]:
    """Of resized images: pool [N, 2048], spatial [N, 2023], logits without and with the bias."""
    import torch
    from torch.nn import functional

    w = {name: torch.as_tensor(array).to(x.dtype) for name, array in weights.items()}

    def unit(x, name, stride=1, padding=0):
        x = functional.conv2d(x, w[f"{name}.conv.weight"], stride=stride, padding=padding)
        norm = (w[f"{name}.bn.{leaf}"] for leaf in ("running_mean", "running_var", "weight", "bias"))
        return functional.relu(functional.batch_norm(x, *norm, training=False, eps=1e-3))

    def layer(x, block, spec):
        name, _, (height, width), stride = spec
        return unit(x, f"{block}.{name}", stride, (height // 2, width // 2) if stride == 1 else 0)

    spatial = None
    for name, _, _, _, stride, padding in STEM:
        x = unit(x, name, stride, padding)
        if name in ("Conv2d_2b_3x3", "Conv2d_4a_3x3"):
            x = functional.max_pool2d(x, 3, 2)
    for block, (pooling, _, branches) in BLOCKS.items():
        results = []
        for branch in branches:
            y = x
            for step in branch:
                fork = step if isinstance(step[0], tuple) else (step,)
                y = torch.cat([layer(y, block, spec) for spec in fork], 1)
            results.append(y)
        if block == "Mixed_6d":
            spatial = results[0][:, :7].permute(0, 2, 3, 1).reshape(len(x), -1)
        if pooling == "halve":
            results.append(functional.max_pool2d(x, 3, 2))
        elif pooling == "max":
            results.append(unit(functional.max_pool2d(x, 3, 1, 1), f"{block}.branch_pool"))
        else:
            pooled = functional.avg_pool2d(x, 3, 1, 1, count_include_pad=average_counts_padding)
            results.append(unit(pooled, f"{block}.branch_pool"))
        x = torch.cat(results, 1)
    pool = x.mean((2, 3))
    unbiased = pool @ w["fc.weight"].T
    found = {"pool": pool, "spatial": spatial, "unbiased": unbiased, "logits": unbiased + w["fc.bias"]}
    return {name: value.numpy() for name, value in found.items()}
