"""`cspd-jax masked`: text from a masked-diffusion language model, and a report of what it cost."""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import sys
from pathlib import Path

from cspd_jax._utils.files import check_new_folder, write_folder
from cspd_jax.cli._arguments import positive, seed
from cspd_jax.cli._output import progress
from cspd_jax.cli._prompts import add_prompt_options, colourful, paint, read_prompts
from cspd_jax.errors import UserError

PROMPT = "Return a list of"
_DRAFT_LEN, _TOP_K = 4, 3
_BLUE, _FREE = 34, "·"


def add_parser(subparsers) -> None:
    parser = subparsers.add_parser(
        "masked",
        help="write text with a masked-diffusion language model",
        description="Fills places behind prompts, in the order of the model's own certainty, and prints the"
        " text. ssd drafts several moves per pass and accepts those that stepwise decoding would take: its"
        " text is the same. Without arguments it uses the byte-level model that comes with the package.",
    )
    parser.add_argument(
        "--model",
        default="masked-default",
        metavar="MODEL",
        help="masked-default, a folder (ours or Hugging Face's), or OWNER/NAME on the hub",
    )
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float64"), default="float32")
    add_prompt_options(parser)
    how = parser.add_argument_group("how")
    how.add_argument(
        "--method",
        choices=("ssd", "stepwise", "schedule"),
        default="ssd",
        help="ssd; stepwise, its reference; schedule, several tokens per step as published: lossy",
    )
    how.add_argument("--new-tokens", type=positive, default=64, help="places behind each prompt (64)")
    how.add_argument("--block", type=positive, default=8, help="places filled before later ones (8)")
    how.add_argument("--draft-len", type=positive, help="moves tested per pass, of ssd (4)")
    how.add_argument("--cache", action="store_true", help="keep keys and values, anew for each block")
    how.add_argument("--accept", choices=("exact", "top-k"), default="exact", help="top-k is lossy (exact)")
    how.add_argument("--top-k", type=positive, help="of --accept top-k (3)")
    how.add_argument("--steps", type=positive, help="of --method schedule (half as many as places)")
    how.add_argument("--temperature", type=float, default=0.0, help="0 takes the likeliest tokens (0)")
    how.add_argument("--guidance", type=float, help="scale of classifier-free guidance by the prompt (off)")
    how.add_argument("--seed", type=seed, default=0)
    what = parser.add_argument_group("output")
    what.add_argument("--no-compare", action="store_true", help="do not run stepwise decoding beside it")
    what.add_argument("--animate", action="store_true", help="show the places as they are filled")
    what.add_argument(
        "--out", type=Path, metavar="DIR", help="write report.json and order.png into a new folder"
    )
    what.add_argument("--color", choices=("auto", "always", "never"), default="auto")
    what.add_argument("--json", action="store_true", help="print one JSON object: text, ids, report")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> None:
    from cspd_jax._utils import compilation

    if args.out is not None:
        check_new_folder(args.out)
    if args.dtype == "float64":
        import jax

        jax.config.update("jax_enable_x64", True)
    compilation.use_cache()
    from cspd_jax import models
    from cspd_jax.masked import comparison
    from cspd_jax.reports import masked as reports
    from cspd_jax.tokenizers import load_tokenizer

    model = models.load_text(args.model, args.dtype)
    if model.config.causal:
        raise UserError(f"{args.model} is a causal model; use cspd-jax text")
    if not model.config.mask_ids:
        raise UserError(f"{args.model} has no mask id: it is not a masked-diffusion model")
    tokenizer = load_tokenizer(model)
    prompts = read_prompts(args, tokenizer, model.config, args.new_tokens, [PROMPT])
    options = _options(args)
    generation = comparison.Generation(model.model, model.params, prompts, args.method, options)
    if args.animate:
        _animate(generation, tokenizer)
    beside = args.method != "stepwise" and not args.no_compare
    found = comparison.measure(generation, beside)
    report = reports.make_report(found, model, seed=args.seed)
    ids = [row.tolist() for row in _rows(found.result.text)]
    texts = [None if tokenizer is None else _until_the_end(tokenizer, model.config, row) for row in ids]
    content = {"text": texts, "ids": ids, **report}
    if args.out is not None:
        rounds = _rows(found.result.rounds)
        write_folder(args.out, "masked", lambda path: _write(path, content, rounds, options["block"]))
    if args.json:
        print(json.dumps(content))
        return
    for prompt, row, text in zip(prompts, ids, texts):
        if tokenizer is None:
            print(",".join(map(str, row)))
        else:
            print(tokenizer.decode(prompt) + (paint(text, _BLUE) if colourful(args.color) else text))
    progress(reports.in_words(report))


def _options(args: argparse.Namespace) -> dict:
    import jax

    options = {
        "new_tokens": args.new_tokens,
        "block": min(args.block, args.new_tokens),
        "cached": args.cache,
        "draft_len": args.draft_len or _DRAFT_LEN,
        "temperature": args.temperature,
        "guidance": args.guidance,
    }
    if args.accept == "top-k":
        if args.method != "ssd":
            raise UserError(f"--accept top-k is for --method ssd; {args.method} drafts nothing")
        options["top_k"] = args.top_k or _TOP_K
    elif args.top_k is not None:
        raise UserError("--top-k goes with --accept top-k, which is lossy")
    if args.draft_len is not None and args.method != "ssd":
        raise UserError(f"--draft-len is for --method ssd; {args.method} drafts nothing")
    if args.animate and args.json:
        raise UserError("--animate and --json exclude each other")
    if args.method == "schedule":
        blocks = -(-args.new_tokens // options["block"])
        options["steps"] = args.steps or max(blocks, args.new_tokens // 2)
    elif args.steps is not None:
        raise UserError("--steps is for --method schedule")
    if args.temperature:
        options["keys"] = jax.random.key(args.seed)
    return options


def _rows(array):
    import numpy as np

    return np.asarray(array)


def _until_the_end(tokenizer, config, ids: list[int]) -> str:
    """The text up to the first id that ends one."""
    ends = [i for i, token in enumerate(ids) if token in config.eos_ids]
    return tokenizer.decode(ids[: ends[0]] if ends else ids)


def _animate(generation, tokenizer) -> None:
    """The end of the first text after each round, as far as a line goes, over the one before."""
    from cspd_jax import masked
    from cspd_jax.text import pad_prompts

    if generation.method != "ssd":
        raise UserError(f"--animate shows the rounds of --method ssd, not of {generation.method}")
    prompts, lengths = pad_prompts(generation.prompts)
    mask_id = generation.model.config.mask_ids[0]
    columns = shutil.get_terminal_size().columns - 1
    for state in masked.stream(generation.model, generation.params, prompts, lengths, **generation.options):
        row = _rows(state.text)[0].tolist()
        sys.stderr.write("\r\x1b[2K" + _in_one_line(row, mask_id, tokenizer)[-columns:])
        sys.stderr.flush()
    sys.stderr.write("\n")


def _in_one_line(ids: list[int], mask_id: int, tokenizer) -> str:
    """Ids as text; free places as dots, and what would move the cursor as other signs."""
    parts = []
    for free, run in itertools.groupby(ids, lambda i: i == mask_id):
        run = list(run)
        text = tokenizer.decode(run) if tokenizer else "".join(f"{i} " for i in run)
        parts.append(_FREE * len(run) if free else text.replace("\n", "↵"))
    return "".join(c if c.isprintable() else "�" for c in "".join(parts))


def _write(folder: Path, content: dict, rounds, block: int) -> None:
    from cspd_jax.reports.masked import order_picture

    (folder / "report.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    order_picture(rounds, block).save(folder / "order.png")
