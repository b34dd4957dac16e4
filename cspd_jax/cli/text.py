"""`cspd-jax text`: generates text with a causal language model and reports what it cost."""

from __future__ import annotations

import argparse
import itertools
import json
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from cspd_jax.cli._arguments import add_mesh_option, mesh_of, positive, seed
from cspd_jax.cli._fields import add_flags, from_flags, when_used
from cspd_jax.cli._output import measured, progress
from cspd_jax.cli._prompts import add_prompt_options, check_lost, colourful, paint, read_prompts
from cspd_jax.errors import UserError

if TYPE_CHECKING:
    from cspd_jax.text.comparison import Request
    from cspd_jax.weights.models import TextModel

METHODS = {
    "plain": None, "speculative": "google", "deepmind": "deepmind", "block": "block", "match": "match",
    "tree": "tree", "auto": "block",
}  # fmt: skip
PROMPT = "Return a list of"
_GREEN, _RED, _BLUE = 32, 31, 34


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "text",
        help="generate text with a causal language model",
        description="Continues prompts by speculative decoding and prints the text. Accepted drafts are"
        " green, corrected tokens red, and tokens gained after a fully accepted draft blue. Without arguments"
        " it runs the byte-level models that come with the package, which were trained on the documentation"
        " of Python's standard library, and compares speculative with plain decoding.",
    )
    when_used(parser, _add_flags)
    parser.set_defaults(func=run, shares_work=True)


def _add_flags(parser: argparse.ArgumentParser) -> None:
    _add_model_flags(parser)
    add_prompt_options(parser)
    _add_decoding_flags(parser)
    what = parser.add_argument_group("output")
    what.add_argument("--compare", action="store_true", help="also run and time plain decoding")
    what.add_argument("--color", choices=("auto", "always", "never"), default="auto")
    what.add_argument("--json", action="store_true", help="print one JSON object: text, ids and report")


def _add_model_flags(parser: argparse.ArgumentParser) -> None:
    models = parser.add_argument_group("models")
    models.add_argument(
        "--target",
        "--model",
        default="text-default",
        metavar="MODEL",
        help="text-default, a checkpoint folder (ours or Hugging Face's), or OWNER/NAME on the hub",
    )
    models.add_argument(
        "--draft",
        metavar="MODEL|int8|int4|lookup",
        help="another model, a head that reads the target's states (cspd-jax distill --states), the target's"
        " own weights in 8 or 4 bits, or copies from the text so far"
        " (default: text-default-draft for text-default, otherwise lookup)",
    )
    add_mesh_option(models)
    models.add_argument("--dtype", choices=("float32", "bfloat16", "float64"), default="float32")


def _add_decoding_flags(parser: argparse.ArgumentParser) -> None:
    from cspd_jax.text.options import Options

    how = parser.add_argument_group("decoding")
    how.add_argument(
        "--method",
        choices=METHODS,
        help="block (default): verify the whole draft at once; plain; speculative or deepmind: verify token"
        " by token; match: reproduce the very tokens of plain sampling; tree: verify several candidates for"
        " each token, see --tree; auto: block or plain, and how many drafts, whichever a short measurement"
        " finds faster here. All of them sample from the same distribution as plain decoding",
    )
    add_flags(how, Options)
    how.add_argument(
        "--rows", type=positive, metavar="N",
        help="continue N prompts at a time, those of similar lengths together (default: all)",
    )  # fmt: skip
    how.add_argument(
        "--tree", type=_widths, metavar="N,N,...",
        help="with --method tree: candidates for the first token of a draft, for the one after each of those,"
        " and so on (default: 3,2,1)",
    )  # fmt: skip
    how.add_argument("--adapt", action="store_true", help="draft fewer tokens where few are accepted")
    how.add_argument("--seed", type=seed, default=0, help="seed for sampling (default: 0)")
    how.add_argument("--no-stop", action="store_true", help="continue past the end-of-text token")


def run(args: argparse.Namespace) -> None:
    """Carries out the command."""
    from cspd_jax._utils import compilation

    asked_for = args.method, args.draft, args.prompt, args.prompt_file, args.prompt_ids
    if args.method is None:
        args.method = "match" if args.exact_bits and args.temperature else "block"
    _check(args)
    if args.compare and args.method == "plain":
        progress("--compare has nothing to do: this is plain decoding")
    if args.dtype == "float64":
        import jax

        jax.config.update("jax_enable_x64", True)
    compilation.use_cache()
    from cspd_jax.parallel import processes
    from cspd_jax.reports import text as reports
    from cspd_jax.text import comparison, fastest
    from cspd_jax.weights import models
    from cspd_jax.weights.tokenizers import load_tokenizer

    of_head = args.draft is not None and models.is_head(args.draft)
    mesh = None if of_head and not (args.mesh or args.distributed) else mesh_of(args)
    if not processes.is_alone() and (args.compare or args.adapt or args.method == "auto"):
        raise UserError("nothing is measured across processes: leave out --compare, --adapt, --method auto")
    target = models.load_text(args.target, args.dtype, mesh)
    if not target.config.causal:
        raise UserError(f"{args.target} is a masked-diffusion model; use cspd-jax masked")
    tokenizer = load_tokenizer(target)
    prompts = read_prompts(args, tokenizer, target.config, args.max_new_tokens, [PROMPT])
    name, drafter = None, None
    if args.method != "plain":
        name, drafter = load_drafter(args.draft, target, args.dtype, args.method)
    request = _request(args, target, prompts, drafter)
    method = args.method
    if method == "auto":
        first = request._replace(prompts=prompts[: args.rows])
        request = measured("plain decoding or drafts", lambda one: fastest(*one), first).request
        request = request._replace(prompts=prompts)
        method, name = ("plain", None) if request.drafter is None else ("block", name)
    compare = request.drafter is not None and (
        args.compare or (asked_for == (None,) * 5 and processes.is_alone())
    )
    generation = comparison.measure(
        request, compare, repeats=3 if compare else 1, adapt=args.adapt, rows=args.rows
    )
    check_lost(generation.ids)
    report = reports.make_report(generation, target, method, name, rows=args.rows, seed=args.seed)
    if report["truncated"]:
        progress("warning: rounding left nothing of a residual, so some tokens are not exactly the target's")
    if args.json:
        texts = [None if tokenizer is None else tokenizer.decode(ids) for ids in generation.ids]
        print(json.dumps({"text": texts, "ids": generation.ids, **report}))
        return
    for prompt, ids, marks in zip(prompts, generation.ids, generation.marks):
        print(show(tokenizer, prompt, ids, marks, colourful(args.color)))
    progress(reports.in_words(report))


def _check(args: argparse.Namespace) -> None:
    """Raises a UserError for options that would have no effect."""
    if not args.temperature:
        for name in ("top_k", "top_p"):
            if getattr(args, name) is not None:
                option = name.replace("_", "-")
                raise UserError(f"--{option} is for sampling; give a --temperature above 0 with it")
    if args.method == "plain":
        of_drafts = ("draft", "confidence", "adapt", *(() if args.exact_bits else ("gamma",)))
        for name in of_drafts:
            if getattr(args, name) not in (None, False):
                raise UserError(f"--{name} is for the methods that draft, not with --method plain")
    if args.exact_bits and args.method in ("auto", "tree"):
        raise UserError("--exact-bits is for one number of drafts: not with --method auto or tree")
    if args.exact_bits and args.temperature and args.method not in ("plain", "match"):
        raise UserError(
            "--exact-bits is for greedy texts, and for --method match, which draws the same tokens"
        )
    if args.method == "auto" and args.adapt:
        raise UserError("--method auto measures one number of drafts; leave out --adapt, or choose another")
    if args.method == "tree":
        for name in ("confidence", "adapt", "gamma"):
            if getattr(args, name):
                raise UserError(f"--{name} is not for draft trees, whose size is fixed")
    elif args.tree is not None:
        raise UserError("--tree is for --method tree")


def _widths(text: str) -> tuple[int, ...]:
    return tuple(positive(width) for width in text.split(","))


def load_drafter(name: str | None, target: TextModel, dtype: str, method: str = "block") -> tuple[str, Any]:
    """Returns the name of the drafter (None is the default), and what `text.generate` takes for it."""
    from cspd_jax.networks.quantised import quantise
    from cspd_jax.text import PromptLookup, draft_from_states
    from cspd_jax.weights import hub, models

    if name is None:
        name = "text-default-draft" if target.name == "text-default" else "lookup"
    if method == "tree" and name == "lookup":
        raise UserError("look-up makes no trees; give a model as --draft with --method tree")
    if name == "lookup":
        return name, PromptLookup()
    if name in ("int8", "int4"):
        return name, (target.network, quantise(target.params, int(name[3:])))
    if not os.path.exists(name) and name not in models.TEXT_DEFAULTS and not hub.is_repository(name):
        raise UserError(
            f"--draft {name} is none of lookup, int8, int4, text-default, text-default-draft, a checkpoint"
            " folder or OWNER/NAME on the hub"
        )
    if models.is_head(name):
        if target.mesh is not None:
            raise UserError("a head drafts on one device; leave out --mesh, or choose another --draft")
        return name, draft_from_states(models.load_head(name, dtype), target)
    draft = models.load_text(name, dtype, target.mesh)
    if not draft.config.causal:
        raise UserError(f"{name} is a masked-diffusion model; it cannot draft for a causal one")
    models.check_vocabularies(target, draft)
    return name, draft


def _request(args: argparse.Namespace, target: TextModel, prompts: list[list[int]], drafter: Any) -> Request:
    from cspd_jax.keys import seed_key
    from cspd_jax.text import Options
    from cspd_jax.text.comparison import Request

    gamma, stop_ids = args.gamma or Options.gamma, () if args.no_stop else None
    return Request(
        seed_key(args.seed) if args.temperature else None,
        target,
        prompts,
        drafter if args.method != "tree" else _tree(drafter, args.tree or (3, 2, 1)),
        from_flags(Options, args, rule=METHODS[args.method], gamma=gamma, stop_ids=stop_ids),
    )


def _tree(drafter: Any, widths: tuple[int, ...]) -> Any:
    from cspd_jax.text import Drafting, draft_tree, head_tree

    return (head_tree if isinstance(drafter, Drafting) else draft_tree)(drafter, widths)


def show(
    tokenizer: Any, prompt: Sequence[int], ids: Sequence[int], marks: Sequence[int], colour: bool
) -> str:
    """Returns prompt and text, coloured by where each token came from."""
    from cspd_jax.text import ACCEPTED, BONUS, CORRECTED
    from cspd_jax.weights.tokenizers import pieces

    if tokenizer is None:
        return ",".join(map(str, ids))
    if not colour:
        return tokenizer.decode([*prompt, *ids])
    colours = {ACCEPTED: _GREEN, CORRECTED: _RED, BONUS: _BLUE}
    parts = zip(pieces(tokenizer, [*prompt, *ids])[len(prompt) :], (colours.get(mark) for mark in marks))
    painted = []
    for tint, group in itertools.groupby(parts, lambda part: part[1]):
        passage = "".join(piece for piece, _ in group)
        painted.append(passage if tint is None else paint(passage, tint))
    return tokenizer.decode(prompt) + "".join(painted)
