"""`cspd-jax text`: generates text with a causal language model and reports what it cost."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
from collections.abc import Sequence
from typing import Any

import jax

from cspd_jax import hub, reports, text
from cspd_jax._utils import compilation
from cspd_jax._utils.options import reported
from cspd_jax.check import UserError, check_vocabularies
from cspd_jax.cli._flags import add_common, add_fields, check_alone, from_flags, numbers, progress
from cspd_jax.cli._texts import Ran, add_prompts, paint, read_prompts, run_beside, say
from cspd_jax.keys import seed_key
from cspd_jax.models import HeadModel, TextModel
from cspd_jax.networks.quantised import quantise
from cspd_jax.parallel import default_mesh
from cspd_jax.tokenizers import load_tokenizer, pieces

DESCRIPTION = (
    "Continues prompts by speculative decoding and prints the text. Accepted drafts are green, corrected"
    " tokens red, and tokens gained after a fully accepted draft blue. Without arguments it runs the"
    " byte-level models that come with the package, which were trained on the documentation of Python's"
    " standard library, and compares speculative with plain decoding."
)
METHODS = {
    "plain": None, "speculative": "google", "deepmind": "deepmind", "block": "block", "match": "match",
    "tree": "tree", "auto": "block",
}  # fmt: skip
_COLOURS = {text.ACCEPTED: 32, text.CORRECTED: 31, text.BONUS: 34}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of the verb."""
    parser.add_argument(
        "--target",
        "--model",
        default="text-default",
        metavar="MODEL",
        help="text-default, a checkpoint folder (ours or Hugging Face's), or OWNER/NAME on the hub",
    )
    parser.add_argument(
        "--draft",
        metavar="MODEL|int8|int4|lookup",
        help="another model, a head that reads the target's states (cspd-jax distill --states), the target's"
        " own weights in 8 or 4 bits, or copies from the text so far"
        " (default: text-default-draft for text-default, otherwise lookup)",
    )
    add_common(parser, "float64")
    add_prompts(parser)
    how = parser.add_argument_group("decoding")
    how.add_argument(
        "--method",
        choices=METHODS,
        help="block (default): verify the whole draft at once; plain; speculative or deepmind: verify token"
        " by token; match: reproduce the very tokens of plain sampling; tree: verify several candidates for"
        " each token; auto: block or plain, and how many drafts, whichever a short measurement finds faster"
        " here. All of them sample from the same distribution as plain decoding",
    )
    add_fields(how, text.Options)
    how.add_argument(
        "--tree",
        type=numbers,
        metavar="N,N,...",
        help="with --method tree: candidates for the first token of a draft, for the one after each of those,"
        " and so on (default: 3,2,1)",
    )
    how.add_argument("--no-stop", action="store_true", help="continue past the end-of-text token")
    how.add_argument("--compare", action="store_true", help="also run and time plain decoding")


def run(args: argparse.Namespace) -> None:
    """Carries out the command."""
    bare = args.method is args.draft is args.prompt is args.prompt_file is args.prompt_ids is None
    if args.method is None:
        args.method = "match" if args.exact_bits and args.temperature else "block"
    if args.method == "plain" and (args.draft or args.tree):
        raise UserError("--draft and --tree are for the methods that draft, not for --method plain")
    if args.dtype == "float64":
        jax.config.update("jax_enable_x64", True)
    compilation.use_cache()
    # A head drafts on one device.
    mesh = None if _is_head(args.draft) and not args.mesh else default_mesh(args.mesh)
    target = hub.load(args.target, args.dtype, mesh, of=TextModel)
    if not target.config.causal:
        raise UserError(f"{args.target} is a masked-diffusion model; use cspd-jax masked")
    tokenizer = load_tokenizer(target)
    prompts = read_prompts(args, tokenizer)
    if args.draft is None and args.method != "plain":
        args.draft = default_draft(target)
    drafter = None if args.draft is None else load_drafter(args.draft, target, args.dtype)
    request = _request(args, target, prompts, drafter)
    if args.method == "auto":
        check_alone("--method auto")
        key, _, _, _, options = request
        choice = text.fastest(key, target, prompts, drafter, options)
        progress("; ".join(f"{way} {seconds:.3f} s" for way, seconds in choice.seconds.items()))
        request = choice.request
    compare = request.drafter is not None and (args.compare or (bare and args.distributed is None))
    ways = {args.method: request} | ({"plain": request._replace(drafter=None)} if compare else {})
    ran = run_beside(ways, text.generate, 3 if compare else 1)
    trace = ran.info.trace
    spans = [slice(len(prompt), length) for prompt, length in zip(prompts, trace.lengths.tolist())]
    ids, marks = ([row[span] for row, span in zip(of.tolist(), spans)] for of in (ran.tokens, trace.marks))
    if args.json:
        texts = [None if tokenizer is None else tokenizer.decode(row) for row in ids]
        print(json.dumps({"text": texts, "ids": ids, **_report(args, request, ran)}))
        return
    for prompt, row, of_row in zip(prompts, ids, marks):
        print(_shown(args, tokenizer, prompt, row, of_row))
    say(ran, "plain", not args.temperature or args.method == "match")


def _report(args: argparse.Namespace, request: text.Request, ran: Ran) -> dict[str, Any]:
    options = reported(dataclasses.replace(request.options, stop_ids=None))
    drafts = {"method": args.method, "draft": args.draft, "tree": args.tree, "seed": args.seed}
    return reports.make_report(request.model, ran.info, options, **drafts, compared_to_plain=ran.beside)


def default_draft(target: TextModel) -> str:
    """Returns the name of what drafts where nothing else is asked for."""
    return "text-default-draft" if target.name == "text-default" else "lookup"


def load_drafter(name: str, target: TextModel, dtype: str) -> Any:
    """Returns what `text.generate` takes for a drafter of this name."""
    if name == "lookup":
        return text.PromptLookup()
    if name in ("int8", "int4"):
        return target.network, quantise(target.params, int(name[3:]))
    if _is_head(name):
        return text.draft_from_states(hub.load(name, dtype), target)
    draft = hub.load(name, dtype, target.mesh, of=TextModel)
    check_vocabularies(target, draft)
    return draft


def _is_head(name: str | None) -> bool:
    return name is not None and os.path.isdir(name) and isinstance(hub.describe(name), HeadModel)


def _request(
    args: argparse.Namespace, target: TextModel, prompts: list[list[int]], drafter: Any
) -> text.Request:
    if args.method == "tree":
        if isinstance(drafter, text.PromptLookup):
            raise UserError("look-up makes no trees; give a model as --draft with --method tree")
        make = text.head_tree if isinstance(drafter, text.Drafting) else text.draft_tree
        drafter = make(drafter, args.tree or (3, 2, 1))
    own = {"rule": METHODS[args.method], "gamma": args.gamma or text.Options.gamma}
    options = from_flags(text.Options, args, **own, stop_ids=() if args.no_stop else None)
    return text.Request(seed_key(args.seed) if args.temperature else None, target, prompts, drafter, options)


def _shown(
    args: argparse.Namespace, tokenizer: Any, prompt: Sequence[int], ids: Sequence[int], marks: Sequence[int]
) -> str:
    """Returns prompt and text, coloured by where each token came from."""
    if tokenizer is None:
        return ",".join(map(str, ids))
    parts = zip(pieces(tokenizer, [*prompt, *ids])[len(prompt) :], map(_COLOURS.get, marks))
    groups = itertools.groupby(parts, lambda part: part[1])
    painted = (paint("".join(piece for piece, _ in group), tint, args) for tint, group in groups)
    return tokenizer.decode(prompt) + "".join(painted)
