"""The options of `cspd-jax generate` and `sample`, and the method and `Options` that they stand for."""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections.abc import Sequence

from cspd_jax._utils.sampling import SAMPLING
from cspd_jax.cli._arguments import (
    above_zero,
    add_mesh_option,
    check_fits,
    parse_labels,
    positive,
    seed,
    shown,
)
from cspd_jax.cli._output import progress
from cspd_jax.errors import UserError, naming

_CLASSES = 10  # generated without --labels

# --criterion -> its class, a public name of the package.
_CRITERIA = {"path": "PathCriterion", "paper": "PaperCriterion"}
_DRAFTED = ("self", *_CRITERIA)
# Which options mean something for which way of drafting and testing: --method self, or a --criterion of cspd.
_GOES_WITH = {
    "gamma": (*_DRAFTED, "official"),
    "prefill": (*_DRAFTED, "official"),
    "draft_cost": _DRAFTED,
    "verify": _DRAFTED,
    "proposals": _DRAFTED,
    "sigma": ("paper",),
    "align": ("paper",),
    "inner_temperature": ("paper", "official"),
}


def add_options(parser: argparse.ArgumentParser, prefix: str) -> None:
    what = parser.add_argument_group("what to generate")
    add_target(what, "words")
    what.add_argument(
        "--labels",
        metavar="LIST",
        help="class numbers or names, for example 0-9 or 3,5,7; none means no class"
        f" (default: the first {_CLASSES} classes)",
    )
    what.add_argument("--n", type=positive, default=4, help="images per label (default: 4)")
    add_seed_and_vae(what)
    what.add_argument(
        "--out", metavar="DIR", help=f"new or empty output folder (default: the next free {prefix}-0001)"
    )
    what.add_argument("--json", action="store_true", help="print the report as one JSON object")
    what.add_argument(
        "--compare",
        action="store_true",
        help="also time the plain sampler (and the draft model alone) on the same images",
    )
    add_sampling(
        parser,
        "the fastest exact method on this machine, by measurement",
        ("plain", "speculative", "auto"),
        "plain, or auto without --method",
    )
    add_speculation(parser)
    add_shortcuts(parser)


def add_target(group, default: str = "default") -> None:
    group.add_argument(
        "--target",
        default=default,
        metavar="MODEL",
        help="words, words-draft, words-causal (pages of words), default, default-draft, default-causal"
        f" (digits), mar-base, mar-large, mar-huge, or a checkpoint folder (default: {default})",
    )


def add_seed_and_vae(group) -> None:
    group.add_argument(
        "--seed",
        type=seed,
        default=0,
        help="image i depends only on the seed and i, given the same options (default: 0)",
    )
    group.add_argument("--vae", metavar="MODEL", help="autoencoder that decodes latents: kl16 or a folder")


def add_sampling(
    parser: argparse.ArgumentParser, method: str, denoise: tuple[str, ...], default_denoise: str
) -> None:
    """method: the default, in words. denoise: the ways to denoise; default_denoise: one of them, in words."""
    from cspd_jax.image.options import DRAFTERS

    auto = "; auto: whichever a short measurement finds faster" if "auto" in denoise else ""
    how = parser.add_argument_group("how to sample")
    how.add_argument(
        "--method",
        choices=("plain", "cspd", "draft", "self"),
        help="plain: one AR step at a time; cspd, or draft: a smaller model drafts several; self: the target"
        f" drafts them itself (default: {method})",
    )
    add_mesh_option(how)
    how.add_argument("--batch", type=positive, default=64, help="images generated together (default: 64)")
    add_fields(how, "num_iter", "respacing", "cfg", "cfg_schedule", "temperature", "final_noise")
    add_fields(how, "order", action=_OneOrder)
    add_fields(how, "denoise", choices=denoise, default=None, more=f"{auto} (default: {default_denoise})")
    how.add_argument(
        "--window",
        dest="draft_lengths",
        type=_draft_lengths,
        metavar="M",
        help="denoising steps drafted per head call with --denoise speculative, for example 16, or 4x32,8 for"
        " four calls of 32 and then 8 (default: 16)",
    )
    how.add_argument(
        "--drafter",
        choices=DRAFTERS,
        help="what drafts denoising steps with --denoise speculative: gains fitted to the model's own chains,"
        " or jacobian, which also asks the head how x_0 moves with the state: fewer calls, of five times as"
        " many rows (default: gains)",
    )
    how.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="of the networks (default: float32)",
    )


def add_speculation(parser: argparse.ArgumentParser) -> None:
    ahead = parser.add_argument_group("speculation over AR steps (--method draft or self)")
    ahead.add_argument("--draft", metavar="MODEL", help="the smaller model that drafts, for --method draft")
    ahead.add_argument(
        "--criterion",
        choices=(*_CRITERIA, "official"),
        help="path: exact; paper: Algorithm 1 as printed, lossy (exact with --sigma off); official:"
        " the released"
        " runner, lossy (default: path)",
    )
    ahead.add_argument("--gamma", type=positive, help="AR steps drafted ahead (default: 8)")
    ahead.add_argument(
        "--adapt",
        dest="draft_cost",
        type=above_zero,
        metavar="C",
        help="draft fewer steps where acceptance is low; C is the cost of a drafted step relative to a target"
        " step",
    )
    ahead.add_argument(
        "--prefill",
        type=float,
        metavar="SHARE",
        help="if above 0, the first 1 + SHARE x AR steps come from the target alone (default: 0;"
        " official: 0.15)",
    )
    ahead.add_argument(
        "--proposals", type=positive, help="draws from the residual side by side, for paper (default: 16)"
    )
    ahead.add_argument(
        "--verify",
        choices=("each", "joint"),
        help="each: every group in its own context; joint: all in one context that shows the drafts, lossy"
        " (default: each)",
    )
    ahead.add_argument(
        "--sigma",
        choices=("on", "off"),
        help="the factor Sigma of Eq. 5, for paper; lossy if on (default: on)",
    )
    ahead.add_argument(
        "--align", choices=("on", "off"), help="whether draft and target share noise, for paper (default: on)"
    )
    ahead.add_argument(
        "--inner-temperature",
        type=float,
        help="widens the test of paper and official by this factor; any value but 1 is lossy, and with 1"
        " paper still needs --sigma off to be exact (default: 1; official: 42)",
    )


def add_shortcuts(parser: argparse.ArgumentParser) -> None:
    lossy = parser.add_argument_group(
        "lossy shortcuts of the plain sampler (another distribution; docs/rivals.md has what they cost)"
    )
    add_fields(lossy, "anneal")
    lossy.add_argument(
        "--gtr",
        dest="order",
        type=_board,
        action=_OneOrder,
        metavar="K",
        help="lossy: the tokens of one colour of a checkerboard come first, all others in the last K AR steps"
        " (GtR)",
    )


def add_fields(group, *names: str, more: str = "", **changed) -> None:
    """Flags for these fields of `Options`, which say all there is to say but how a text is read."""
    from cspd_jax.image.options import FIELDS

    readers = {
        "num_iter": positive,
        "cfg": float,
        "temperature": float,
        "anneal": _annealing,
        "order": _spread,
    }
    for name in names:
        told, meaning = FIELDS[name].metadata, FIELDS[name].metadata["help"]
        if name in SAMPLING:
            meaning = meaning.replace("(default: ", "(default: the model's own, else ")
        of_flag = {"default": None, "type": readers.get(name), **told["of_flag"], **changed}
        if name == "final_noise":
            of_flag |= {"action": _Switch, "choices": ("on", "off")}
        group.add_argument(*told["flags"], dest=name, help=meaning + more, **of_flag)


class _Switch(argparse.Action):
    """on or off, as True or False."""

    def __call__(self, parser, namespace, value, option_string=None):
        setattr(namespace, self.dest, value == "on")


class _OneOrder(argparse.Action):
    """The order of the tokens, which two flags say."""

    def __call__(self, parser, namespace, value, option_string=None):
        if type(getattr(namespace, self.dest)) not in (type(None), type(value)):
            parser.error("--order and --gtr are two orders of the tokens; give one of them")
        setattr(namespace, self.dest, value)


def _annealing(text: str):
    from cspd_jax.image.lossy import Annealing

    found = re.fullmatch(r"([1-9][0-9]{0,3}):([1-9][0-9]{0,3})(?::([a-z-]+))?", text)
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} is not understood; write for example 50:5 or 50:5:cosine")
    return Annealing(int(found[1]), int(found[2]), found[3] or "linear")


def _spread(text: str):
    from cspd_jax.image import Spread

    if text != "spread":
        raise argparse.ArgumentTypeError(f"{shown(text)} is unknown; it is spread, or left out")
    return Spread()


def _board(text: str):
    from cspd_jax.image.lossy import Checkerboard

    return Checkerboard(positive(text))


def _draft_lengths(text: str) -> tuple[int, ...]:
    lengths: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"(?:([1-9][0-9]{0,2})x)?([1-9][0-9]{0,2})", part)
        if not found:
            raise argparse.ArgumentTypeError(f"{text!r} is not understood; write for example 16 or 4x32,8")
        lengths += [int(found[2])] * int(found[1] or 1)
    return tuple(lengths)


def labels_of(args: argparse.Namespace, model) -> list[int]:
    """One turn of the labels; images take turns: 0, 1, 2, 0, 1, 2, ..."""
    classes = model.config.num_classes
    most = classes if hasattr(model.config, "prompts") else min(classes, _CLASSES)
    text = args.labels if args.labels is not None else f"0-{most - 1}"
    return parse_labels(text, classes, model.class_names)


def check_memory(args: argparse.Namespace, model, images: int) -> None:
    """UserError if the images, all of which are held until they are written, cannot fit."""
    config = model.config
    tokens = 4 * config.seq_len * config.token_dim
    size = config.image_size if config.vae_stride == 1 or args.vae else 0
    check_fits(f"{images:,} images", images * (2 * tokens + 3 * size**2), "ask for fewer (--n, --labels)")


def asked(args: argparse.Namespace, model):
    """The method and the options that the arguments stand for. A draft model is described, not loaded."""
    args.own_sampling = take_own(args, model)
    if args.vae is not None and model.config.vae_stride == 1:
        raise UserError(f"--vae does not apply to {args.target}, which makes pixels; leave it out")
    if options_of(args).shortcuts and args.method is None and args.draft is None:
        args.method = "plain"
    return method_of(args, model), options_of(args, denoise=_denoise(args))


def say_what_is_less(args: argparse.Namespace, steps: int, labels: Sequence[int]) -> None:
    """Numbers beyond what there is, `steps` AR steps, mean all that there is; guidance of images without a
    class means nothing."""
    if args.cfg is not None and args.cfg != 1 and all(label == -1 for label in labels):
        progress("note: --cfg guides towards a class, and the images have none, so it has no effect")
    if args.num_iter is not None and args.num_iter > steps:
        progress(
            f"note: --num-iter {args.num_iter} is more than the model's tokens; {steps} AR steps are made"
        )
    if args.gamma is not None and args.gamma > steps:
        progress(f"note: --gamma {args.gamma} is more than there is to draft: {steps} AR steps")


def options_of(args: argparse.Namespace, **more):
    """The `Options` that the flags say; more: others."""
    from cspd_jax.image.options import FIELDS, Options

    given = {name: getattr(args, name, None) for name in FIELDS} | more
    return Options(**{name: value for name, value in given.items() if value is not None})


def take_own(args: argparse.Namespace, model) -> str:
    """Flags of sampling that were not given are what the model is sampled with; returns them as they would be
    given."""
    from cspd_jax.image.options import Options

    with naming(f"sampling of the checkpoint {model.name}"):
        Options(**model.sampling).checked()
    taken = {name: value for name, value in model.sampling.items() if getattr(args, name, 0) is None}
    vars(args).update(taken)
    return " ".join(f"{_flag(name)} {value}" for name, value in taken.items())


def with_draft(args: argparse.Namespace, method, mesh):
    """The method with its draft model loaded, if it has one."""
    from cspd_jax.weights import models

    if method.draft_model is None:
        return method
    return dataclasses.replace(method, draft=models.load(args.draft, args.dtype, mesh))


def method_of(args: argparse.Namespace, model):
    """The method object that the arguments describe."""
    from cspd_jax import image
    from cspd_jax.image import methods
    from cspd_jax.weights import models
    from cspd_jax.weights.checks import check_draft

    args.method = {"draft": "cspd"}.get(args.method, args.method)
    draft = None if args.draft is None else models.describe(args.draft)
    if draft is not None and args.method is None:
        progress("with --draft the method is cspd; say --method to choose another")
        args.method = "cspd"
    elif draft is not None and args.method != "cspd":
        check_draft(model.config, draft.config)
        progress(f"the method {args.method} does not use the draft")
    if args.method == "cspd" and draft is None:
        raise UserError("the method cspd needs a draft: a smaller model of the same tokens (--draft MODEL)")
    way, given = _way(args)
    if way == "plain":
        return methods.Plain()
    if way == "self":
        return methods.SelfSpeculation(**given)
    assert draft is not None
    if way == "official":
        return methods.ReleasedRunner(draft, **given)
    kind = getattr(image, _CRITERIA[way])
    own = {field.name: given.pop(field.name) for field in dataclasses.fields(kind) if field.name in given}
    return methods.DraftSpeculation(draft, criterion=kind(**own), **given)


def _way(args: argparse.Namespace) -> tuple[str, dict]:
    """plain, self or a criterion, and the options of the method that were given; UserError where they do not
    go together."""
    name, criterion = args.method or "plain", args.criterion
    if name == "self" and criterion not in (None, "path"):
        raise UserError(f"the criterion {criterion} needs a draft model: method cspd; self has path only")
    way = {"plain": "plain", "self": "self", "cspd": criterion or "path"}[name]
    given = {option: getattr(args, option) for option in _GOES_WITH if getattr(args, option) is not None}
    if way == "plain" and (criterion or given):
        option = "criterion" if criterion else next(iter(given))
        if args.method is None:
            others = "" if option == "criterion" or _GOES_WITH[option][0] != "self" else "self or "
            raise UserError(f"{_flag(option)} needs a method to go with: add --method {others}cspd")
        raise UserError(f"{_flag(option)} goes with the methods cspd and self, not with plain")
    for option in given:
        if way not in _GOES_WITH[option]:
            criteria = " or ".join(w for w in _GOES_WITH[option] if w != "self")
            here = "--method self" if way == "self" else f"--criterion {way}"
            raise UserError(f"{_flag(option)} goes with --criterion {criteria}, not with {here}")
    if "proposals" in given and way != "paper":
        progress("--proposals does nothing now: drafts are verified as one block, and nothing is proposed")
        del given["proposals"]
    if "verify" in given:
        given["joint"] = given.pop("verify") == "joint"
    return way, {n: v == "on" if n in ("sigma", "align") else v for n, v in given.items()}


def _denoise(args: argparse.Namespace):
    from cspd_jax.image.chain.speculation import ChainSpeculation

    given = {
        name: value for name in ("draft_lengths", "drafter") if (value := getattr(args, name)) is not None
    }
    if given:
        if args.denoise != "speculative":
            flag = "--window" if "draft_lengths" in given else "--drafter"
            raise UserError(f"{flag} goes with --denoise speculative only")
        return ChainSpeculation(**given)
    return args.denoise or ("plain" if args.method else "auto")


def _flag(option: str) -> str:
    return {"draft_cost": "--adapt"}.get(option, "--" + option.replace("_", "-"))
