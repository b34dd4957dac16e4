"""Audits samplers of other libraries with `cspd_jax.audit`, and measures the power of
the audit.

    # Needs `pip install torch transformers`; `pip install --no-deps flashspec dflash`.
    python benchmarks/audit.py others FILE.json
    python benchmarks/audit.py power FILE.json  # tests/audit's mistakes, many seeds
    python benchmarks/audit.py markdown FILE.json  # prints the tables of both

`others` runs the rules of transformers, flashspec and dflash. It also runs assisted
generation of transformers on a tiny Llama of random weights, whose law is a table:
sampled, with a draft model and with prompt look-up, and greedy. The plain sampler is
the control.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from toy import Parser, begin, machine, results, say, write_results

from cspd_jax import audit

VOCABULARY = 5
LENGTH = 3  # tokens of a sampled text
DRAFTS = 2
DRAWS = 4_000  # of each way
LONG = 48  # tokens of a greedy text
PROMPT = (1, 2, 1, 2)  # look-up finds drafts in it


def tiny_llama(seed: int, vocabulary: int, width: int) -> Any:
    """Returns a random model whose next token depends strongly on the text."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=2,
        num_attention_heads=2,
        bos_token_id=0,
        eos_token_id=None,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(40)
    return model


def rules() -> dict[str, audit.Rule]:
    """Returns the rules of libraries that are installed, as `audit.rule` calls them."""
    import torch

    def of(call: Callable) -> audit.Rule:
        def verify(seed, p, q, drafts):
            torch.manual_seed(seed)
            given = drafts, np.float32(p), np.float32(q)
            return call(*(torch.tensor(a)[None] for a in given))

        return verify

    def transformers(drafts, p, q):
        from transformers.generation.utils import _speculative_sampling

        tokens, kept = _speculative_sampling(
            drafts, torch.log(q), drafts.shape[1], torch.log(p)
        )
        return kept, tokens[0, -1]

    def flashspec(drafts, p, q):
        from flashspec.sampling.rejection import rejection_step

        return rejection_step(drafts, torch.log(q), torch.log(p))[0]

    def dflash(drafts, p, q):
        from dflash.model import _rejection_sample

        return _rejection_sample(drafts, p, q)

    found = {}
    for rule in (transformers, flashspec, dflash):
        try:
            version = importlib.metadata.version(rule.__name__)
        except importlib.metadata.PackageNotFoundError:
            say(f"{rule.__name__} is not installed, and is left out")
            continue
        found[f"{rule.__name__} {version}: the rule"] = of(rule)
    return found


def log_probabilities(model: Any, text: Any, temperature: float = 1.0) -> np.ndarray:
    """Returns [length, V], the log probabilities of the token after each of a text."""
    import torch

    with torch.no_grad():
        logits = model(torch.tensor([list(text)])).logits[0].double()
    return torch.log_softmax(logits / temperature, dim=-1).numpy()


def law_of(model: Any, temperature: float) -> np.ndarray:
    """Returns the log probability [V, ..., V] of each text after the prompt."""
    law = np.zeros((VOCABULARY,) * LENGTH)
    for text in itertools.product(range(VOCABULARY), repeat=LENGTH):
        each = log_probabilities(model, [*PROMPT, *text], temperature)
        each = each[len(PROMPT) - 1 : -1]
        law[text] = sum(row[token] for row, token in zip(each, text))
    return law


def sampler(model: Any, **how: Any) -> Callable[[int, int], np.ndarray]:
    """Returns a function that draws texts by the library's `generate`."""
    import torch

    def draw(seed: int, count: int) -> np.ndarray:
        torch.manual_seed(seed)
        prompt = torch.tensor([PROMPT])
        given = {
            "attention_mask": torch.ones_like(prompt),
            "max_new_tokens": LENGTH,
            "do_sample": True,
            "top_k": 0,
            **how,
        }
        made = [model.generate(prompt, **given)[0] for _ in range(count)]
        return np.array([text[len(PROMPT) :].tolist() for text in made])

    return draw


def greedy_texts(model: Any, prompts: Any, **how: Any) -> list[list[int]]:
    import torch

    found = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        mask = torch.ones_like(ids)
        made = model.generate(
            ids, attention_mask=mask, max_new_tokens=LONG, do_sample=False, **how
        )
        found.append(made[0].tolist())
    return found


def others() -> list[dict[str, Any]]:
    """Returns a row for each way of generation that is audited."""
    import torch
    import transformers

    torch.set_num_threads(1)  # the models are tiny
    rows = [row(name, audit.rule(rule, draws=DRAWS)) for name, rule in rules().items()]
    name = f"transformers {transformers.__version__}"
    target = tiny_llama(0, VOCABULARY, 16)
    draft = tiny_llama(1, VOCABULARY, 8)
    draft.generation_config.num_assistant_tokens = DRAFTS
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    draft.generation_config.assistant_confidence_threshold = 0.0
    assisted = {"assistant_model": draft}
    lookup = {"prompt_lookup_num_tokens": DRAFTS}
    for temperature in (1.0, 0.6):
        law = law_of(target, temperature)
        for way, how in {
            "plain (control)": {},
            "draft model": assisted,
            "prompt look-up": lookup,
        }.items():
            draw = sampler(target, temperature=temperature, **how)
            verdict = audit.sequences(draw, law, DRAWS)
            rows.append(row(f"{name}: {way}, temperature {temperature:g}", verdict))
    large = tiny_llama(2, 64, 32)
    near = tiny_llama(3, 64, 16)
    random = np.random.default_rng(0)
    prompts = random.integers(64, size=(50, 8)).tolist()
    plain = greedy_texts(large, prompts)

    def margin(text: int, place: int) -> float:
        logits = np.sort(log_probabilities(large, plain[text][:place])[-1])
        return float(logits[-1] - logits[-2])

    for way, how in {
        "greedy, draft model": {"assistant_model": near},
        "greedy, prompt look-up": lookup,
    }.items():
        fast = greedy_texts(large, prompts, **how)
        rows.append(row(f"{name}: {way}", audit.greedy(plain, fast, margin)))
    return rows


def row(name: str, verdict: audit.Verdict) -> dict[str, Any]:
    found = {
        "name": name,
        "samples": verdict.samples,
        "passed": verdict.passed,
        "visible": verdict.visible,
        "sentence": verdict.sentence,
    }
    say(f"{name}: {verdict.sentence}")
    return found


def power(seeds: int, right: int) -> list[dict[str, Any]]:
    """Returns how often each rule of tests/audit is refuted, with 2,000 draws a
    table."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "audit"))
    from test_audit import WRONG_RULES, token_by_token

    rows = []
    for name, verify in {"right": token_by_token, **WRONG_RULES}.items():
        runs = right if name == "right" else seeds
        refuted = sum(not audit.rule(verify, draws=2_000, seed=i) for i in range(runs))
        rows.append({"name": name, "runs": runs, "refuted": refuted})
        say(f"{name}: refuted in {refuted} of {runs}")
    return rows


def markdown(found: dict[str, Any]) -> str:
    lines = ["| what was run | draws or tokens | verdict | would have seen |"]
    lines.append("|---|---|---|---|")
    for one in found.get("others", []):
        verdict = "not refuted" if one["passed"] else "**refuted**"
        seen = f"{one['visible']:.3f}" if one["visible"] else "any token"
        lines.append(f"| {one['name']} | {one['samples']} | {verdict} | {seen} |")
    lines += ["", "| rule | refuted | of runs |", "|---|---|---|"]
    for one in found.get("power", []):
        lines.append(f"| {one['name']} | {one['refuted']} | {one['runs']} |")
    return "\n".join(lines)


def make_parser() -> Parser:
    parser = Parser(__doc__, what="power", file=Path("audit.json"))
    parser.add_argument("what", choices=("others", "power", "markdown"))
    parser.add_argument("file", type=Path, help="the results")
    return parser


def main() -> None:
    args = begin(make_parser())
    found = {} if args.toy else dict(results(args.file) or {})
    if args.what == "others":
        found["others"] = others()
    if args.what == "power":
        counts = (2, 2) if args.toy else (100, 1_000)
        found["power"] = power(*counts)
    if args.what != "markdown":
        write_results(args.file, found | {"machine": machine()})
    print(markdown(found))


if __name__ == "__main__":
    main()
