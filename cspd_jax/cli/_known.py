"""`--image` and `--keep`: a picture of which a part stays while the rest is generated."""

from __future__ import annotations

import argparse
import os
from typing import Any, NamedTuple

from cspd_jax._utils.files import files_in, in_order
from cspd_jax.cli._arguments import whole
from cspd_jax.cli._output import progress
from cspd_jax.errors import UserError

_SUFFIXES = (".png", ".jpg", ".jpeg")
_MOST = 10_000  # pictures of a folder, which are held at once


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
    group.add_argument(
        "--place",
        type=_place,
        metavar="X,Y",
        help="outpainting: a picture smaller than the model's lies there, by its upper left corner in pixels,"
        " and stays; what is around it is made",
    )


def _place(text: str) -> tuple[int, int]:
    numbers = [whole(part) for part in text.split(",")]
    if len(numbers) != 2 or not all(0 <= number < 2**16 for number in numbers):
        raise argparse.ArgumentTypeError(f"{text!r} is no place; write X,Y in pixels, for example 8,8")
    return numbers[0], numbers[1]


class Start(NamedTuple):
    """What the images start from.

    pictures: uint8 [M, H, W, C]; None if there are tokens.
    tokens: [M, L, d] of a run; None if there are pictures.
    mask: [L] tokens that stay, or [M, L].
    """

    pictures: Any
    tokens: Any
    mask: Any

    @property
    def total(self) -> int:
        """How many pictures, or images of the run."""
        return len(self.tokens if self.pictures is None else self.pictures)

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

        shape = (self.total, model.network.seq_len, model.network.token_dim)
        return Known(np.zeros(shape, np.float32), np.broadcast_to(self.mask, shape[:2]))


def read_start(args: argparse.Namespace, model, images: int) -> Start | None:
    """What --image and --keep say, for a model that may have no parameters yet; None without --image.

    images: how many are made, which take the pictures in turn.
    """
    if args.image is None:
        given = {"--keep": args.keep, "--resize": args.resize or None, "--place": args.place}
        for flag in [flag for flag, value in given.items() if value is not None]:
            raise UserError(f"{flag} is about the picture of --image; name one")
        return None
    start = _kept(args, model) if args.place is None else _placed(args, model)
    if start.total > images:
        progress(f"note: {images} of the {start.total} pictures of --image are used, one for each image")
    return start


def _kept(args: argparse.Namespace, model) -> Start:
    """Pictures, or tokens of a run, of which --keep says what stays."""
    if args.keep is None:
        raise UserError("say with --keep what of the picture stays, for example --keep left-half")
    import numpy as np

    from cspd_jax.image.pictures import read_picture

    files, pictures, tokens = _pictures_in(args.image), None, None
    if args.image.endswith(".npz"):
        if args.resize and not _is_file(args.keep):
            raise UserError(f"--resize scales pictures, and {args.image} has tokens; leave it out")
        tokens = _tokens(args.image, model)
    else:
        pictures = np.stack([read_picture(file, model, args.resize) for file in files])
    if _is_file(args.keep) and os.path.isdir(args.keep):
        beside = (os.path.join(args.keep, os.path.basename(file)) for file in files)
        mask = np.stack([_whites(file, model, args.resize) for file in beside])
    else:
        mask = _mask(args.keep, model, args)
    if empty := [file for file, one in zip(files, np.atleast_2d(mask)) if not one.any()]:
        white = ", of which white (255) stays," if _is_file(args.keep) else ""
        raise UserError(
            f"--keep {args.keep}{white} keeps no whole token of the picture {empty[0]}; keep more, or leave"
            " it out"
        )
    if mask.all():
        progress("note: all tokens are kept, so the picture comes out as it is")
    return Start(pictures, tokens, mask)


def _placed(args: argparse.Namespace, model) -> Start:
    """Pictures that stay whole, each a part of the model's."""
    import numpy as np

    from cspd_jax.image.pictures import read_placed
    from cspd_jax.image.regions import keep, token_side

    if args.keep is not None or args.resize or args.image.endswith(".npz"):
        raise UserError(
            "--place takes a PNG or JPEG as it is and keeps all of it; leave out --keep and --resize"
        )
    found = [read_placed(file, model, args.place) for file in _pictures_in(args.image)]
    masks = [keep(filled, model) for _, filled in found]
    if not all(mask.any() for mask in masks):
        raise UserError(f"--image {args.image} at --place fills no whole token of the model's pictures")
    side, placed = token_side(model), sum(int(filled.sum()) for _, filled in found)
    if (stay := sum(int(mask.sum()) for mask in masks) * side**2) < placed:
        progress(f"note: {stay} of the {placed} pixels stay: those of whole tokens, which are {side}x{side}")
    return Start(np.stack([picture for picture, _ in found]), None, np.stack(masks))


def _pictures_in(path: str) -> list[str]:
    """The pictures of a folder, in the order of their names, as numbers if all are; or the one that it is.
    What other systems hide among them ("._0.png") is none."""
    if not os.path.isdir(path):
        return [path]
    names = [file.name for file in files_in(path, _SUFFIXES, below=False)]
    if not names:
        raise UserError(f"{path!r} holds no pictures; give a PNG or JPEG, or a folder of them")
    if len(names) > _MOST:
        raise UserError(f"{path!r} holds {len(names)} pictures; give at most {_MOST} at a time")
    return [os.path.join(path, name) for name in in_order(names, ending=True)]


def _mask(region: str, model, args: argparse.Namespace):
    """The tokens [L] that a region, or a black and white picture, keeps."""
    from cspd_jax.image.regions import keep

    if _is_file(region) or region.lower().endswith(_SUFFIXES):
        return _whites(region, model, args.resize)
    return keep(region, model, args.seed)


def _is_file(region: str) -> bool:
    """Whether --keep names a picture, or a folder of them; a region goes before a file of its name."""
    from cspd_jax.image.regions import NAMES

    return region not in NAMES and not region.endswith("%") and os.path.lexists(region)


def _whites(file: str, model, resize: bool):
    from cspd_jax.image.pictures import read_mask
    from cspd_jax.image.regions import keep

    return keep(read_mask(file, model, resize), model)


def _tokens(file: str, model):
    """The tokens of a run's samples.npz."""
    import numpy as np

    from cspd_jax._utils.files import read_arrays

    tokens = read_arrays(file, ["tokens"])["tokens"]
    shape = (model.network.seq_len, model.network.token_dim)
    if tokens.ndim != 3 or tokens.shape[1:] != shape or not len(tokens) or tokens.dtype.kind != "f":
        raise UserError(
            f"{file} has tokens {tokens.dtype} {list(tokens.shape)}; {model.name} has floating-point numbers"
            f" [N, {shape[0]}, {shape[1]}]"
        )
    with np.errstate(over="ignore"):
        tokens = tokens.astype(np.float32)
    if not np.isfinite(tokens).all():
        raise UserError(f"{file} has tokens that are NaN or infinite, of which nothing can be continued")
    return tokens
