"""Fingerprints of the tokens that every method of every family makes at fixed keys, in
float64.

    python tests/token_hashes.py  # compares with golden/token_hashes.json
    python tests/token_hashes.py text: masked:  # only the cases whose names begin so
    python tests/token_hashes.py --write  # replaces the file

A change of structure must leave them alone. A change that is meant to draw other tokens
(of the same distribution) writes them anew and says why. Real numbers are rounded to
four decimals: far above the rounding errors of float64, and above those of the noise,
which is drawn in float32 whatever the networks run in, so the file holds on every
machine.
"""

import argparse
import dataclasses
import hashlib
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "support"))

import jax
import jax.numpy as jnp
import masked_models
import numpy as np
import text_models
import tiny
from batches import batch_of
from linear_tokens import LinearTokens

from cspd_jax import masked, shell, text
from cspd_jax.image import released, rounds, sampler
from cspd_jax.image.chain import ChainSpeculation
from cspd_jax.image.coupled import CoupledCriterion
from cspd_jax.image.criterion import PathCriterion
from cspd_jax.image.methods import Released
from cspd_jax.image.options import Options
from cspd_jax.image.paper import PaperCriterion
from cspd_jax.image.recipe import Draft
from cspd_jax.keys import row_keys
from cspd_jax.masked import SelfSpeculation
from cspd_jax.networks import mar
from cspd_jax.networks.mar import MARModel

FILE = Path(__file__).parent / "golden" / "token_hashes.json"


class Linear(LinearTokens):
    """In float64."""

    dtype = jnp.float64


TARGET = Linear()
NEAR = Linear(pull=1.45, offset=0.42)
FAR = Linear(pull=0.5, offset=0.9, variance=0.16)
CHAINS = ChainSpeculation(4)


PAPER = {"criterion": PaperCriterion}
LABELS = (0, 0, -1, 0, 0, 0, -1, 0)


def ahead(gamma, criterion=PathCriterion, draft_cost=None, prefill=0.0, **of_criterion):
    return criterion(**of_criterion), gamma, draft_cost, prefill


def _options(**settings):
    own = {"num_iter": 6, "respacing": TARGET.spec}
    own |= {"final_noise": True, "prefix_buckets": 1}
    return Options(**own | settings)


def batch(draft=None, **settings):
    keys = row_keys(jax.random.key(1), len(LABELS))
    small = None if draft is None else Draft(draft)
    labels = jnp.array(LABELS, jnp.int32)
    return batch_of(TARGET, None, keys, labels, _options(**settings), small)


def plain_tokens(**settings):
    return (sampler.generate(batch(**settings)).tokens,)


def outer_tokens(speculation, **settings):
    return speculated(batch(**settings), speculation)


def speculated(asked, speculation):
    return tokens_and_marks(shell.run(rounds.bound_rounds(asked, *speculation)))


def tokens_and_marks(made):
    marks = made.info.trace.marks
    return made.tokens, marks != 0, marks > 0


def released_tokens(draft, cfg, num_iter, **runner):
    asked = batch(cfg=cfg, num_iter=num_iter, final_noise=False, draft=draft)
    return tokens_and_marks(released.generate(asked, Released(None, **runner)))


def mar_tokens(speculation=None, num_iter=4, **settings):
    """A tiny MAR network with random weights."""
    config = dataclasses.replace(tiny.PIXELS, respacing="ddim5")
    params = jax.tree.map(
        lambda a: np.asarray(a, np.float64), tiny.params(mar.abstract_params(config))
    )
    settings |= {"respacing": "ddim5", "prefix_buckets": 2}
    options = _options(num_iter=num_iter, **settings)
    keys = row_keys(jax.random.key(2), 3)
    labels = jnp.array([0, 3, -1])
    asked = batch_of(MARModel(config, jnp.float64), params, keys, labels, options)
    if speculation is None:
        return (sampler.generate(asked).tokens,)
    return speculated(asked, speculation)


IMAGE = {
    "plain": plain_tokens,
    "plain, no final noise, groups, guided, cold": lambda: plain_tokens(
        num_iter=3, cfg=1.5, temperature=0.8, final_noise=False
    ),
    "plain, chains, no final noise": lambda: plain_tokens(
        denoise=CHAINS, final_noise=False, num_iter=3
    ),
    "self, groups, guided, prefill": lambda: outer_tokens(
        ahead(gamma=2, prefill=0.3), num_iter=3, cfg=1.5, temperature=0.9
    ),
    "self, adaptive, chains": lambda: outer_tokens(
        ahead(gamma=4, draft_cost=0.2), denoise=CHAINS
    ),
    "self, coupled, groups, guided, chains": lambda: outer_tokens(
        ahead(gamma=3, criterion=CoupledCriterion), num_iter=3, cfg=1.5, denoise=CHAINS
    ),
    "draft, path, far, guided": lambda: outer_tokens(
        ahead(gamma=3), draft=FAR, cfg=2.0
    ),
    "draft, path, far, groups, guided, chains": lambda: outer_tokens(
        ahead(gamma=2, prefill=0.3, draft_cost=0.3),
        draft=FAR,
        num_iter=3,
        cfg=1.5,
        denoise=CHAINS,
    ),
    "draft, paper, Sigma = 1, unaligned, guided": lambda: outer_tokens(
        ahead(gamma=2, sigma=False, align=False, **PAPER),
        draft=NEAR,
        num_iter=3,
        cfg=1.5,
    ),
    "draft, paper, widened (lossy)": lambda: outer_tokens(
        ahead(gamma=3, inner_temperature=42.0, **PAPER), draft=NEAR
    ),
    "released, groups, guided (lossy)": lambda: released_tokens(
        draft=FAR, num_iter=4, cfg=1.5, gamma=3, inner_temperature=5.0, prefill=0.3
    ),
    "MAR, plain, guided": lambda: mar_tokens(cfg=2.0),
    "MAR, plain, chains": lambda: mar_tokens(denoise=CHAINS),
    "MAR, self": lambda: mar_tokens(ahead(gamma=2), num_iter=5),
}


def text_tokens(drafter=None, temperature=0.8, top_k=None, top_p=None, **how):
    model = text_models.model()
    params = text_models.params(model)
    near = (model, text_models.near(params))
    if drafter is None:
        method = text.Plain()
    elif drafter == "tree":
        method = text.Tree(near, (2, 2, 1))
    else:
        lookup = text.PromptLookup(shortest=1)
        method = text.Speculation(near if drafter == "model" else lookup, **how)
    options = text.Options(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        max_new_tokens=12,
        stop_ids=(3,),
    )
    prompts = text_models.prompts(4, 5)
    tokens, info = text.generate(
        jax.random.key(5), (model, params), prompts, method, options
    )
    return tokens, info.trace.marks, info.trace.lengths


TEXT = {
    "plain": lambda: text_tokens(top_k=6, top_p=0.9),
    "greedy, model": lambda: text_tokens("model", temperature=0.0),
    "block, adaptive, confidence": lambda: text_tokens(
        "model", rule="block", draft_cost=0.2, confidence=0.3
    ),
    "tree": lambda: text_tokens("tree"),
    "match": lambda: text_tokens("model", rule="match"),
    "lookup, block": lambda: text_tokens("lookup", rule="block", temperature=0.3),
    "lookup, google": lambda: text_tokens("lookup", rule="google", temperature=0.3),
}


def masked_tokens(
    family="llada", method=SelfSpeculation(3), temperature=0.0, **options
):
    random = np.random.default_rng(7)
    lengths = random.integers(1, 7, 4)
    prompts = masked.Prompts(random.integers(0, masked_models.MASK, (4, 6)), lengths)
    config = masked_models.CONFIGS[family]
    model = (text_models.LM(config, jnp.float64), masked_models.params_of(config, 0))
    options = masked.Options(
        max_new_tokens=masked_models.PLACES, block=4, temperature=temperature, **options
    )
    tokens, info = masked.generate(jax.random.key(6), model, prompts, method, options)
    return tokens, info.trace.steps, info.trace.rounds


MASKED = {
    "stepwise, blocks, sampled": lambda: masked_tokens(
        "sdar", method=masked.Stepwise(), temperature=0.7
    ),
    "ssd, sampled, guided": lambda: masked_tokens(temperature=0.7, guidance=0.7),
    "ssd, shifted blocks, threshold": lambda: masked_tokens("fast", threshold=0.3),
    "ssd, sets": lambda: masked_tokens(method=SelfSpeculation(4, texts=8)),
    "schedule (lossy)": lambda: masked_tokens(method=masked.Schedule(6)),
    "schedule, Dream (lossy)": lambda: masked_tokens(
        "dream", method=masked.Schedule(6)
    ),
}

CASES = {
    f"{family}: {name}": case
    for family, cases in (("image", IMAGE), ("text", TEXT), ("masked", MASKED))
    for name, case in cases.items()
}


def fingerprint(arrays):
    """Of the values in order, whatever their types."""
    found = hashlib.sha256()
    for array in map(np.asarray, arrays):
        if np.issubdtype(array.dtype, np.floating):
            array = np.round(array.astype(np.float64), 4) + 0.0  # no negative zeros
        else:
            array = array.astype(np.int64)
        found.update(repr(array.shape).encode() + array.tobytes())
    return found.hexdigest()[:16]


def found(name):
    with jax.enable_x64(True):
        return fingerprint(CASES[name]())


def recorded():
    return json.loads(FILE.read_text(encoding="utf-8"))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "prefixes", nargs="*", default=[""], help="only cases whose names begin so"
    )
    parser.add_argument(
        "--write", action="store_true", help="replace the recorded fingerprints"
    )
    args = parser.parse_args()
    chosen = tuple(args.prefixes)
    begun_so = lambda name: name.startswith(chosen)
    hashes = {name: found(name) for name in CASES if begun_so(name)}
    if args.write:
        kept = {} if chosen == ("",) else recorded()
        FILE.write_text(json.dumps(kept | hashes, indent=1) + "\n", encoding="utf-8")
        return 0
    before = {name: value for name, value in recorded().items() if begun_so(name)}
    names = sorted(before.keys() | hashes)
    different = [name for name in names if before.get(name) != hashes.get(name)]
    for name in different:
        print(f"{name}: {before.get(name)} recorded, {hashes.get(name)} found")
    equal = len(names) - len(different)
    print(f"{equal} of {len(before)} fingerprints are equal")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
