"""`--image` and `--keep`: a picture of which a part stays while the rest is generated."""

from __future__ import annotations

import argparse
import os
from typing import Any, NamedTuple

from cspd_jax.cli._output import progress
from cspd_jax.errors import UserError

_FORMATS = ("PNG", "JPEG")  # without this Pillow goes by the content, and may start programs
_SUFFIXES = (".png", ".jpg", ".jpeg")
_MOST = 10_000  # pictures of a folder, which are held at once
_WHITE = 128


def add_known_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("from a picture (inpainting)")
    group.add_argument(
        "--image",
        metavar="FILE",
        help="a PNG or JPEG of the model's size to start from; or a folder of them, or the samples.npz of a"
        " run, whose images are taken in turn",
    )
    group.add_argument(
        "--keep",
        metavar="REGION",
        help="what of it stays; the rest is generated given that. top-half, bottom-half, left-half,"
        " right-half, border, a box x0,y0,x1,y1 in pixels, a share of the tokens such as 50%%, a black and"
        " white picture (white stays), or a folder of one for each picture, of the same name. A token stays"
        " if all of its pixels do",
    )
    group.add_argument(
        "--resize", action="store_true", help="scale a picture of another size, which is refused otherwise"
    )


class Start(NamedTuple):
    """What the images start from.

    pictures: uint8 [M, H, W, C]; None if there are tokens.
    tokens: [M, L, d] of a run; None if there are pictures.
    mask: [L] tokens that stay, or [M, L].
    """

    pictures: Any
    tokens: Any
    mask: Any

    def known(self, model, vae):
        """The pictures' tokens, and what of them stays."""
        import numpy as np

        from cspd_jax.image import Known, pixels

        tokens = self.tokens if self.pictures is None else pixels.to_tokens(model, self.pictures, vae)
        return Known(tokens, np.broadcast_to(self.mask, np.shape(tokens)[:2]))

    def outline(self, model):
        """The same before the model has its parameters: of tokens that are zero."""
        import numpy as np

        from cspd_jax.image import Known

        count = len(self.tokens if self.pictures is None else self.pictures)
        shape = (count, model.network.seq_len, model.network.token_dim)
        return Known(np.zeros(shape, np.float32), np.broadcast_to(self.mask, shape[:2]))


def read_start(args: argparse.Namespace, model) -> Start | None:
    """What --image and --keep say, for a model that may have no parameters yet; None without --image."""
    if args.image is None:
        flag = "--keep" if args.keep is not None else "--resize" if args.resize else None
        if flag:
            raise UserError(f"{flag} is about the picture of --image; name one")
        return None
    if args.keep is None:
        raise UserError("say with --keep what of the picture stays, for example --keep left-half")
    import numpy as np

    from cspd_jax.image.regions import NAMES, size_of

    height, width = size_of(model)
    files, pictures, tokens = _pictures_in(args.image), None, None
    if args.image.endswith(".npz"):
        tokens = _tokens(args.image, model)
    else:
        channels = model.config.latent_channels if model.config.vae_stride == 1 else 3
        mode = "L" if channels == 1 else "RGB"
        pictures = np.stack([_read(file, (width, height), mode, args.resize) for file in files])
    if os.path.isdir(args.keep) and args.keep not in NAMES:
        beside = (os.path.join(args.keep, os.path.basename(file)) for file in files)
        mask = np.stack([_whites(file, model, args.resize) for file in beside])
    else:
        mask = _mask(args.keep, model, args)
    if not mask.any():
        raise UserError(
            f"--keep {args.keep} keeps no whole token of the picture; keep more, or leave --image out"
        )
    if mask.all():
        progress("note: all tokens are kept, so the picture comes out as it is")
    return Start(pictures, tokens, mask)


def _pictures_in(path: str) -> list[str]:
    """The pictures of a folder, by name; or the one that it is."""
    if not os.path.isdir(path):
        return [path]
    names = sorted(name for name in os.listdir(path) if name.lower().endswith(_SUFFIXES))
    if not names:
        raise UserError(f"{path!r} holds no pictures; give a PNG or JPEG, or a folder of them")
    if len(names) > _MOST:
        raise UserError(f"{path!r} holds {len(names)} pictures; give at most {_MOST} at a time")
    return [os.path.join(path, name) for name in names]


def _mask(region: str, model, args: argparse.Namespace):
    """The tokens [L] that a region, or a black and white picture, keeps."""
    from cspd_jax.image.regions import NAMES, keep

    if region in NAMES or region.endswith("%") or not os.path.lexists(region):
        return keep(region, model, args.seed)
    return _whites(region, model, args.resize)


def _whites(file: str, model, resize: bool):
    from cspd_jax.image.regions import keep, size_of

    height, width = size_of(model)
    return keep(_read(file, (width, height), "L", resize)[..., 0] >= _WHITE, model)


def _read(file: str, size: tuple[int, int], mode: str, resize: bool):
    """uint8 [H, W, C] of a picture of this size (width, height); UserError for what would be changed."""
    import numpy as np
    from PIL import Image

    from cspd_jax._utils import limits

    if not os.path.isfile(file):
        problem = "is no file" if os.path.lexists(file) else "does not exist"
        raise UserError(f"{file!r} {problem}; give a picture, PNG or JPEG")
    limits.file_size(file)
    try:
        with Image.open(file, formats=_FORMATS) as opened:
            if opened.width * opened.height > limits.PIXELS:
                raise UserError(f"{file} has {opened.width}x{opened.height} pixels, too many to read")
            if getattr(opened, "n_frames", 1) > 1:
                raise UserError(f"{file} is animated; give a single picture")
            if opened.mode in ("RGBA", "LA", "PA") or "transparency" in opened.info:
                raise UserError(f"{file} has transparent pixels; flatten it onto a background first")
            if opened.mode not in ("1", "L", "P", "RGB", "CMYK", "YCbCr"):
                raise UserError(f"{file} has more than 8 bits a channel ({opened.mode}); convert it first")
            if opened.size != size and not resize:
                raise UserError(
                    f"{file} is {opened.width}x{opened.height} and the model's pictures are"
                    f" {size[0]}x{size[1]}; scale it with --resize"
                )
            picture = opened.convert(mode)
            picture = picture if picture.size == size else picture.resize(size, Image.Resampling.LANCZOS)
            return np.asarray(picture, np.uint8).reshape(size[1], size[0], -1)
    except UserError:
        raise
    except Exception as error:  # Pillow's decoders raise many types
        raise UserError(f"{file} cannot be read as a PNG or JPEG ({type(error).__name__})") from None


def _tokens(file: str, model):
    """The tokens of a run's samples.npz."""
    import numpy as np

    from cspd_jax._utils.zip_files import array_names, read_arrays

    if "tokens" not in array_names(file):
        raise UserError(f"{file} has no array tokens, as the samples.npz of cspd-jax generate has")
    tokens = read_arrays(file, {"tokens": None})["tokens"]
    shape = (model.network.seq_len, model.network.token_dim)
    if tokens.ndim != 3 or tokens.shape[1:] != shape or not len(tokens) or tokens.dtype.kind != "f":
        raise UserError(
            f"{file} has tokens {tokens.dtype} {list(tokens.shape)}; {model.name} has floating-point numbers"
            f" [N, {shape[0]}, {shape[1]}]"
        )
    if not np.isfinite(tokens).all():
        raise UserError(f"{file} has tokens that are NaN or infinite, of which nothing can be continued")
    return np.asarray(tokens, np.float32)
