"""`cspd-jax masked`: generates text with a masked-diffusion language model and reports what it cost."""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cspd_jax._utils.files import check_new_folder, write_folder
from cspd_jax.cli._arguments import add_mesh_option, mesh_of, new_folder, seed
from cspd_jax.cli._fields import add_flags, from_flags, when_used
from cspd_jax.cli._output import measured, progress
from cspd_jax.cli._prompts import add_prompt_options, check_lost, colourful, paint, read_prompts
from cspd_jax.errors import UserError

if TYPE_CHECKING:
    from cspd_jax.masked import Method
    from cspd_jax.masked.comparison import Measured, Request
    from cspd_jax.weights.models import TextModel

PROMPT = "Return a list of"
_TOP_K = 3
_BLUE, _FREE = 34, "·"


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "masked",
        help="generate text with a masked-diffusion language model",
        description="Fills the places after each prompt in the order of the model's own confidence, and"
        " prints the text. The method ssd drafts several moves per pass and accepts those that stepwise"
        " decoding would make, so its text is the same. Without arguments it runs the byte-level model that"
        " comes with the package.",
    )
    when_used(parser, _add_flags)
    parser.set_defaults(func=run, shares_work=True)


def _add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--target",
        "--model",
        dest="model",
        default="masked-default",
        metavar="MODEL",
        help="masked-default, a checkpoint folder (ours or Hugging Face's), or OWNER/NAME on the hub",
    )
    add_mesh_option(parser)
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float64"), default="float32")
    add_prompt_options(parser)
    _add_decoding_flags(parser)
    what = parser.add_argument_group("output")
    what.add_argument(
        "--exact-bits",
        action="store_true",
        help="compare with stepwise decoding by passes of the same shape, which round alike: the texts are"
        " then the same in float32, too",
    )
    what.add_argument("--no-compare", action="store_true", help="do not run stepwise decoding as well")
    what.add_argument("--animate", action="store_true", help="show the places while they are filled")
    what.add_argument(
        "--out", type=new_folder, metavar="DIR", help="write report.json and order.png to this new folder"
    )
    what.add_argument("--color", choices=("auto", "always", "never"), default="auto")
    what.add_argument("--json", action="store_true", help="print one JSON object: text, ids and report")


def _add_decoding_flags(parser: argparse.ArgumentParser) -> None:
    from cspd_jax.masked import Options, Schedule, SelfSpeculation

    how = parser.add_argument_group("decoding")
    how.add_argument(
        "--method",
        choices=("ssd", "stepwise", "schedule", "auto"),
        default="ssd",
        help="ssd: self-speculation (default); stepwise: its reference, one token per step; schedule: several"
        " tokens per step as published with the model, which is lossy; auto: ssd or stepwise, whichever a"
        " short measurement finds faster here",
    )
    add_flags(how, Options, "max_new_tokens", "block")
    add_flags(how, SelfSpeculation, "gamma", "texts")
    add_flags(how, Options, "cached")
    how.add_argument(
        "--accept", choices=("exact", "top-k"), default="exact", help="top-k is lossy (default: exact)"
    )
    add_flags(how, SelfSpeculation, "accept_top_k")
    add_flags(how, Schedule)
    add_flags(how, Options, "temperature", "top_p", "top_k", "confidence", "place_temperature", "guidance")
    how.add_argument("--seed", type=seed, default=0, help="seed for sampling (default: 0)")


def run(args: argparse.Namespace) -> None:
    """Carries out the command."""
    from cspd_jax._utils import compilation

    if args.out is not None:
        check_new_folder(args.out)
    if args.dtype == "float64":
        import jax

        jax.config.update("jax_enable_x64", True)
    compilation.use_cache()
    from cspd_jax.masked import Stepwise, comparison, fastest
    from cspd_jax.masked.sets import tables_of
    from cspd_jax.parallel import processes
    from cspd_jax.reports import masked as reports
    from cspd_jax.weights import models
    from cspd_jax.weights.tokenizers import load_tokenizer

    if not processes.is_alone() and (args.animate or args.method == "auto"):
        raise UserError(
            "nothing is shown or measured across processes: leave out --animate and --method auto"
        )
    model = models.load_text(args.model, args.dtype, mesh_of(args))
    if model.config.causal:
        raise UserError(f"{args.model} is a causal model; use cspd-jax text")
    if not model.config.mask_ids:
        raise UserError(f"{args.model} has no mask id, so it is not a masked-diffusion model")
    _check(args)
    tokenizer = load_tokenizer(model)
    prompts = read_prompts(args, tokenizer, model.config, args.max_new_tokens, [PROMPT])
    request = _request(args, model, prompts)
    if args.texts is not None and (most := max(tables_of(model))) < args.texts:
        progress(f"note: --texts {args.texts} is more than the largest table has; its {most} are read")
    if args.method == "auto":
        find = lambda one: fastest(one.key, one.model, one.prompts, one.options)
        request = measured("stepwise decoding or self-speculation", find, request).request
    if args.animate:
        _animate(request, model.config.mask_ids[0], tokenizer)
    compare = not isinstance(request.method, Stepwise) and not args.no_compare
    generation = comparison.measure(request, compare, exact_bits=args.exact_bits)
    report = reports.make_report(generation, model, seed=args.seed)
    ids = generation.output.tokens.tolist()
    check_lost(ids)
    texts = [None if tokenizer is None else _until_the_end(tokenizer, model.config, row) for row in ids]
    content = {"text": texts, "ids": ids, **report}
    if args.out is not None and processes.is_first():
        write_folder(args.out, "masked", lambda folder: _write(folder, content, generation))
    if args.json:
        print(json.dumps(content))
        return
    for prompt, row, text in zip(prompts, ids, texts):
        if tokenizer is None or text is None:
            print(",".join(map(str, row)))
        else:
            print(tokenizer.decode(prompt) + (paint(text, _BLUE) if colourful(args.color) else text))
    progress(reports.in_words(report))


def _check(args: argparse.Namespace) -> None:
    """Raises a UserError for options that would have no effect."""
    if args.accept == "top-k":
        if args.method != "ssd":
            raise UserError(f"--accept top-k is for --method ssd, not for {args.method}")
    elif args.accept_top_k is not None:
        raise UserError(
            "--top-k goes with --accept top-k, which is lossy; the cut of the tokens is --sampling-top-k"
        )
    if args.gamma is not None and args.method != "ssd":
        raise UserError(f"--draft-len is for --method ssd, not for {args.method}")
    if args.exact_bits and (args.no_compare or args.method != "ssd"):
        raise UserError("--exact-bits is about the comparison of --method ssd with stepwise decoding")
    if args.texts is not None:
        if args.method != "ssd":
            raise UserError(f"--texts is for --method ssd, not for {args.method}")
        if args.gamma is not None or args.accept == "top-k":
            raise UserError("--texts takes the place of --draft-len, and --accept top-k goes with that")
        if args.temperature or args.place_temperature or args.confidence == "random":
            raise UserError(
                "--texts is for texts and places that are not drawn, so not with --temperature,"
                " --place-temperature or --confidence random; leave them out, or use --draft-len"
            )
    if args.animate and args.method != "ssd":
        raise UserError(f"--animate shows the rounds of --method ssd, not of {args.method}")
    if args.animate and args.json:
        raise UserError("--animate and --json exclude each other")
    if args.steps is not None and args.method != "schedule":
        raise UserError("--steps is for --method schedule")
    own = args.confidence in ("clean", "random")
    if not args.temperature and own and (args.top_p is not None or args.top_k is not None):
        raise UserError(
            "--top-p and --sampling-top-k have no effect at temperature 0 with --confidence"
            f" {args.confidence}; give a --temperature, or --confidence probability, margin or entropy"
        )
    if args.place_temperature and own:
        raise UserError("--place-temperature goes with --confidence probability, margin or entropy")


def _request(args: argparse.Namespace, model: TextModel, prompts: list[list[int]]) -> Request:

    from cspd_jax.keys import seed_key
    from cspd_jax.masked import Options
    from cspd_jax.masked.comparison import Request

    block = min(args.block, args.max_new_tokens)
    options = from_flags(Options, args, block=block)
    return Request(seed_key(args.seed), model, prompts, _method(args, block), options)


def _method(args: argparse.Namespace, block: int) -> Method:
    from cspd_jax.masked import Schedule, SelfSpeculation, Stepwise

    if args.method == "stepwise":
        return Stepwise()
    if args.method == "schedule":
        blocks = -(-args.max_new_tokens // block)
        return Schedule(args.steps or max(blocks, args.max_new_tokens // 2))
    accept_top_k = (args.accept_top_k or _TOP_K) if args.accept == "top-k" else None
    return SelfSpeculation(args.gamma or SelfSpeculation.gamma, accept_top_k=accept_top_k, texts=args.texts)


def _until_the_end(tokenizer: Any, config: Any, ids: list[int]) -> str:
    """Returns the text up to the first end-of-text id."""
    ends = [i for i, token in enumerate(ids) if token in config.eos_ids]
    return tokenizer.decode(ids[: ends[0]] if ends else ids)


def _animate(request: Request, mask_id: int, tokenizer: Any) -> None:
    """Shows the first text after each round in one line of the terminal: its end, if it is too long.

    Without a terminal each round has a line of its own.
    """
    from cspd_jax.masked import stream

    if not sys.stderr.isatty():
        for tokens, _ in stream(*request):
            progress(_in_one_line(tokens[0].tolist(), mask_id, tokenizer))
        return
    columns = shutil.get_terminal_size().columns - 1
    for tokens, _ in stream(*request):
        sys.stderr.write("\r\x1b[2K" + _in_one_line(tokens[0].tolist(), mask_id, tokenizer)[-columns:])
        sys.stderr.flush()
    sys.stderr.write("\n")


def _in_one_line(ids: list[int], mask_id: int, tokenizer: Any) -> str:
    """Writes ids as text, with dots for free places and no characters that would move the cursor."""
    parts = []
    for free, group in itertools.groupby(ids, lambda i: i == mask_id):
        run = list(group)
        text = tokenizer.decode(run) if tokenizer else "".join(f"{i} " for i in run)
        parts.append(_FREE * len(run) if free else text.replace("\n", "↵"))
    return "".join(c if c.isprintable() else "�" for c in "".join(parts))


def _write(folder: Path, content: dict[str, Any], generation: Measured) -> None:
    import jax

    from cspd_jax.reports.masked import order_picture

    (folder / "report.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    rounds = jax.device_get(generation.output.info.rounds)
    order_picture(rounds, generation.request.options.block).savefig(folder / "order.png")
