"""Continues prompts by speculative decoding with a causal language model, and prints
the text.

Without arguments the command runs the byte-level models that come with the package, and
compares speculative decoding with plain decoding. These models were trained on the
documentation of Python's standard library.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Callable
from typing import Any

from cspd_jax import hub, text
from cspd_jax._utils.options import reported
from cspd_jax.check import UserError, check_vocabularies, naming
from cspd_jax.cli import _texts
from cspd_jax.cli._flags import add_fields, chosen, from_flags, read, refuse_unread
from cspd_jax.comparison import Request, fastest
from cspd_jax.keys import seed_key
from cspd_jax.models import HeadModel, TextModel
from cspd_jax.networks.quantised import quantise
from cspd_jax.parallel import default_mesh

# The drafts that are made of the target or of the text itself, by the value of --draft.
DRAFTS: dict[str, Callable[[TextModel], Any]] = {
    "int8": lambda target: (target.network, quantise(target.params, 8)),
    "int4": lambda target: (target.network, quantise(target.params, 4)),
    "lookup": lambda target: text.PromptLookup(),
}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of the verb."""
    _texts.add_flags(parser, "text-default")
    parser.add_argument(
        "--draft",
        metavar="|".join(("MODEL", *DRAFTS)),
        help="another model, a head that reads the target's states (cspd-jax distill"
        " --states), the target's own weights in 8 or 4 bits, or copies from the text"
        " so far (default: text-default-draft for text-default, otherwise lookup)",
    )
    how = parser.add_argument_group("decoding")
    how.add_argument(
        "--method",
        choices=("plain", "speculation", "tree", "auto"),
        help="speculation (default): verify a whole draft at once; plain: one token"
        " after the other; tree: verify three candidates for the next token, two for"
        " the one after each, and one more; auto: plain, or speculation with 2 or 4"
        " drafts, whichever a short measurement finds faster here. All of them sample"
        " from the same distribution",
    )
    add_fields(how, text.Speculation, of="--method speculation")
    add_fields(how, text.Options)
    how.add_argument(
        "--exact-bits",
        action="store_true",
        help="passes have one shape, also in plain decoding, whose other places are"
        " padded: so a text with drafts is the plain one of the same --gamma in"
        " float32, too. Greedy, or by the rule match",
    )
    how.add_argument(
        "--no-stop", action="store_true", help="continue past the end-of-text token"
    )
    how.add_argument(
        "--compare", action="store_true", help="also run and time plain decoding"
    )


def run(args: argparse.Namespace) -> None:
    """Carries out the command."""
    compare = args.compare or not (
        args.method or args.draft or args.prompt or args.prompt_ids
    )
    # A head drafts on a single device.
    mesh = None if _is_head(args.draft) and not args.mesh else default_mesh(args.mesh)
    if args.compare and args.method == "plain":
        raise UserError("plain is the reference itself; compare another method")
    target, tokenizer, prompts = _texts.open_model(args, mesh, causal=True)
    args.method = args.method or "speculation"
    args.draft = None if args.method == "plain" else args.draft or default_draft(target)
    options = from_flags(
        text.Options,
        args,
        stop_ids=() if args.no_stop else None,
        exact_bits=(read(args, "gamma") or 4) if args.exact_bits else None,
    )
    key = seed_key(args.seed)
    method = _method(args, target)
    refuse_unread(args)
    request = Request(key, target, prompts, method, options)
    if args.method == "auto":
        gammas = {args.gamma or 4} if args.exact_bits else {2, args.gamma or 4}
        assert isinstance(method, text.Speculation)
        tried = [dataclasses.replace(method, gamma=gamma) for gamma in sorted(gammas)]
        request = chosen(fastest(key, target, prompts, tried, options))
    ways = {args.method: request}
    if compare and not isinstance(request.method, text.Plain):
        ways["plain"] = request._replace(method=text.Plain())

    def rows(tokens, info):
        spans = zip(tokens.tolist(), prompts, info.trace.lengths.tolist())
        return [row[len(prompt) : end] for row, prompt, end in spans]

    _texts.run(
        args,
        tokenizer,
        ways,
        rows,
        method=request.method.name,
        speculation=reported(request.method) or None,
        draft=args.draft,
    )


def default_draft(target: TextModel) -> str:
    """Returns the name of the drafter that is used without --draft."""
    return "text-default-draft" if target.name == "text-default" else "lookup"


def load_drafter(name: str, target: TextModel, dtype: str) -> Any:
    """Returns the drafter with the name of a --draft flag, as `text.Speculation` and
    `text.Tree` take it."""
    if name in DRAFTS:
        return DRAFTS[name](target)
    if _is_head(name):
        return text.draft_from_states(hub.load(name, dtype), target)
    with naming("|".join(("--draft MODEL", *DRAFTS))):
        draft = hub.load(name, dtype, target.mesh, of=TextModel)
    check_vocabularies(target, draft)
    return draft


def _method(args: argparse.Namespace, target: TextModel) -> text.Method:
    if args.method == "plain":
        return text.Plain()
    draft = load_drafter(args.draft, target, args.dtype)
    if args.method != "tree":
        match = {"rule": "match"} if args.exact_bits and args.temperature else {}
        return from_flags(text.Speculation, args, match, draft=draft)
    return text.Tree(draft)


def _is_head(name: str | None) -> bool:
    return (
        name is not None
        and os.path.isdir(name)
        and isinstance(hub.describe(name), HeadModel)
    )
