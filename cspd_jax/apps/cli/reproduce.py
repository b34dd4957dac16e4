"""`cspd-jax reproduce`: the tables and figures of the paper, one command each."""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cspd_jax.cli._arguments import keep_defaults, new_folder, positive, refuse_given, seed
from cspd_jax.cli._output import progress
from cspd_jax.errors import UserError, printable

_BATCHES, _GAMMAS = (1, 8), (4, 8, 32)
_DRAFTS = {"default": "default-draft"}  # of targets that come with one


def add_parser(subparsers) -> None:
    parser = subparsers.add_parser(
        "reproduce",
        help="the paper's tables and figures on your models, exact and lossy ways side by side",
        description="Runs a table, a figure or the formula of the paper (Continuous Speculative Decoding for"
        " Autoregressive Image Generation) on a pair of models. Writes NAME.md, NAME.json and NAME.png"
        " into DIR, the paper's numbers beside yours. Repeat the command to continue after whatever"
        " interrupted it.",
    )
    what = parser.add_argument_group("what")
    what.add_argument("name", nargs="?", metavar="NAME", help="of an experiment (see --list), or all")
    what.add_argument("--list", action="store_true", help="name the experiments, and run none")
    what.add_argument("--target", default="default", metavar="MODEL", help="a name or folder (default)")
    what.add_argument(
        "--draft", metavar="MODEL", help="the smaller model (default-draft where the target is default)"
    )
    what.add_argument("--vae", metavar="MODEL", help="autoencoder that decodes latents: kl16 or a folder")
    what.add_argument(
        "--out", type=new_folder, default=Path("reproduction"), metavar="DIR",
        help="new folder, or that of an earlier reproduction (reproduction)",
    )  # fmt: skip
    what.add_argument("--json", action="store_true", help="print the reports, or the list, as JSON")
    how = parser.add_argument_group("how much (default: minutes on two cores for the default pair)")
    how.add_argument(
        "--images", type=positive, metavar="N", help="of each row (each experiment's own number)"
    )
    how.add_argument(
        "--batch", type=_numbers, default=_BATCHES, metavar="LIST", help="images side by side (1,8)"
    )
    how.add_argument(
        "--gamma", type=_numbers, default=_GAMMAS, metavar="LIST", help="AR steps drafted ahead (4,8,32)"
    )
    how.add_argument("--num-iter", type=positive, help="AR steps (one per token)")
    how.add_argument(
        "--steps",
        help='denoising steps, for example "100" or "ddim50" (the model\'s own; of the embedded pair ddim25)',
    )
    how.add_argument("--seed", type=seed, default=0, help="(0)")
    figures = parser.add_argument_group("FID, of table2")
    figures.add_argument("--inception", metavar="FILE", help="weights, as for cspd-jax evaluate --samples")
    figures.add_argument("--against", metavar="REF", help="images or statistics to compare with")
    parser.set_defaults(func=run)
    keep_defaults(parser)


def _numbers(text: str) -> tuple[int, ...]:
    """1,8 -> (1, 8): increasing, each once."""
    return tuple(sorted({positive(part) for part in text.split(",")}))


def run(args: argparse.Namespace) -> None:
    if args.list:
        if args.name is not None:
            raise UserError(f"--list names all experiments; leave out {args.name!r:.80}")
        of_runs = sorted(args.defaults.keys() - {"help", "name", "list", "json"})
        refuse_given(args, of_runs, "is for runs, not for --list")
        _list(args)
        return
    if args.name is None:
        raise UserError("say which experiment, or all; cspd-jax reproduce --list names them")
    from cspd_jax.apps.paper import run
    from cspd_jax.apps.paper.store import check_folder

    draft = args.draft or _DRAFTS.get(args.target)
    experiments, left_out = run.chosen(args.name, draft is not None)
    check_folder(args.out)
    setup = _setup(args, draft)
    if left_out:
        progress(f"without --draft these are left out: {', '.join(left_out)}")
    with _interrupted(args.out):
        reports = run.carry_out(experiments, setup, args.out, lambda one: _command(args, one.name))
    if args.json:
        print(json.dumps(reports if args.name == "all" else reports[0]))
    else:
        print("\n".join(str(args.out / f"{told['name']}.md") for told in reports))


def _list(args: argparse.Namespace) -> None:
    from cspd_jax.apps.paper import EXPERIMENTS, NAMES

    told = [
        {"name": name, "title": EXPERIMENTS[name].title, "needs_draft": EXPERIMENTS[name].needs_draft}
        for name in NAMES
    ]
    if args.json:
        print(json.dumps(told))
    else:
        print("\n".join(f"{one['name']:<12} {one['title']}" for one in told))


def _setup(args: argparse.Namespace, draft: str | None):
    """The models and sizes, checked before anything is loaded."""
    from cspd_jax._utils import compilation

    compilation.use_cache()
    from cspd_jax.apps.evaluation.features import load_network
    from cspd_jax.apps.evaluation.reference import open_reference
    from cspd_jax.apps.paper.setup import Setup, default_steps
    from cspd_jax.diffusion.schedule import sampling_schedule
    from cspd_jax.image.pixels import check_vae
    from cspd_jax.weights import models

    steps = args.steps or default_steps(args.target)
    if steps is not None:
        sampling_schedule(steps)
    sizes = {
        "images": args.images,
        "batches": args.batch,
        "gammas": args.gamma,
        "num_iter": args.num_iter,
        "steps": steps,
        "seed": args.seed,
    }
    outline = models.describe(args.target)
    args.vae = args.vae or models.own_vae(outline)
    Setup(outline, None if draft is None else models.describe(draft), **sizes)  # refuses what cannot be
    if args.vae is not None and outline.config.vae_stride == 1:
        raise UserError(f"--vae does not apply to {args.target}, which makes pixels; leave it out")
    if args.against is not None and args.inception is None:
        raise UserError("--against needs --inception, the weights of the Inception network of FID")
    reference = None if args.against is None else open_reference(args.against)
    network = None if args.inception is None else load_network(args.inception)
    vae = None if args.vae is None else models.load_vae(args.vae)
    if vae is not None:
        check_vae(outline, vae)
    return Setup(
        models.load(args.target),
        None if draft is None else models.load(draft),
        vae=vae,
        inception=network,
        against=reference,
        **sizes,
    )


_TOLD = ("target", "draft", "vae", "images", "batch", "gamma", "num_iter", "steps", "seed", "inception")
_UNTOLD = {"target": "default", "batch": _BATCHES, "gamma": _GAMMAS, "seed": 0}


def _command(args: argparse.Namespace, name: str) -> str:
    """What was typed, for the report of one experiment."""
    parts = ["cspd-jax", "reproduce", name]
    for option in (*_TOLD, "against"):
        value = getattr(args, option)
        if value is not None and value != _UNTOLD.get(option):
            text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
            parts += ["--" + option.replace("_", "-"), text]
    return printable(shlex.join(parts))


@contextmanager
def _interrupted(folder: Path) -> Iterator[None]:
    """Says after Ctrl-C or SIGTERM what is there."""
    from cspd_jax.apps.paper.run import cells_done

    try:
        yield
    except KeyboardInterrupt:
        progress(f"{cells_done(folder)} finished cells are in {folder}; the same command continues")
        raise
