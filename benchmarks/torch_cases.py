"""The loops of published PyTorch implementations, timed on the same device and in the
same process as the programs of this library.

For images this is MAR's loop (reference_torch.py), run eagerly, and also with the whole
chain of the head captured as one CUDA graph, which is the first optimisation that an
engineer would make. For text it is transformers' greedy `generate`. The weights are
random.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from cases import PROMPT, PYTHIA_1_4B, SMALL, Case, Scale, about
from toy import say

from cspd_jax.diffusion.schedule import sampling_schedule
from cspd_jax.networks.mar import MAR_PRESETS


@dataclasses.dataclass(frozen=True)
class TorchCase:
    """A PyTorch loop to be timed.

    about: the identity of its row in the results.
    tokens: the number of tokens that one run makes.
    prepare: returns the function to be timed. The function returns when the device has
        finished.
    facts: a function of the output. It returns values that are known only after the
        run.
    """

    about: dict[str, Any]
    tokens: float
    prepare: Callable[[], Callable[[], Any]]
    facts: Callable[[Any], dict[str, Any]] = lambda out: {}


def can_run(case: Case | TorchCase) -> bool:
    """Returns whether a case can run here, and prints why if it cannot: a package is
    missing, or a graph would have to be captured on a CPU."""
    if isinstance(case, Case):
        return True
    name = case.about["model"]
    method = case.about["method"]
    package = "transformers" if method == "transformers" else "torch"
    if importlib.util.find_spec(package) is None:
        say(f"left out: {name}, {method}: {package} is not installed")
    elif method == "torch-graph" and device().type != "cuda":
        say(f"left out: {name}, {method}: graphs are captured on CUDA alone")
    else:
        return True
    return False


def versions() -> dict[str, str]:
    there = [
        name for name in ("torch", "transformers") if importlib.util.find_spec(name)
    ]
    return {name: importlib.metadata.version(name) for name in there}


def device() -> Any:
    import torch

    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@contextlib.contextmanager
def waited_for() -> Iterator[None]:
    """A context in which PyTorch computes without gradients. At its end it waits for
    the device."""
    import torch

    with torch.inference_mode():
        yield
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def mar_case(
    name: str,
    how: str,
    scale: Scale,
    batch: int = 1,
    guided: bool = False,
    dtype: str = "bfloat16",
) -> TorchCase:
    """Returns a case that makes tokens by MAR's loop, after 3/8 of an image.

    how: "eager", or "graph" for a captured chain.
    """
    config = scale.of(MAR_PRESETS[name])
    tokens = min(scale.tokens, 8)

    def prepare() -> Callable[[], Any]:
        import reference_torch
        import torch

        schedule = sampling_schedule(config.respacing if scale.toy else "ddim100")
        rows = (1 + guided) * batch
        length = config.seq_len
        first = config.seq_len * 3 // 8
        # This context is not around the timed function, because it slows every call.
        with torch.device(device()):
            model = reference_torch.MAR(config).to(getattr(torch, dtype))
        with waited_for():
            for parameter in model.parameters():
                parameter.normal_(0.0, 0.02)
            embedding = model.fake_latent.expand(rows, -1)
            chain = lambda z: model.diffloss.sample(
                z, schedule, None, 1.0, 3.0 if guided else 1.0
            )
            if how == "graph":
                chain = captured(chain, embedding.new_zeros(rows, config.decoder_width))

        def run() -> Any:
            with waited_for():
                known = embedding.new_zeros(batch, length, config.token_dim)
                for at in range(first, first + tokens):
                    mask = known.new_ones(rows, length)
                    mask[:, :at] = 0
                    z = model.context(known.repeat(1 + guided, 1, 1), mask, embedding)[
                        :, at
                    ]
                    known[:, at] = chain(z)
            return known

        return run

    row = about(name, f"torch-{how}", batch=batch, guided=guided, dtype=dtype)
    return TorchCase(row, tokens, prepare)


def whole_case(scale: Scale, batch: int) -> TorchCase:
    """Returns a case that makes whole images of a small model by MAR's loop."""
    config = scale.of(SMALL)

    def prepare() -> Callable[[], Any]:
        import reference_torch
        import torch

        model = reference_torch.random_model(config)
        random = np.random.default_rng(0)
        schedule = sampling_schedule(config.respacing)
        length = config.seq_len
        orders = np.stack([random.permutation(length) for _ in range(batch)])
        noise = random.standard_normal(
            (schedule.num_steps + 1, batch, length, config.token_dim), np.float32
        )
        labels = torch.zeros(batch, dtype=torch.long)
        return lambda: model.sample(
            labels, schedule, num_iter=length, orders=orders, noise=noise
        )

    row = about("mar-small", "torch-eager", batch=batch, dtype="float32")
    return TorchCase(row, config.seq_len, prepare)


def captured(function: Callable, example: Any) -> Callable:
    """Captures a function as one CUDA graph. Returns a function that replays the graph
    for other values of the argument."""
    import torch

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # capturing needs one call before it
        function(example)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = function(example)

    def replay(argument: Any) -> Any:
        example.copy_(argument)
        graph.replay()
        return out

    return replay


def text_case(scale: Scale) -> TorchCase:
    """Returns a case that makes greedy text by transformers, at the sizes of
    Pythia-1.4B."""
    count = scale.new_tokens
    c = scale.of(PYTHIA_1_4B)

    def prepare() -> Callable[[], Any]:
        import torch
        import transformers

        config = transformers.GPTNeoXConfig(
            vocab_size=c.vocab_size,
            hidden_size=c.width,
            num_hidden_layers=c.depth,
            num_attention_heads=c.heads,
            intermediate_size=c.mlp_width,
            max_position_embeddings=c.max_positions,
        )
        with torch.device(device()):
            model = transformers.GPTNeoXForCausalLM(config).to(torch.bfloat16).eval()
            prompt = torch.tensor(
                np.random.default_rng(0).integers(3, c.known_ids, (1, PROMPT))
            )
            there = torch.ones_like(prompt)

        def run() -> Any:
            with waited_for():
                return model.generate(
                    prompt,
                    attention_mask=there,
                    max_new_tokens=count,
                    min_new_tokens=count,
                    do_sample=False,
                    pad_token_id=0,
                )

        return run

    return TorchCase(about("pythia-1.4b", "transformers"), count, prepare)
