"""Makes the programs that are timed on a GPU, or counted without one: AR steps, rounds
and texts at the sizes of published models.

Each program does the work of one call of the library, which is AR steps in one scan or
rounds in one loop. So its time includes everything that the host does between kernels.
The weights are random, so they would accept no drafts. The accepted drafts are replayed
from runs of the trained models that come with the package (accepted.py).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from accepted import (
    LATE,
    ReplayedChains,
    Run,
    calls_of,
    chains_of,
    recorded,
    replaying,
    run_of,
    table_of,
    way_name,
)
from toy import narrow, results

import cspd_jax
from cspd_jax import shell
from cspd_jax.diffusion.schedule import sampling_schedule
from cspd_jax.image import rounds, sampler
from cspd_jax.image.bound import bind
from cspd_jax.image.chain import ChainSpeculation
from cspd_jax.image.generation import resolve
from cspd_jax.image.methods import SelfSpeculation
from cspd_jax.image.options import Options
from cspd_jax.image.recipe import Batch
from cspd_jax.masked import generation as masked_generation
from cspd_jax.models import ImageModel
from cspd_jax.networks import lm
from cspd_jax.networks.lm import LMConfig
from cspd_jax.networks.mar import MAR_PRESETS, MARConfig
from cspd_jax.networks.registry import kind_of
from cspd_jax.networks.sphere import SPHERE_PRESETS
from cspd_jax.text import Drafter, Drafting, ModelDrafter, Plain, Speculation
from cspd_jax.text import generation as text_generation

PLAIN = ("plain", "text-plain", "stepwise")  # the methods that others are compared with
IDENTITY = ("model", "dtype", "batch", "guided", "method", "options")
NEW_TOKENS = PROMPT = 64
MASKED = Path(__file__).parent / "results" / "masked-alone.json"

SMALL = MARConfig(
    encoder_width=128,
    encoder_depth=4,
    encoder_heads=4,
    decoder_width=128,
    decoder_depth=4,
    decoder_heads=4,
    head_depth=3,
    head_width=256,
    respacing="ddim100",
)
PYTHIA_160M = LMConfig(
    family="gpt_neox",
    vocab_size=50304,
    known_ids=50304,
    width=768,
    depth=12,
    heads=12,
    kv_heads=12,
    head_dim=64,
    mlp_width=3072,
    max_positions=2048,
    activation="gelu",
    gated_mlp=False,
    norm="layer",
    parallel_residual=True,
    qkv_bias=True,
    out_bias=True,
    mlp_bias=True,
    rotary_share=0.25,
)
PYTHIA_1_4B = dataclasses.replace(
    PYTHIA_160M,
    width=2048,
    depth=24,
    heads=16,
    kv_heads=16,
    head_dim=128,
    mlp_width=8192,
)
SDAR_8B = LMConfig(
    family="sdar",
    vocab_size=151936,
    known_ids=151936,
    width=4096,
    depth=36,
    heads=32,
    kv_heads=8,
    head_dim=128,
    mlp_width=12288,
    max_positions=4096,
    rope_theta=1e6,
    causal=False,
    block=8,
    mask_ids=(151669,),
)
SDAR_1_7B = dataclasses.replace(
    SDAR_8B, width=2048, depth=28, heads=16, mlp_width=6144, tie_embeddings=True
)
SDAR = {"sdar-1.7b": SDAR_1_7B, "sdar-8b": SDAR_8B}


@dataclasses.dataclass(frozen=True)
class Scale:
    """The amount of work in a case. `tokens` is the number of tokens of an image that
    are made, after 3/8 of its tokens that are known."""

    toy: bool = False

    @property
    def tokens(self) -> int:
        return 2 if self.toy else 32

    @property
    def new_tokens(self) -> int:
        return 8 if self.toy else NEW_TOKENS

    def of(self, config: Any) -> Any:
        return narrow(config) if self.toy else config


@dataclasses.dataclass(frozen=True)
class Case:
    """A program to be timed or counted.

    about: the identity of its row in the results.
    configs: the configurations of the models whose parameters the program takes.
    args: a function of these models' parameters. It returns the arguments of
        `function`: pytrees of arrays, without typed keys.
    function: the program, a function of these arguments.
    tokens: the number of tokens that one run makes in a row of the batch.
    trips: for loops whose end depends on the data, the number of trips by depth.
    named: the number of trips of a loop in a `jax.named_scope`, by the scope's name; or
        the share of rounds in which a condition in a scope is true.
    facts: a function of the output. It returns values that are known only after the
        run. A value `tokens` replaces the number above.
    device_loops: whether the device runs the loops by itself.
    """

    about: dict[str, Any]
    configs: tuple[Any, ...]
    args: Callable[..., tuple]
    function: Callable
    tokens: float
    trips: tuple[float, ...] = ()
    named: Mapping[str, float] = dataclasses.field(default_factory=dict)
    facts: Callable[[Any], dict[str, Any]] = lambda out: {}
    device_loops: bool = False

    def lowered(
        self, sharding: jax.sharding.Sharding | None = None
    ) -> jax.stages.Lowered:
        """Traces the program for the shapes and types of its arguments, without making
        the arrays."""
        shapes = [
            jax.eval_shape(lambda c=c: random_params(c, self.about["dtype"]))
            for c in self.configs
        ]
        found = jax.eval_shape(self.args, *shapes)
        args = jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), found
        )
        return jax.jit(self.function).lower(*args)

    def real_args(self) -> tuple:
        return self.args(
            *(params_on_device(config, self.about["dtype"]) for config in self.configs)
        )


def about(model: str, method: str, options: str = "", **more: Any) -> dict[str, Any]:
    """Returns the identity of a row of the results."""
    same = {"model": model, "dtype": "bfloat16", "batch": 1, "guided": False}
    return {**same, "method": method, "options": options, **more}


def by_the_device(case: Case) -> Case:
    """Returns the case with loops that the device runs by itself."""
    options = ", ".join(filter(None, (case.about["options"], "device loops")))
    return dataclasses.replace(
        case, about=case.about | {"options": options}, device_loops=True
    )


def by_the_host(about: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the identity of the row for the same program with loops that the host
    runs."""
    words = about["options"].split(", ")
    return {**about, "options": ", ".join(w for w in words if w != "device loops")}


def random_params(config: Any, dtype: str) -> Any:
    """Returns parameters that are normal numbers with a standard deviation of 0.02.
    With a model's own first parameters, the head would output zeros."""
    module = lm if isinstance(config, LMConfig) else kind_of(config)
    leaves, tree = jax.tree.flatten(module.abstract_params(config))
    drawn = [
        (0.02 * jax.random.normal(k, a.shape, jnp.float32)).astype(dtype)
        for k, a in zip(jax.random.split(jax.random.key(0), len(leaves)), leaves)
    ]
    return jax.tree.unflatten(tree, drawn)


@functools.lru_cache(maxsize=2)
def params_on_device(config: Any, dtype: str) -> Any:
    return jax.jit(random_params, static_argnums=(0, 1))(config, dtype)


@dataclasses.dataclass(frozen=True)
class Replayed(Drafter):
    """A drafter that runs a draft model, so that its time counts, but replaces the
    drafted tokens. Some of the new tokens are right, and the others are wrong.

    Its parameters are (the parameters of the model; right [B, N], the right tokens; use
    [B, N], whether to propose the right token at each place).
    """

    inner: ModelDrafter

    def begin(self, params, *more):
        return self.inner.begin(params[0], *more)

    def draft(self, params, state, request):
        weights, right, use = params
        drafts, state = self.inner.draft(weights, state, request)
        at = request.length[:, None] + jnp.arange(request.max_gamma)
        take = lambda a: jnp.take_along_axis(a, jnp.minimum(at, a.shape[1] - 1), 1)
        wrong = (
            take(right) + 1 + drafts.tokens % 2
        ) % request.num_ids  # so that the draft is not left out
        return drafts._replace(tokens=jnp.where(take(use), take(right), wrong)), state


# Images


def image_case(
    name: str,
    scale: Scale,
    window: int | None = None,
    gamma: int = 0,
    batch: int = 1,
    guided: bool = False,
    dtype: str = "bfloat16",
    steps: int = 100,
    coupled: bool = False,
    early: bool = False,
) -> Case:
    """Returns a case that makes tokens of an image whose first 3/8 are known, by AR
    steps or by rounds of self-speculation.

    window: the window M of speculation along the chains; None denoises step by step.
    gamma: the number of groups drafted ahead; 0 drafts no tokens.
    coupled: whether drafts after a rejected draft are kept.
    early: whether rounds accept as many drafts as rounds at the first places of an
        image, which accept fewer. A toy is always early, because only three places are
        left in it.
    """
    presets = {**MAR_PRESETS, **SPHERE_PRESETS}
    config = scale.of(presets[name])
    of_mar = isinstance(config, MARConfig)
    respacing = (
        config.respacing if scale.toy else f"{'ddim' if of_mar else 'flow'}{steps}"
    )
    noisy = sampling_schedule(respacing).num_steps
    drafts = min(window or 0, noisy)
    options = Options(
        respacing=respacing,
        cfg=3.0 if guided else 1.0,
        denoise="plain" if window is None else cspd_jax.ChainSpeculation(drafts),
        final_noise=of_mar,
        cfg_schedule="linear" if of_mar else "constant",
    )
    found = recorded()
    first = config.seq_len * 3 // 8
    chains = None
    blocks = None
    tokens = float(scale.tokens)
    trips = ()
    run = None
    rows = batch * (1 + gamma)
    sizes = [0]
    if window is not None:
        model = "default" if of_mar else "default-causal"
        chains = chains_of(found["chains"][f"{model}, M {window}"], rows, noisy, drafts)
        sizes = ChainSpeculation(drafts).sizes(rows, 1 + guided)
        run = Run(0, tokens, calls_of(chains, np.full(rows, noisy), sizes))
    if gamma:
        blocks = table_of(
            found["rounds"][way_name(gamma, coupled)],
            batch,
            noisy,
            0 if early or scale.toy else LATE,
        )
        run = run_of(blocks, chains, scale.tokens, sizes, coupled)
        tokens = run.tokens
        trips = (float(run.rounds),)
    network = kind_of(config).network(config, jnp.dtype(dtype))

    def args(params):
        keys = jax.random.key_data(cspd_jax.row_keys(jax.random.key(0), batch))
        return (
            params,
            keys,
            jnp.zeros(batch, jnp.int32),
            *jax.tree.map(jnp.asarray, (chains, blocks)),
        )

    words = (
        [way_name(gamma, coupled)] * bool(gamma)
        + [f"M {window}"] * bool(window)
        + [respacing] * (not of_mar)
        + ["early places"] * early
    )
    names = {
        (False, False): "plain",
        (True, False): "chains",
        (True, True): "self+chains",
    }
    row = about(
        name,
        names[bool(window), bool(gamma)],
        ", ".join(words),
        batch=batch,
        guided=guided,
        dtype=dtype,
    )
    if gamma:
        method = SelfSpeculation(gamma, coupled=coupled)
        program = round_program(network, options, first, scale.tokens, method)
    else:
        program = step_program(network, options, first, scale.tokens)
    named = (
        {f"of_{size}_chains": calls for size, calls in run.calls.items()} if run else {}
    )
    return Case(row, (config,), args, program, tokens, trips, named)


def batch_of(
    model: ImageModel, options: Options, keys: Any, labels: Any, chains: Any
) -> Batch:
    """Returns a batch of images whose drafter of denoising steps is not calibrated, and
    whose chains, if they are speculated, keep the recorded drafts."""
    plain = cspd_jax.Plain()
    recipe = resolve(model, plain, options, len(labels))
    if recipe.chain is not None:
        chain = ReplayedChains(recipe.chain.window, kept=chains)
        recipe = dataclasses.replace(recipe, chain=chain)
    keys = jax.random.wrap_key_data(keys)
    return Batch(model.network, plain, model.params, keys, labels, recipe)


def step_program(network: Any, options: Options, first: int, tokens: int) -> Callable:
    """Returns a program that takes AR steps of the plain sampler in one scan. It
    returns the tokens and the counts of the work."""

    def run(params, keys, labels, chains, blocks):
        model = ImageModel("", network, params)
        batch = batch_of(model, options, keys, labels, chains)
        segment, groups = next(
            some
            for some in sampler.plan_segments(batch.network.seq_len, batch.recipe)
            if some[1][0].start <= first <= some[1][-1].start
        )
        wanted = tuple(group for group in groups if first <= group.start)[:tokens]
        assert len(wanted) == tokens
        bound = bind(batch)
        state, _ = sampler.begin(bound)
        arrays = sampler.group_arrays(wanted, bound)
        state, work = sampler.ar_steps(bound, segment, state, arrays)
        return state.tokens, work

    return run


def round_program(
    network: Any, options: Options, first: int, tokens: int, method: SelfSpeculation
) -> Callable:
    """Returns a program that takes rounds of self-speculation in one loop until each
    image has `tokens` new tokens. It returns the tokens and the number of new ones."""

    def run(params, keys, labels, chains, blocks):
        model = ImageModel("", network, params)
        batch = batch_of(model, options, keys, labels, chains)
        how = replaying(method.criterion, blocks, first)
        # As many drafts as were recorded.
        made = rounds.bound_rounds(batch, how, method.gamma)
        group = jnp.full(labels.shape, first, jnp.int32)
        drafts = jnp.full_like(group, method.gamma)
        begun = made.begin()._replace(group=group, num_drafts=drafts)
        unfinished = lambda state: jnp.any(state.group < first + tokens)
        end = jax.lax.while_loop(unfinished, made.advance, begun)
        return end.tokens, end.group - first

    return run


def whole_case(scale: Scale, batch: int) -> Case:
    """Returns a case that makes whole images of a small model by the plain sampler."""
    config = scale.of(SMALL)
    options = Options(final_noise=False)

    def run(params):
        model = ImageModel("", kind_of(config).network(config), params)
        key = jax.random.key(0)
        return cspd_jax.generate(key, model, [0] * batch, options=options).tokens

    row = about("mar-small", "plain", batch=batch, dtype="float32")
    return Case(row, (config,), lambda params: (params,), run, config.seq_len)


# Text and masked text


def text_cases(scale: Scale) -> list[Case]:
    """Returns two cases that make greedy text: plain decoding, and speculation with
    drafts that are right as often as the drafts of the package's text models."""
    config = scale.of(PYTHIA_1_4B)
    small = scale.of(PYTHIA_160M)
    network = lm.LM(config, jnp.bfloat16)
    drafting = lm.LM(small, jnp.bfloat16)
    prompts = (
        np.random.default_rng(0).integers(0, config.known_ids, (1, PROMPT)).tolist()
    )
    count = scale.new_tokens
    share = recorded()["text"]
    asked = cspd_jax.text.Options(max_new_tokens=count, stop_ids=())
    prepare = lambda weights, *method: text_generation.prepare(
        None, (network, weights), prompts, *(method or (Plain(),)), asked
    )
    plain = Case(
        about("pythia-1.4b", "text-plain"),
        (config,),
        lambda weights: (prepare(weights),),
        shell.run,
        count,
        (float(count - 1),),
    )

    def drafted(weights, of_draft):
        right = jax.jit(shell.run)(prepare(weights)).tokens
        use = jax.random.bernoulli(jax.random.key(1), share, right.shape)
        draft = Drafting(Replayed(ModelDrafter(drafting)), (of_draft, right, use))
        return (prepare(weights, Speculation(draft)),)

    def facts(out) -> dict[str, Any]:
        return {
            "acceptance": float(out.info.acceptance),
            "rounds": int(out.info.calls["target"].sequential),
        }

    a_round = sum(share**kept for kept in range(5))  # mean number of tokens in a round
    return [
        plain,
        Case(
            about("pythia-1.4b", "text-block", "160m drafts, gamma 4"),
            (config, small),
            drafted,
            shell.run,
            count,
            (count / a_round, 4.0),
            facts=facts,
        ),
    ]


def masked_case(scale: Scale, model: str, way: str) -> Case:
    """Returns a case that makes a masked text at the sizes of a model of `SDAR`. The
    weights are random and accept no drafts. So passes are timed, and each one counts
    for as many tokens as a pass of the package's model fills, by `masked.py`.

    way: "stepwise", or a way of that program: "draft_len 4" or "16 texts".
    """
    config = scale.of(SDAR[model])
    places = scale.new_tokens
    gamma = way.removeprefix("draft_len ")
    drafts = way != "stepwise"
    options = f"gamma {gamma}" if gamma != way else way
    row = about(model, "ssd", options) if drafts else about(model, way)
    seen = next(
        row
        for row in results(MASKED)["rows"]
        if (row["kind"], row["what"]) == ("one place per step", way)
    )
    a_round = NEW_TOKENS * seen["prompts"] / seen["passes"]
    method: Any = cspd_jax.masked.Stepwise()
    if drafts:
        texts = None if gamma != way else int(way.split()[0])
        method = cspd_jax.masked.SelfSpeculation(4, texts=texts)
    asked = cspd_jax.masked.Options(max_new_tokens=places)
    network = lm.LM(config, jnp.bfloat16)

    def args(weights):
        return (
            masked_generation.prepare(
                None, (network, weights), [[1] * PROMPT], method, asked
            ),
        )

    def facts(out) -> dict[str, Any]:
        number = int(out.info.sequential)
        return {"tokens": number * a_round, "rounds": number}

    return Case(
        row,
        (config,),
        args,
        shell.run,
        places * a_round,
        (float(places),),
        facts=facts,
    )
