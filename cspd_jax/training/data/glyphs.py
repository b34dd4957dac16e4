"""An endless, seeded data set of rendered digits and letters with randomly deformed
outlines.

A glyph is stored as a signed distance field d, which is made once from a font that
matplotlib ships. To draw a picture, d is sampled at points that are displaced by an
affine and an elastic map. A soft threshold on d + weight then gives an anti-aliased
picture of any stroke weight. No font is rendered again, so one core makes thousands of
images a second.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from cspd_jax.training.data.source import Batch, Split, generator

FIELD = 64  # samples along one side of a stored distance field
MARGIN = 12  # samples between the glyph's box and the edge of the field, on every side
_FINE = 8  # the factor by which a rendered glyph is finer than its distance field
_ELASTIC_GRID = 4  # knots along one side of the elastic map

# How much glyphs vary. Lengths are in pixels of the finished image.
_EXTENT = 26 / 32  # the longer side of a glyph's box, as a share of the image's side
_ROTATION = 8.0  # the largest rotation, in degrees
_SHEAR = 0.1  # the largest shear, as a tangent
_STRETCH = 0.08  # the largest change of a side's logarithm
_SHIFT = 1.0  # the largest shift
_ELASTIC = 0.5  # standard deviation of the displacement of the knots of a 4 x 4 grid
_BOLD = 0.25  # the mean number that is added to the stroke's half width
_WEIGHT = 0.35  # the largest deviation of that number from its mean
_CONTRAST = 0.2  # how far ink and background may be from the ends of [-1, 1]
_GRADIENT = 0.1  # the largest difference of the background from centre to edge
_GRAIN = 0.02  # standard deviation of the noise on every pixel


@dataclasses.dataclass(frozen=True)
class Glyphs:
    """A data set of characters. Classes and fonts are drawn uniformly.

    classes: the characters, each of which is one class.
    fonts: the names of font files that matplotlib ships.
    size: the side of the square images, in pixels.
    """

    classes: str = "0123456789"
    fonts: tuple[str, ...] = (
        "DejaVuSans",
        "DejaVuSans-Bold",
        "DejaVuSerif",
        "STIXGeneral",
        "cmr10",
        "cmss10",
    )
    size: int = 32

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.size, self.size, 1

    @property
    def class_names(self) -> tuple[str, ...]:
        return tuple(self.classes)

    def batch(
        self, index: int, size: int, *, seed: int = 0, split: Split = "train"
    ) -> Batch:
        random = generator(seed, split, index)
        labels = random.integers(len(self.classes), size=size)
        fonts = random.integers(len(self.fonts), size=size)
        rows, columns = _places(random, size, self.size)
        fields = distance_fields(self.classes, self.fonts)
        distance = bilinear(fields, labels * len(self.fonts) + fonts, rows, columns)
        distance *= _EXTENT * self.size / (FIELD - 2 * MARGIN)
        weight = random.uniform(_BOLD - _WEIGHT, _BOLD + _WEIGHT, (size, 1, 1)).astype(
            np.float32
        )
        images = _colour(random, np.clip(0.5 + distance + weight, 0, 1))
        return Batch(images[..., None], labels.astype(np.int32))


def _places(
    random: np.random.Generator, size: int, side: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the point of the distance field that each pixel samples: its row [B,
    side, side] and its column [B, side, side]."""
    angle = np.deg2rad(random.uniform(-_ROTATION, _ROTATION, size))
    shear = random.uniform(-_SHEAR, _SHEAR, size)
    stretch = np.exp(random.uniform(-_STRETCH, _STRETCH, (2, size)))
    shift = random.uniform(-_SHIFT, _SHIFT, (2, size, 1, 1)).astype(np.float32)
    rotate = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    slant = np.array([[np.ones(size), np.zeros(size)], [shear, np.ones(size)]])
    matrix = np.einsum("ijb,jkb->bik", rotate, slant) * stretch.T[:, None, :]

    centred = (np.arange(side) + 0.5 - side / 2).astype(np.float32)
    bend = _smooth_interpolation(side, _ELASTIC_GRID)
    knots = random.normal(0, _ELASTIC, (2, size, _ELASTIC_GRID, _ELASTIC_GRID)).astype(
        np.float32
    )
    moved = np.einsum("ri,abij,cj->abrc", bend, knots, bend, optimize=True)
    y = centred[:, None] + shift[0] + moved[0]
    x = centred + shift[1] + moved[1]
    m = (matrix * (FIELD - 2 * MARGIN) / (_EXTENT * side)).astype(np.float32)[
        :, :, :, None, None
    ]
    middle = np.float32(FIELD / 2 - 0.5)
    return m[:, 0, 0] * y + m[:, 0, 1] * x + middle, m[:, 1, 0] * y + m[
        :, 1, 1
    ] * x + middle


@functools.lru_cache(maxsize=8)
def _smooth_interpolation(points: int, knots: int) -> np.ndarray:
    """Returns weights [points, knots] that turn values at equally spaced knots into a
    smooth curve. Each row sums to 1."""
    distance = np.linspace(0, knots - 1, points)[:, None] - np.arange(knots)
    weights = np.exp(-0.5 * (distance / 0.6) ** 2)
    return (weights / weights.sum(axis=1, keepdims=True)).astype(np.float32)


def bilinear(
    fields: np.ndarray, which: np.ndarray, rows: np.ndarray, columns: np.ndarray
) -> np.ndarray:
    """Samples the field fields[which[b]] at the points (rows, columns), each [B, H, W],
    by bilinear interpolation. Returns [B, H, W]. Points outside are clamped to the
    border.

    fields: [N, FIELD, FIELD] the distance fields.
    which: [B] the number of the field for each image.
    """
    side = fields.shape[-1]
    rows = np.clip(rows, 0, side - 1.001)
    columns = np.clip(columns, 0, side - 1.001)
    top = rows.astype(np.int32)
    left = columns.astype(np.int32)
    down = rows - top
    right = columns - left
    flat = fields.reshape(-1)
    corner = which[:, None, None].astype(np.int32) * (side * side) + top * side + left
    upper = flat[corner] * (1 - right) + flat[corner + 1] * right
    lower = flat[corner + side] * (1 - right) + flat[corner + side + 1] * right
    return upper * (1 - down) + lower * down


def _colour(random: np.random.Generator, ink: np.ndarray) -> np.ndarray:
    """Returns pictures [B, H, W] in [-1, 1] that have bright ink on a dark background
    with a gentle slope. `ink` [B, H, W] is the share of each pixel that ink covers."""
    size = ink.shape[0]
    side = ink.shape[1]
    background = random.uniform(-1 + _GRAIN, -1 + _CONTRAST, (size, 1, 1))
    foreground = random.uniform(1 - _CONTRAST, 1 - _GRAIN, (size, 1, 1))
    slope = random.uniform(-_GRADIENT, _GRADIENT, (2, size, 1, 1))
    ramp = np.linspace(-1, 1, side)
    background = (
        background + (slope[0] * ramp[:, None] + slope[1] * ramp) / 2 + _GRADIENT
    )
    grain = random.standard_normal(ink.shape, dtype=np.float32) * np.float32(_GRAIN)
    return np.clip(background + ink * (foreground - background) + grain, -1, 1).astype(
        np.float32
    )


@functools.lru_cache(maxsize=8)
def distance_fields(characters: str, fonts: tuple[str, ...]) -> np.ndarray:
    """Returns [characters * fonts, FIELD, FIELD], the distance field of each character
    in each font. The fonts of one character are adjacent."""
    return np.stack(
        [distance_field(font, character) for character in characters for font in fonts]
    )


def distance_field(font: str, character: str) -> np.ndarray:
    """Returns [FIELD, FIELD] float32, the signed distance of each sample to the glyph's
    outline, positive inside the glyph.

    The glyph is centred. The longer side of its tight box is FIELD - 2 MARGIN samples.
    Distances are in samples. A blank has no outline, so all its distances are -FIELD.
    """
    from scipy.ndimage import distance_transform_edt

    if character == " ":
        return np.full((FIELD, FIELD), -np.float32(FIELD))
    ink = _rendered(font, character)
    rows = np.nonzero(ink.any(axis=1))[0]
    columns = np.nonzero(ink.any(axis=0))[0]
    box = ink[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    inner = (FIELD - 2 * MARGIN) * _FINE
    scale = inner / max(box.shape)
    shape = [max(1, round(side * scale)) for side in box.shape]
    resized = Image.fromarray(box.astype(np.uint8) * 255).resize(
        shape[::-1], Image.Resampling.BILINEAR
    )
    fine = np.zeros((FIELD * _FINE, FIELD * _FINE), bool)
    top, left = ((FIELD * _FINE - side) // 2 for side in shape)
    fine[top : top + shape[0], left : left + shape[1]] = np.asarray(resized) > 127
    signed = distance_transform_edt(fine) - distance_transform_edt(~fine)
    # The mean over a block puts sample k at the block's centre, (k + 1/2) _FINE.
    coarse = signed.reshape(FIELD, _FINE, FIELD, _FINE).mean(axis=(1, 3)) / _FINE
    return coarse.astype(np.float32)


def _rendered(font: str, character: str) -> np.ndarray:
    """Returns a large picture of the character in one of matplotlib's fonts, bool [2
    FIELD _FINE, 2 FIELD _FINE], true where there is ink."""
    import matplotlib

    side = 2 * FIELD * _FINE
    canvas = Image.new("L", (side, side))
    file = pathlib.Path(matplotlib.get_data_path(), "fonts", "ttf", f"{font}.ttf")
    face = ImageFont.truetype(str(file), side // 2)
    ImageDraw.Draw(canvas).text(
        (side // 2, side // 2), character, fill=255, font=face, anchor="mm"
    )
    return np.asarray(canvas) > 127
