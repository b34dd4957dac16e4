"""Draft trees beside chains of drafts, for the pair that comes with the package, on held-out text.

    python benchmarks/trees.py                     # some minutes
    python benchmarks/trees.py --texts 8 --count 32

One text at a time, the ways in turns: tokens per target pass with their standard error over the texts, and
the median time of a text. Prints tables on standard error and one JSON object on standard output.
"""

from __future__ import annotations

import json
import platform
import re
import statistics
import sys
import time

import jax
import numpy as np
from inputs import expression
from toy import Parser, begin, held_out_texts, load_text

from cspd_jax.text import Info, Options, draft_tree
from cspd_jax.text.comparison import Request
from cspd_jax.weights.tokenizers import ByteTokenizer

GAMMAS = (3, 4, 5)
TREES = ((3, 2, 1), (4, 2, 1, 1), (2, 2, 2, 1))


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def pieces_of(count: int, toy: bool, length: int = 64) -> list[list[int]]:
    """Pieces of held-out documents."""
    texts = [ByteTokenizer().encode(text) for text in held_out_texts(toy)]
    pieces = [
        t[i : i + length] for i in range(0, 64 * length, 4 * length) for t in texts if len(t) > i + length
    ]
    assert len(pieces) >= count
    return pieces[:count]


def ways(target, small, count: int, sampled: bool) -> dict[str, Request]:
    key, temperature = (jax.random.key(0), 1.0) if sampled else (None, 0.0)
    options = Options(temperature=temperature, max_new_tokens=count, stop_ids=())
    base = Request(key, target, [], None, options)
    found = {"plain": base}
    for rule in ("google", "block") if sampled else ("block",):
        found |= {
            f"chain of {g}, {rule}": base._replace(drafter=small).with_options(rule=rule, gamma=g)
            for g in GAMMAS
        }
    tree = lambda widths: base._replace(drafter=draft_tree(small, widths))
    return found | {f"tree {','.join(map(str, w))}": tree(w) for w in TREES}


def per_pass(tokens: np.ndarray, rounds: np.ndarray) -> tuple[float, float]:
    """Tokens per target pass and the standard error, from the numbers of each text."""
    ratio = tokens.sum() / rounds.sum()
    return ratio, float(np.std(tokens - ratio * rounds, ddof=1) / rounds.mean() / np.sqrt(len(rounds)))


def measure(request: Request, index: int, prompt: list[int]) -> tuple[float, Info]:
    key = None if request.key is None else jax.random.fold_in(request.key, index)
    one = request._replace(key=key, prompts=[prompt])
    start = time.perf_counter()
    output = jax.block_until_ready(one.run())
    return time.perf_counter() - start, output.info


def make_parser() -> Parser:
    parser = Parser(__doc__, texts=2, count=8, ways="of 3|tree 2")
    parser.add_argument("--texts", type=int, default=64)
    parser.add_argument("--count", type=int, default=128, help="new tokens of each")
    parser.add_argument("--only", choices=("greedy", "sampled"))
    parser.add_argument(
        "--ways", type=expression, default="", metavar="REGEX", help="of the names, beside plain"
    )
    return parser


def main() -> None:
    args = begin(make_parser())
    target, small = (load_text(name, args.toy) for name in ("text-default", "text-default-draft"))
    prompts, table = pieces_of(args.texts, args.toy), []
    for sampled in {"greedy": (False,), "sampled": (True,)}.get(args.only, (False, True)):
        requests = ways(target, small, args.count, sampled)
        requests = {n: r for n, r in requests.items() if n == "plain" or re.search(args.ways, n)}
        for request in requests.values():
            measure(request, 0, prompts[0])  # this compiles
        found = {name: [] for name in requests}
        for index, prompt in enumerate(prompts):
            for name, request in requests.items():
                found[name].append(measure(request, index, prompt))
        say(f"{'temperature 1' if sampled else 'greedy'}: tokens per target pass, and the time of a text")
        plain = statistics.median(seconds for seconds, _ in found["plain"])
        for name, texts in found.items():
            infos = [info for _, info in texts]
            rounds = np.array([info.rounds.sum() for info in infos], float)
            ratio, error = per_pass(np.array([info.new_tokens.sum() for info in infos], float), rounds)
            seconds = statistics.median(seconds for seconds, _ in texts)
            table.append({
                "what": name, "sampled": sampled, "tokens_per_pass": ratio, "standard_error": error,
                "rows_per_pass": sum(int(info.calls.target_rows) for info in infos) / rounds.sum(),
                "draft_passes_per_pass": sum(int(i.calls.draft_passes) for i in infos) / rounds.sum(),
                "seconds": seconds, "over_plain": plain / seconds,
                "truncated": int(sum(info.truncated.sum() for info in infos)),
            })  # fmt: skip
            last = table[-1]
            say(f"  {name:20s} {ratio:.3f} +- {error:.3f}, {last['rows_per_pass']:.0f} rows,"
                f" {last['draft_passes_per_pass']:.1f} draft passes; {seconds:.3f} s,"
                f" {last['over_plain']:.2f} of plain's speed")  # fmt: skip
    print(json.dumps({
        "texts": args.texts, "count": args.count, "table": table,
        "processor": platform.processor() or platform.machine(), "jax": jax.__version__,
    }))  # fmt: skip


if __name__ == "__main__":
    main()
