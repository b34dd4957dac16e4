"""Types, flags and the syntax of --labels, shared by commands."""

from __future__ import annotations

import argparse
import math
import os
import pathlib

from cspd_jax.cli._output import progress
from cspd_jax.errors import UserError

_DIGITS = 18  # of a number that could mean something
_SHOWN = 40  # characters of a wrong argument


def shown(text: str) -> str:
    """An argument in a message: quoted, and cut if it is long."""
    return repr(text if len(text) <= _SHOWN else f"{text[:_SHOWN]}...")


def positive(text: str) -> int:
    digits = text.strip()
    if not (digits.isascii() and digits.isdecimal() and len(digits) <= _DIGITS and int(digits) > 0):
        raise argparse.ArgumentTypeError(f"{shown(text)} is not a positive whole number")
    return int(digits)


def whole(text: str) -> int:
    """A whole number from 0 on."""
    if not (text.isascii() and text.isdecimal() and len(text) <= _DIGITS):
        raise argparse.ArgumentTypeError(f"{shown(text)} is not a whole number from 0 on")
    return int(text)


def real(text: str) -> float:
    """A number, in the characters that whole numbers are read in."""
    if not text.isascii() or "_" in text:
        raise argparse.ArgumentTypeError(f"{shown(text)} is not a number")
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{shown(text)} is not a number") from None


def above_zero(text: str) -> float:
    """A finite number above 0."""
    if not 0 < (value := real(text)) < math.inf:
        raise argparse.ArgumentTypeError(f"{shown(text)} is not a number above 0")
    return value


def whole_numbers(flag: str, text: str) -> list[int]:
    """Token ids such as 1,2,3; UserError that names the flag for anything else."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdecimal() and len(part) <= _DIGITS for part in parts):
        raise UserError(f"{flag} {shown(text)} is not a list of whole numbers such as 1,2,3")
    return [int(part) for part in parts]


def new_folder(text: str) -> pathlib.Path:
    """The name of a folder for results."""
    if not text:
        raise argparse.ArgumentTypeError("the name of the folder is empty")
    return pathlib.Path(text)


def check_fits(what: str, size: int, instead: str) -> None:
    """UserError if so many bytes are more than half of this machine's memory."""
    try:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):  # a system that does not say
        return
    if 2 * size > memory:
        raise UserError(
            f"{what} would take {size / 2**30:,.0f} GiB, and this machine has {memory / 2**30:.0f} GiB of"
            f" memory; {instead}"
        )


def add_mesh_option(group) -> None:
    group.add_argument(
        "--mesh",
        metavar="SIZES",
        help="how devices share the work, for example data=4,model=2: rows are spread over the data axis,"
        " each model over the model axis (default: all devices on data)",
    )


def mesh_of(args: argparse.Namespace, devices=None):
    """The mesh that was asked for, of the devices (default: all); None for a single one."""
    from cspd_jax.parallel import default_mesh

    return default_mesh(args.mesh, devices)


def heads(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if len(parts) > 2:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number nor two, ENC,DEC, for example 12,12")
    return tuple(positive(part) for part in parts)


def add_source_flags(parser: argparse.ArgumentParser) -> None:
    """Flags for what a published checkpoint file does not say."""
    group = parser.add_argument_group("what the file cannot say (flags override the file)")
    group.add_argument(
        "--weights",
        choices=("model_ema", "ema", "model"),
        help="which weights of a .pth (the averaged ones, if there are any)",
    )
    group.add_argument(
        "--heads", type=heads, metavar="ENC,DEC|N", help="attention heads of a MAR or causal model"
    )
    group.add_argument("--patch-size", type=positive, help="latents along a token's side (MAR)")
    group.add_argument(
        "--steps", help='respacing of the denoising steps, for example "100" or "ddim50" (MAR)'
    )
    group.add_argument("--vae-stride", type=positive, help="pixels per latent; display only (MAR, 16)")
    group.add_argument("--groups", type=positive, help="groups of the normalisation (KL-16, 32)")


def options(args: argparse.Namespace):
    from cspd_jax.converters.source import Options

    return Options(args.heads, args.patch_size, args.steps, args.vae_stride, args.groups)


def seed(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) <= _DIGITS and int(text) < 2**32):
        raise argparse.ArgumentTypeError(f"{shown(text)} is not a whole number from 0 to {2**32 - 1}")
    return int(text)


NO_CLASS = "none"


def parse_labels(text: str, num_classes: int, class_names: tuple[str, ...] = ()) -> list[int]:
    """`0-9`, `3,5,7`, `A,C-F`, `none` -> class numbers. A number is a class number; beyond
    those, and where it is none, a name."""
    labels: list[int] = []
    for part in (p.strip() for p in text.split(",")):
        if not part:
            raise UserError(
                f"the list of labels {shown(text)} has an empty place; write for example 0-2 or 3,5"
            )
        single = _number(part, num_classes, class_names)
        labels += [single] if single is not None else _range(part, num_classes, class_names)
    return labels


def _number(text: str, num_classes: int, class_names: tuple[str, ...]) -> int | None:
    """The class a text stands for; None if it stands for none."""
    if text in (NO_CLASS, "-1") and text not in class_names:
        return -1
    if text.isascii() and text.isdecimal():
        number = int(text) if len(text) <= _DIGITS else num_classes
        named = text in class_names
        if number < num_classes:
            if named and class_names[number] != text:
                progress(
                    f"note: label {text} is class number {number}, which is named {class_names[number]}; the"
                    f" class named {text} has number {class_names.index(text)}"
                )
            return number
        if not named:
            raise UserError(
                f"label {shown(text)[1:-1]} is out of range: the model has classes 0 to {num_classes - 1}"
            )
    if class_names.count(text) > 1:
        numbers = ", ".join(str(i) for i, name in enumerate(class_names) if name == text)
        raise UserError(f"label {shown(text)} is the name of the classes {numbers}; write the number")
    return class_names.index(text) if text in class_names else None


def _range(text: str, num_classes: int, class_names: tuple[str, ...]) -> list[int]:
    for i, character in enumerate(text):
        if character != "-":
            continue
        first, last = (_number(t.strip(), num_classes, class_names) for t in (text[:i], text[i + 1 :]))
        if first is None or last is None or first < 0 or last < 0:
            continue
        if first > last:
            raise UserError(f"the range {text} of --labels runs backwards; write {last}-{first}")
        return list(range(first, last + 1))
    names = f", or a name such as {class_names[0]}" if class_names else ""
    raise UserError(
        f"label {shown(text)} is unknown; write class numbers from 0 to {num_classes - 1}, for example 0-2 or"
        f" 0,2{names}"
    )
