"""Data sets: rendered glyphs, handwritten digits, folders of images, text."""

from cspd_jax.training.data.digits import Digits, DigitsConfig
from cspd_jax.training.data.folder import Folder, FolderConfig, LatentEncoder
from cspd_jax.training.data.glyphs import GlyphConfig, Glyphs
from cspd_jax.training.data.source import Batch, Source
from cspd_jax.training.data.text import TextConfig, Texts
from cspd_jax.training.data.words import Words, WordsConfig

__all__ = [
    "Batch",
    "Digits",
    "DigitsConfig",
    "Folder",
    "FolderConfig",
    "GlyphConfig",
    "Glyphs",
    "LatentEncoder",
    "Source",
    "TextConfig",
    "Texts",
    "Words",
    "WordsConfig",
]
