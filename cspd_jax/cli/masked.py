"""`cspd-jax masked`: generates text with a masked-diffusion language model and reports what it cost."""

from __future__ import annotations

import argparse
import itertools
import json
from typing import Any

import jax

from cspd_jax import hub, masked, reports
from cspd_jax._utils import compilation
from cspd_jax._utils.options import reported
from cspd_jax.check import UserError
from cspd_jax.cli._flags import add_common, add_fields, check_alone, from_flags, progress
from cspd_jax.cli._texts import add_prompts, paint, read_prompts, run_beside, say
from cspd_jax.keys import seed_key
from cspd_jax.models import TextModel
from cspd_jax.parallel import default_mesh
from cspd_jax.tokenizers import load_tokenizer

DESCRIPTION = (
    "Fills the places after each prompt in the order of the model's own confidence, and prints the text. The"
    " method ssd drafts several moves per pass and accepts those that stepwise decoding would make, so its"
    " text is the same. Without arguments it runs the byte-level model that comes with the package."
)
_BLUE = 34


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of the verb."""
    parser.add_argument(
        "--target",
        "--model",
        default="masked-default",
        metavar="MODEL",
        help="masked-default, a checkpoint folder (ours or Hugging Face's), or OWNER/NAME on the hub",
    )
    add_common(parser, "float64")
    add_prompts(parser)
    how = parser.add_argument_group("decoding")
    how.add_argument(
        "--method",
        choices=("ssd", "stepwise", "schedule", "auto"),
        default="ssd",
        help="ssd: self-speculation (default); stepwise: its reference, one token per step; schedule: several"
        " tokens per step as published with the model, which is lossy; auto: ssd or stepwise, whichever a"
        " short measurement finds faster here",
    )
    for cls in (masked.Options, masked.SelfSpeculation, masked.Schedule):
        add_fields(how, cls)
    how.add_argument(
        "--exact-bits",
        action="store_true",
        help="compare with stepwise decoding by passes of the same shape, which round alike: the texts are"
        " then the same in float32, too",
    )
    how.add_argument("--no-compare", action="store_true", help="do not run stepwise decoding as well")


def run(args: argparse.Namespace) -> None:
    """Carries out the command."""
    for option, method in (("gamma", "ssd"), ("texts", "ssd"), ("steps", "schedule")):
        if getattr(args, option) is not None and args.method != method:
            raise UserError(f"--{option} has no effect with --method {args.method}; it is for {method}")
    if args.dtype == "float64":
        jax.config.update("jax_enable_x64", True)
    compilation.use_cache()
    model = hub.load(args.target, args.dtype, default_mesh(args.mesh), of=TextModel)
    if not model.config.mask_ids:
        raise UserError(f"{args.target} has no mask id, so it is not a masked-diffusion model")
    tokenizer = load_tokenizer(model)
    prompts = read_prompts(args, tokenizer)
    options = from_flags(masked.Options, args, block=min(args.block, args.max_new_tokens))
    request = masked.Request(seed_key(args.seed), model, prompts, _method(args), options)
    if args.method == "auto":
        check_alone("--method auto")
        choice = masked.fastest(request.key, model, prompts, options)
        progress("; ".join(f"{way} {seconds:.3f} s" for way, seconds in choice.seconds.items()))
        request = choice.request
    way = request.method
    ways = {way.name: request}
    if not isinstance(way, masked.Stepwise) and not args.no_compare:
        like = way if isinstance(way, masked.SelfSpeculation) and args.exact_bits else None
        ways["stepwise"] = request._replace(method=masked.Stepwise(like))
    ran = run_beside(ways, masked.generate)
    ids = ran.tokens.tolist()
    texts = [None if tokenizer is None else _until_the_end(tokenizer, model.config, row) for row in ids]
    if args.json:
        told = {"method": way.name, "way": _reported(way), "seed": args.seed}
        report = reports.make_report(
            model, ran.info, reported(options), **told, compared_to_stepwise=ran.beside
        )
        print(json.dumps({"text": texts, "ids": ids, **report}))
        return
    for prompt, row, text in zip(prompts, ids, texts):
        if tokenizer is None or text is None:
            print(",".join(map(str, row)))
        else:
            print(tokenizer.decode(prompt) + paint(text, _BLUE, args))
    say(ran, "stepwise", ran.info.exact)


def _method(args: argparse.Namespace) -> masked.Method:
    if args.method == "stepwise":
        return masked.Stepwise()
    if args.method == "schedule":
        blocks = -(-args.max_new_tokens // args.block)
        return masked.Schedule(args.steps or max(blocks, args.max_new_tokens // 2))
    return masked.SelfSpeculation(args.gamma or masked.SelfSpeculation.gamma, texts=args.texts)


def _reported(method: masked.Method) -> dict[str, Any]:
    """Returns the options of a way; of a table of texts how many there are."""
    told = reported(method)
    texts = told.get("texts")
    return told | ({"texts": len(texts["texts"])} if isinstance(texts, dict) else {})


def _until_the_end(tokenizer: Any, config: Any, ids: list[int]) -> str:
    """Returns the text up to the first end-of-text id."""
    return tokenizer.decode(list(itertools.takewhile(lambda token: token not in config.eos_ids, ids)))
