"""Types and flags shared by commands."""

from __future__ import annotations

import argparse


def positive(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return value


def heads(text: str) -> tuple[int, int]:
    parts = text.split(",")
    if len(parts) != 2:
        raise argparse.ArgumentTypeError(f"{text!r} is not two numbers ENC,DEC, for example 12,12")
    return positive(parts[0]), positive(parts[1])


def add_source_flags(parser: argparse.ArgumentParser) -> None:
    """Flags for what a published checkpoint file does not say."""
    group = parser.add_argument_group("what the file cannot say (flags override the file)")
    group.add_argument(
        "--weights", choices=("model_ema", "model"), help="which weights of a .pth (model_ema)"
    )
    group.add_argument("--heads", type=heads, metavar="ENC,DEC", help="attention heads of a MAR model")
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
    if not (text.isascii() and text.isdecimal() and int(text) < 2**32):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 to {2**32 - 1}")
    return int(text)
