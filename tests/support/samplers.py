"""One table of every public way to generate: each property test is parametrised over
it.

A row says how it is asked for. Its `request(seed)` holds the arguments of `generate`
and `stream` of its family for ROWS rows; all but row FIXED depend on the seed. A new
sampler is a new row.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import masked_models
import numpy as np
import pytest
import text_models
from linear_tokens import AnySchedule, LinearTokens

from cspd_jax import image, masked, parallel, text
from cspd_jax.image import (
    DraftSpeculation,
    PaperCriterion,
    Plain,
    Released,
    SelfSpeculation,
    Spread,
)
from cspd_jax.image.chain import ChainSpeculation
from cspd_jax.image.lossy import Annealing, Checkerboard
from cspd_jax.models import ImageModel, TextModel
from cspd_jax.networks.lm import LM

ROWS = 6
FIXED = 2  # the row whose neighbours change
LONGEST = 6  # of prompts
NEW = 13  # tokens of texts
MAX_GAMMA = 5  # of drafts
WIDTHS = (2, 2, 1)  # of the draft trees
STEPS = 6  # of the schedules


def row_keys(seed, rows=ROWS):
    keys = jax.random.split(jax.random.key(seed), rows)
    return keys.at[FIXED].set(jax.random.key(77))


def placed(kind, network, params, mesh):
    """A model with these parameters on a mesh, or on one device."""
    if mesh is None:
        return kind("tiny", network, jax.tree.map(jnp.asarray, params))
    params = parallel.place(mesh, params, network.config)
    return kind("tiny", network, params, mesh=mesh)


def some_known(images, length=6, dim=2):
    """Each image knows another set of tokens, from none of them to all, which are no
    draws of any model."""
    random = np.random.default_rng(3)
    many = random.integers(0, length + 1, images)
    ranks = random.random((images, length)).argsort(axis=1)
    return image.Known(
        random.normal(0.7, 0.5, (images, length, dim)).astype(np.float32),
        ranks < many[:, None],
    )


TARGET = LinearTokens()
NEAR = LinearTokens(pull=1.45, offset=0.42)
FAR = LinearTokens(pull=0.5, offset=0.9, variance=0.16)
CHAINS = {"denoise": ChainSpeculation(4)}


@dataclasses.dataclass(frozen=True)
class ImageWay:
    """method: made of a draft model. options: of `image.Options`; a pair of guidance
    scales is spread over the images. images: as many as its law is tested with."""

    method: Callable[[ImageModel], image.Method] = lambda draft: Plain()
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    network: LinearTokens = TARGET
    draft: LinearTokens = NEAR
    images: int = 4000
    exact: bool = True
    family = image

    def settled(self, images, **more):
        options = {"num_iter": 6, **self.options, **more}
        if isinstance(options.get("cfg"), tuple):
            options["cfg"] = np.linspace(*options["cfg"], images)
        return image.Options(**options)

    def asked(self, draft=None):
        return self.method(draft or ImageModel("draft", self.draft, None))

    def request(self, seed, model=None, draft=None, images=ROWS, **more):
        random = np.random.default_rng(seed)
        labels = random.integers(-1, 2, images)
        labels[FIXED] = 1
        options = self.settled(images, **more)
        if np.any(np.asarray(options.cfg) != 1):
            # Of one mean: the drafter along chains is fitted to it, for all images.
            cfg = random.permutation(np.linspace(1.2, 2.5, images - 1))
            cfg = np.insert(cfg, FIXED, 1.5)
            options = dataclasses.replace(options, cfg=cfg)
        model = model or ImageModel("linear", self.network, None)
        return row_keys(seed, images), model, labels, self.asked(draft), options


def itself(gamma=3, **options):
    return lambda draft: SelfSpeculation(gamma, **options)


def drafted(gamma=3, **options):
    return lambda draft: DraftSpeculation(draft, gamma=gamma, **options)


def paper(gamma=3, **criterion):
    return lambda draft: DraftSpeculation(
        draft, PaperCriterion(**{"sigma": False} | criterion), gamma
    )


GROUPS = {"num_iter": 3, "cfg": 1.5}
IMAGE = {
    "plain": ImageWay(),
    "plain, groups, guided, cold": ImageWay(options={**GROUPS, "temperature": 0.8}),
    "plain, spread": ImageWay(
        options={"order": Spread()}, network=LinearTokens(seq_len=9)
    ),
    "plain, chains": ImageWay(options={"num_iter": 4, **CHAINS}),
    "plain, chains, guided": ImageWay(
        options={"num_iter": 4, "cfg": (0.4, 2.5), **CHAINS},
        network=LinearTokens(unconditional=0.5),
    ),
    "annealed": ImageWay(
        options={"anneal": Annealing(10, 3, levels=2), **GROUPS},
        network=AnySchedule(seq_len=9),
        exact=False,
    ),
    "annealed checkerboard": ImageWay(
        options={
            "anneal": Annealing(10, 3, levels=2),
            "order": Checkerboard(1),
            "num_iter": 3,
        },
        network=AnySchedule(seq_len=9),
        exact=False,
    ),
    "self": ImageWay(itself()),
    "self, guided": ImageWay(itself(), {"cfg": (0.5, 2.5)}),
    "self, groups, guided": ImageWay(itself(2, prefill=0.3), GROUPS),
    "self, few steps": ImageWay(itself(1), {"cfg": 1.5}, LinearTokens(spec="ddim2")),
    "self, far ahead, cold": ImageWay(itself(8), {"cfg": 1.5, "temperature": 0.8}),
    "self, adaptive": ImageWay(itself(4, draft_cost=0.2)),
    "self, spread": ImageWay(
        itself(2), {"order": Spread(), "num_iter": 5}, LinearTokens(seq_len=9)
    ),
    "self, both levels": ImageWay(itself(), CHAINS, images=400),
    "self, coupled, guided": ImageWay(itself(coupled=True), {"cfg": (0.5, 2.5)}),
    "self, coupled, few steps": ImageWay(
        itself(2, coupled=True), {"cfg": 1.5}, LinearTokens(spec="ddim2")
    ),
    "self, coupled, groups, cold": ImageWay(
        itself(3, prefill=0.3, draft_cost=0.1, coupled=True),
        {"num_iter": 3, "temperature": 0.8},
    ),
    "self, coupled, both levels": ImageWay(itself(coupled=True), CHAINS, images=400),
    "draft": ImageWay(drafted()),
    "draft, far, groups, guided": ImageWay(drafted(2, prefill=0.3), GROUPS, draft=FAR),
    "draft, adaptive, both levels": ImageWay(
        drafted(draft_cost=0.3), CHAINS, images=400
    ),
    "paper, Sigma = 1": ImageWay(paper()),
    "paper, Sigma = 1, groups, guided, own noise": ImageWay(
        paper(2, align=False), GROUPS
    ),
    "paper, Sigma = 1, both levels": ImageWay(paper(), CHAINS, images=400),
    "paper, widened": ImageWay(paper(inner_temperature=42.0), exact=False),
    "released": ImageWay(
        lambda draft: Released(draft, gamma=2, inner_temperature=5.0),
        {"num_iter": 4, "cfg": 1.5, "final_noise": False},
        exact=False,
    ),
}


class CountedDrafter(NamedTuple):
    """A drafter of text, and how its work is counted.

    make: a function of (target, a model near it) that returns what `method` takes.
    passes: the least and the most passes of the drafter, for a pass of the target.
    rows: a function of (passes of the target, passes of the drafter) that returns the
        tokens in the drafter's passes, for each text.
    drafts: the drafts that a pass of the target reads.
    method: the method, as a function of the draft and of what `TextWay` gives.
    """

    make: Callable[[Any, Any], Any]
    passes: tuple[int, int] = (0, 0)
    rows: Callable[[int, int], int] = lambda target, own: 0
    drafts: int = MAX_GAMMA
    method: Callable[..., Any] = text.Speculation


def head_of(target, near):
    ids = np.arange(target.config.known_ids)[::-1]
    head = text_models.head(target.network, target.params, ids)
    return text.draft_from_states(head, target, confidence=0)


DRAFTERS = {
    "lookup": CountedDrafter(lambda target, near: text.PromptLookup()),
    # The first pass of a round reads what the last one may have added.
    "model": CountedDrafter(
        lambda target, near: near,
        (1, MAX_GAMMA),
        lambda target, own: own + target,  # see ModelDrafter
    ),
    "head": CountedDrafter(
        head_of, (1, MAX_GAMMA), lambda target, own: MAX_GAMMA * target + own
    ),
    # A level is a pass, and the last one is not read.
    "tree": CountedDrafter(
        lambda target, near: near,
        (len(WIDTHS), len(WIDTHS)),
        lambda target, own: (2 + 2 + 4) * target,
        2 + 4 + 4,
        lambda draft, *how, **more: text.Tree(draft, WIDTHS),
    ),
}


@dataclasses.dataclass(frozen=True)
class TextWay:
    """Without a drafter this is plain decoding. filtered: by top-k and top-p."""

    drafter: str | None = None
    rule: str = "block"
    sampled: bool = True
    filtered: bool = False
    how: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    stop_ids: tuple[int, ...] = ()
    exact = True
    family = text

    def request(self, seed, mesh=None, rows=ROWS):
        random = np.random.default_rng(seed)
        (tokens, lengths) = text_models.prompts(rows, LONGEST, seed=seed)
        tokens[FIXED] = [5, 9, 2, 7, 0, 0]
        lengths[FIXED] = 4
        gamma, new = (random.integers(1, n + 1, rows) for n in (MAX_GAMMA, NEW))
        gamma[FIXED] = 4
        new[FIXED] = NEW
        lm = text_models.model(padding=2)
        params = text_models.params(lm)
        target, near = (
            placed(TextModel, lm, p, mesh) for p in (params, text_models.near(params))
        )
        temperature = random.uniform(0.5, 2, rows)
        temperature[FIXED] = 0.9
        options = {
            "max_new_tokens": new,
            "max_len": LONGEST + NEW,
            "stop_ids": self.stop_ids,
            "temperature": temperature if self.sampled else 0.0,
        }
        if self.filtered:
            options |= {"top_k": 7, "top_p": 0.95}
        if self.drafter is None:
            method = text.Plain()
        else:
            of = DRAFTERS[self.drafter]
            draft = of.make(target, near)
            method = of.method(draft, gamma, self.rule, max_gamma=MAX_GAMMA, **self.how)
        prompts = text.Prompts(tokens, lengths)
        return row_keys(seed, rows), target, prompts, method, text.Options(**options)


@dataclasses.dataclass(frozen=True)
class MaskedWay:
    """A method of a model family, greedy unless sampled."""

    method: str = "ssd"
    model: str = "llada"
    threshold: float | None = None
    sampled: bool = False
    guidance: float | None = None
    family = masked

    @property
    def exact(self):
        return self.method != "schedule"

    def request(self, seed, mesh=None, rows=ROWS):
        random = np.random.default_rng(seed)
        tokens = random.integers(0, masked_models.MASK, (rows, LONGEST))
        lengths = random.integers(1, LONGEST + 1, rows)
        gamma = random.integers(1, MAX_GAMMA + 1, rows)
        tokens[FIXED] = [5, 9, 2, 7, 0, 0]
        lengths[FIXED] = 4
        gamma[FIXED] = 4
        temperature = random.uniform(0.5, 1.5, rows)
        temperature[FIXED] = 0.8
        config = dataclasses.replace(masked_models.CONFIGS[self.model], depth=1)
        methods = {
            "ssd": masked.SelfSpeculation(gamma, MAX_GAMMA),
            "stepwise": masked.Stepwise(),
            "schedule": masked.Schedule(STEPS),
        }
        options = masked.Options(
            max_new_tokens=masked_models.PLACES,
            block=4,
            threshold=self.threshold,
            guidance=self.guidance,
            temperature=temperature if self.sampled else 0.0,
        )
        params = masked_models.params_of(config, 0)
        model = placed(TextModel, LM(config, jnp.float64), params, mesh)
        asked = text.Prompts(tokens, lengths), methods[self.method], options
        return row_keys(seed, rows), model, *asked


ADAPTED = {"how": {"draft_cost": 0.1, "confidence": 0.3}, "stop_ids": (4,)}
TEXT = {
    "text, plain, top-k, top-p": TextWay(filtered=True),
    "text, greedy, model": TextWay("model", sampled=False),
    "text, google, model": TextWay("model", "google"),
    "text, block, model, adapted": TextWay("model", "block", **ADAPTED),
    "text, match, model, adapted": TextWay("model", "match", **ADAPTED),
    "text, block, lookup": TextWay("lookup", "block"),
    "text, block, head": TextWay("head", "block"),
    "text, tree": TextWay("tree", "tree", stop_ids=(4,)),
    "text, greedy, tree": TextWay("tree", "tree", sampled=False),
}
MASKED = {
    "masked, ssd": MaskedWay(sampled=True),
    "masked, ssd, blocks": MaskedWay(model="sdar", sampled=True),
    "masked, ssd, Dream, guided": MaskedWay(model="dream", guidance=0.7),
    "masked, ssd, shifted blocks, threshold": MaskedWay(model="fast", threshold=0.4),
    "masked, stepwise": MaskedWay("stepwise", sampled=True),
    "masked, stepwise, blocks": MaskedWay("stepwise", "sdar", sampled=True),
    "masked, schedule": MaskedWay("schedule", sampled=True),
    "masked, schedule, Dream": MaskedWay("schedule", "dream"),
}
WAYS = IMAGE | TEXT | MASKED


def each(ways=WAYS, quick=()):
    """Parametrises a test over rows of the table; all but the quick ones are slow."""
    rows = [pytest.param(way, id=name) for name, way in ways.items()]

    def over_rows(test):
        return pytest.mark.quick(*quick)(pytest.mark.parametrize("way", rows)(test))

    return over_rows
