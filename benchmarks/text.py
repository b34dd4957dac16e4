"""Text: our decoding and that of the transformers library, with the same weights, prompts and threads.

    python benchmarks/text.py                      # all tables, several minutes
    python benchmarks/text.py --only embedded      # the pair that comes with the package, on held-out text
    python benchmarks/text.py --only pythia        # the sizes of Pythia-160m, with random weights
    python benchmarks/text.py --only drafts        # bytes and acceptance of every kind of draft

The weights of Pythia's sizes are random, so their acceptance would mean nothing. A draft model of two layers
is run for its time, and its tokens are replaced so that each is right with the probability that was measured
on the embedded pair. Prints tables on standard error and one JSON object on
standard output. Needs torch and transformers (extra `parity`).
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import json
import platform
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from replayed import Replayed
from toy import Parser, begin, held_out_prompts, left_out, load_text, median_seconds, say

from cspd_jax import hub, models, text
from cspd_jax.converters import lm as published
from cspd_jax.info import Info
from cspd_jax.language_models import bound
from cspd_jax.networks.lm import LM
from cspd_jax.networks.quantised import quantise
from cspd_jax.text import Drafting, ModelDrafter, Options, PromptLookup, Request

GAMMAS = (2, 3, 4, 6)
PYTHIA = {"vocab_size": 50304, "hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072,
          "num_hidden_layers": 12}  # fmt: skip
TOY_PYTHIA = {**PYTHIA, "hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 64,
              "num_hidden_layers": 2}  # fmt: skip
PAIR = ("text-default", "text-default-draft")


class Sizes(NamedTuple):
    """Says what is measured: rows side by side, drafts of a round, new tokens of each part."""

    batches: tuple[int, ...] = (1, 8)
    gammas: tuple[int, ...] = GAMMAS
    embedded: int = 128
    pythia: int = 32
    toy: bool = False


TOY = Sizes((1,), (2,), 8, 8, True)


def as_transformers(model: models.TextModel):
    """Puts the same weights into the transformers library's class."""
    import torch
    import transformers

    c = model.config
    config = transformers.LlamaConfig(
        vocab_size=c.vocab_size, hidden_size=c.width, num_hidden_layers=c.depth, num_attention_heads=c.heads,
        num_key_value_heads=c.kv_heads, head_dim=c.head_dim, intermediate_size=c.mlp_width,
        max_position_embeddings=c.max_positions, rms_norm_eps=c.norm_eps, hidden_act=c.activation,
        rope_parameters={"rope_type": "default", "rope_theta": c.rope_theta},
        tie_word_embeddings=c.tie_embeddings, bos_token_id=c.bos_ids[0], eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    theirs = transformers.LlamaForCausalLM(config).eval()
    state = {}
    for entry in published.FORMAT.wanted(c):
        leaf = model.params
        for part in entry.path:
            leaf = leaf[part]
        array = np.array(leaf)
        state[entry.name] = torch.tensor(array.T.copy() if entry.path[-1] == "kernel" else array)
    if c.tie_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    theirs.load_state_dict(state)
    return theirs


def theirs_generate(model, prompts, count: int, assistant=None, gamma: int = 4):
    import torch

    ids = torch.tensor(prompts)
    options = {"do_sample": False, "max_new_tokens": count, "min_new_tokens": count}
    if assistant is not None:
        assistant.generation_config.num_assistant_tokens = gamma
        assistant.generation_config.num_assistant_tokens_schedule = "constant"
        assistant.generation_config.assistant_confidence_threshold = 0.0
        options["assistant_model"] = assistant
    with torch.no_grad():
        return model.generate(ids, attention_mask=torch.ones_like(ids), **options)[:, ids.shape[1] :]


def ours(target, prompts, count, drafter=None, **options) -> Request:
    return Request(None, target, prompts, drafter, Options(max_new_tokens=count, stop_ids=(), **options))


def per_pass(info: Info) -> float:
    """Returns the new tokens of a row per target pass that it took part in."""
    return float(np.sum(info.made) / np.sum(info.rounds))


def row(name: str, batch: int, seconds: float, tokens: int, base: float, **more) -> dict:
    found = {"what": name, "batch": batch, "tokens_per_second": tokens / seconds, "ratio": base / seconds}
    extra = "".join(f", {k} {v:.3g}" for k, v in more.items())
    say(f"  {name}: {found['tokens_per_second']:.0f} tokens/s, {found['ratio']:.2f}x{extra}")
    return found | more


def measured(theirs: dict[str, Any], plain: Request, found: dict[str, Request], repeats: int):
    """Times all calls in turns and returns their rows. found: speculative ways."""
    requests = {"ours plain": plain, **found}
    calls = theirs | {name: functools.partial(text.generate, *asked) for name, asked in requests.items()}
    seconds, batch = median_seconds(calls, repeats), len(plain.prompts)
    tokens, base = batch * plain.options.max_new_tokens, seconds["transformers"]
    rows = [row(name, batch, seconds[name], tokens, base) for name in calls if name not in found]
    for name in found:
        info = calls[name]().info
        faster = seconds["ours plain"] / seconds[name]
        rows.append(row(name, batch, seconds[name], tokens, base, acceptance=info.acceptance,
                        tokens_per_pass=per_pass(info), over_plain=faster))  # fmt: skip
    return rows


def embedded(sizes: Sizes, repeats: int) -> list[dict]:
    """Returns rows of the pair that comes with the package."""
    target, small = (load_text(name, sizes.toy) for name in PAIR)
    count = sizes.embedded
    their_target, their_draft = as_transformers(target), as_transformers(small)
    rows = []
    for batch in sizes.batches:
        say(f"embedded pair, {batch} rows of {count} new tokens behind held-out text, greedy, float32")
        prompts = held_out_prompts(batch, 64, sizes.toy)  # the transformers library pads others
        plain = ours(target, prompts, count)
        found = {
            f"ours, block, gamma {g}": ours(target, prompts, count, drafter=small, gamma=g)
            for g in sizes.gammas
        }
        calls = {"transformers": functools.partial(theirs_generate, their_target, prompts, count)}
        for gamma in sizes.gammas if batch == 1 else ():
            calls[f"transformers, assisted, gamma {gamma}"] = functools.partial(
                theirs_generate, their_target, prompts, count, their_draft, gamma
            )
        rows += measured(calls, plain, found, repeats)
        same = (
            np.asarray(text.generate(*plain).tokens)[:, len(prompts[0]) :] == calls["transformers"]().numpy()
        )
        say(f"  tokens that both libraries agree on: {same.mean():.4f}")
    return rows


def pythia(sizes: Sizes, repeats: int, acceptance: float) -> list[dict]:
    """Returns rows of Pythia-160m's sizes, whose draft is right as often as it is told."""
    import torch
    import transformers

    count = sizes.pythia
    torch.manual_seed(0)
    config = transformers.GPTNeoXConfig(
        **(TOY_PYTHIA if sizes.toy else PYTHIA), max_position_embeddings=2048, rotary_pct=0.25,
        eos_token_id=None, bos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    their_target = transformers.GPTNeoXForCausalLM(config).eval()
    with tempfile.TemporaryDirectory() as scratch:
        their_target.save_pretrained(Path(scratch) / "target")
        target = hub.load(Path(scratch) / "target")
    draft_model = LM(dataclasses.replace(target.config, depth=2))
    kept = {k: v for k, v in target.params.items() if not k.startswith("layers_")}
    draft_params = kept | {f"layers_{i}": target.params[f"layers_{i}"] for i in range(2)}
    rows = []
    for batch in sizes.batches:
        say(f"Pythia-160m's sizes, random weights, {batch} rows of {count} new tokens, greedy, float32;"
            f" acceptance {acceptance:.3f} replayed from the embedded pair")  # fmt: skip
        prompts = np.random.default_rng(0).integers(0, 50_000, (batch, 64)).tolist()
        plain = ours(target, prompts, count)
        right = text.generate(*plain).tokens
        use = jax.random.bernoulli(jax.random.key(1), acceptance, right.shape)
        drafter = Drafting(Replayed(ModelDrafter(draft_model)), (draft_params, right, use))
        found = {
            f"ours, block, gamma {g} (replayed)": ours(target, prompts, count, drafter=drafter, gamma=g)
            for g in sizes.gammas
        }
        calls = {"transformers": functools.partial(theirs_generate, their_target, prompts, count)}
        rows += measured(calls, plain, found, repeats)
    return rows


def drafts(sizes: Sizes, gamma: int = 4) -> list[dict]:
    """Bytes in memory and acceptance of every kind of draft, greedy and sampled."""
    target, small = (load_text(name, sizes.toy) for name in PAIR)
    count, batch = sizes.embedded, sizes.batches[-1]
    network, params = target.network, target.params
    kinds = {
        "the distilled draft": small,
        "int8": (network, quantise(params, 8)),
        "int4": (network, quantise(params, 4)),
        "lookup": PromptLookup(),
    }
    stored_bytes = lambda params: sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    say(
        f"drafts for the embedded target ({stored_bytes(target.params):,} bytes), {batch} rows, gamma {gamma}"
    )
    rows = []
    for name, drafter in kinds.items():
        size = 0 if name == "lookup" else stored_bytes(bound(drafter)[1])
        for temperature in (0.0, 1.0):
            options = {"drafter": drafter, "gamma": gamma, "temperature": temperature}
            request = ours(target, held_out_prompts(batch, 64, sizes.toy), count, **options)
            info = text.generate(*request._replace(key=jax.random.key(0))).info
            rows.append({"draft": name, "temperature": temperature, "bytes": size,
                         "acceptance": info.acceptance, "tokens_per_pass": per_pass(info)})  # fmt: skip
            say(f"  {name}, temperature {temperature:g}: {rows[-1]['bytes']:,} bytes, acceptance"
                f" {info.acceptance:.3f}, {per_pass(info):.2f} tokens per target pass")  # fmt: skip
    return rows


def make_parser() -> Parser:
    parser = Parser(__doc__, repeats=1)
    parser.add_argument("--only", choices=("embedded", "pythia", "drafts"))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--acceptance", type=float, help="to replay (measured on the embedded pair)")
    return parser


def main() -> None:
    args = begin(make_parser())
    sizes = TOY if args.toy else Sizes()
    result: dict[str, Any] = {"jax": jax.__version__, "machine": platform.machine()}
    beside = not args.toy or importlib.util.find_spec("transformers") is not None
    if not beside:
        left_out("all but the drafts", "torch and transformers are not installed: extra `parity`")
    if beside and args.only != "drafts":
        import torch
        import transformers

        result |= {"transformers": transformers.__version__, "torch": torch.__version__}
        result["torch_threads"] = torch.get_num_threads()
    if beside and args.only in (None, "embedded"):
        result["embedded"] = embedded(sizes, args.repeats)
    if args.only in (None, "drafts"):
        result["drafts"] = drafts(sizes)
    if beside and args.only in (None, "pythia"):
        acceptance = args.acceptance
        if acceptance is None:
            found = result.get("drafts") or drafts(sizes)
            acceptance = found[0]["acceptance"]
        result["pythia"] = pythia(sizes, args.repeats, acceptance)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
