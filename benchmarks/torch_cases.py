"""The loops of published PyTorch implementations, timed on the same device as ours, in
the same process.

Images: MAR's loop (reference_torch.py), eagerly, and with the head's whole chain as one
captured CUDA graph, which is what an engineer would do first. Text: transformers'
greedy `generate`. Weights are random.
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
    """Holds a loop of PyTorch.

    about: the identity of its row.
    tokens: that one run makes.
    prepare: returns what is timed, which ends when the device has.
    """

    about: dict[str, Any]
    tokens: float
    prepare: Callable[[], Callable[[], Any]]
    facts: Callable[[Any], dict[str, Any]] = lambda out: {}


def can_run(case: Case | TorchCase) -> bool:
    """Says why where it cannot: a package is missing, or a graph would be captured on a
    CPU."""
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
    """Is around what PyTorch computes: at its end the device has done it."""
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
    """Makes tokens of MAR's loop behind 3/8 of an image. how: "eager", or "graph" for a
    captured chain."""
    config = scale.of(MAR_PRESETS[name])
    tokens = min(scale.tokens, 8)

    def prepare() -> Callable[[], Any]:
        import reference_torch
        import torch

        schedule = sampling_schedule(config.respacing if scale.toy else "ddim100")
        rows = (1 + guided) * batch
        length = config.seq_len
        first = config.seq_len * 3 // 8
        # Not around what is timed, where it slows every call.
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
    """Makes whole images of a small model by MAR's loop."""
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
    """Makes the function one CUDA graph, which is replayed on other values of its
    argument."""
    import torch

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # once outside, as capturing asks for
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
    """Makes greedy text by transformers, at the sizes of Pythia-1.4B."""
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
