"""What the page shows to begin with a picture, and what a browser sends of it."""

from __future__ import annotations

import importlib.resources
import json
from typing import Any

from cspd_jax.apps.service import repaint
from cspd_jax.errors import UserError
from cspd_jax.image.known import Known
from cspd_jax.image.regions import size_of
from cspd_jax.weights.models import VAE, ImageModel

_SHOWN = 384  # pixels of the longer side, on the screen
# Gradio's values of the fields -> the same, the last of them what is drawn.
READ = "(...values) => [...values.slice(0, -1), window.cspdBrush.drawn()]"


def script() -> str:
    """For the head of the page."""
    code = importlib.resources.files(__package__).joinpath("brush.js").read_text()
    return f"<script>{code}</script>"


def board(model: ImageModel) -> str:
    """A canvas of the model's size, and its buttons."""
    height, width = size_of(model)
    side = model.config.patch_size * model.config.vae_stride
    scale = _SHOWN / max(height, width)
    shown = f"width: {width * scale:g}px; height: {height * scale:g}px"
    return (
        f'<canvas id="cspd-board" width="{width}" height="{height}" data-side="{side}" style="{shown};'
        ' image-rendering: pixelated; touch-action: none; background: #e1e1e1; cursor: crosshair"></canvas>'
        '<p><button id="cspd-last">Take the last image</button>'
        ' <label>or a file: <input type="file" id="cspd-file" accept="image/*"></label>'
        ' <label>brush <input type="range" id="cspd-reach" min="1" max="4" value="1"></label>'
        ' <button id="cspd-whole">Begin with nothing</button></p>'
        f"<p>Painted tokens of {side} x {side} pixels are made anew, the others stay bit for bit. A picture"
        " of another size is scaled.</p>"
    )


def from_page(model: ImageModel, vae: VAE | None, drawn: Any) -> Known | None:
    """What the script sent; None if the image begins with nothing."""
    if not drawn:
        return None
    try:
        fields = json.loads(drawn)
    except (TypeError, ValueError, RecursionError):
        fields = None
    if not isinstance(fields, dict) or not fields.keys() <= set(repaint.FIELDS):
        raise UserError("the picture of the page cannot be read; load the page again")
    known = repaint.from_fields(model, vae, fields)
    if known is not None and known.mask.all():
        raise UserError("nothing of the picture is painted over; paint what is to be made anew")
    return known
