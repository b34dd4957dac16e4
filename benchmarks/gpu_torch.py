"""The loops of published PyTorch implementations, timed on the same device as ours, in the same program.

Images: MAR's loop (reference_torch.py), eagerly, and with the head's whole chain as one captured CUDA graph,
which is what an engineer would do first. Text: transformers' greedy `generate`. Weights are random.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from cases import PYTHIA_1_4B, about
from counted_cases import NEW_TOKENS, PROMPT
from gpu_cases import Scale
from toy import left_out, narrow, sizes

from cspd_jax.diffusion.schedule import sampling_schedule
from cspd_jax.networks.config import MAR_PRESETS


@dataclasses.dataclass(frozen=True)
class TorchCase:
    """Holds a loop of PyTorch.

    prepare: returns what is timed, which ends when the device has.
    needs: the package that it is of.
    """

    about: dict[str, Any]
    prepare: Callable[[], Callable[[], Any]]
    tokens: int
    needs: str = "torch"

    def cannot_run(self) -> bool:
        """Says so where a row is left out: a package is missing, or a graph would be captured on a CPU."""
        if importlib.util.find_spec(self.needs) is None:
            left_out(f"{self.about['model']}, {self.about['method']}", f"{self.needs} is not installed")
            return True
        if self.about["method"] == "torch-graph" and device().type != "cuda":
            left_out(f"{self.about['model']}, {self.about['method']}", "graphs are captured on CUDA alone")
            return True
        return False


def device() -> Any:
    import torch

    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@contextlib.contextmanager
def defaults(dtype: str) -> Iterator[None]:
    """Puts new tensors on the device, in this type."""
    import torch

    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, dtype))
    try:
        with torch.device(device()), torch.inference_mode():
            yield
    finally:
        torch.set_default_dtype(before)


def finish() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def mar_case(
    name: str, how: str, scale: Scale, batch: int = 1, guided: bool = False, dtype: str = "bfloat16"
) -> TorchCase:
    """Makes tokens of MAR's loop. how: "eager", or "graph" for a captured chain."""
    config, tokens = sizes(MAR_PRESETS, name, scale.toy), min(scale.tokens, 8)
    row = about(
        name, "token", batch, f"torch-{how}", guided=guided, dtype=dtype, num_iter=MAR_PRESETS[name].seq_len,
        timed=f"{tokens} AR steps of the PyTorch loop, a token each",
    )  # fmt: skip

    def prepare() -> Callable[[], Any]:
        import reference_torch
        import torch

        schedule = sampling_schedule(config.respacing if scale.toy else "ddim100")
        with defaults(dtype):
            model, cfg = reference_torch.MAR(config), 3.0 if guided else 1.0
            for parameter in model.parameters():
                parameter.normal_(0.0, 0.02)
            halves, length, first = 1 + guided, config.seq_len, scale.known(config.seq_len)
            embedding = model.fake_latent.expand(halves * batch, -1)
            chain = lambda z: model.diffloss.sample(z, schedule, None, 1.0, cfg)
            if how == "graph":
                chain = captured(chain, torch.zeros(halves * batch, config.decoder_width))

        def run() -> Any:
            with defaults(dtype):
                known = torch.zeros(batch, length, config.token_dim)
                for at in range(first, first + tokens):
                    mask = (torch.arange(length) >= at).to(known.dtype).expand(halves * batch, -1)
                    z = model.context(known.repeat(halves, 1, 1), mask, embedding)[:, at]
                    known[:, at] = chain(z)
                finish()
            return known

        return run

    return TorchCase(row, prepare, tokens)


def captured(function: Callable, example: Any) -> Callable:
    """Makes the function one CUDA graph, which is replayed on other values of its argument."""
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


def torch_text_case(scale: Scale, dtype: str = "bfloat16") -> TorchCase:
    """Makes greedy text by transformers."""
    count = 8 if scale.toy else NEW_TOKENS
    row = about(
        "pythia-1.4b", "text", 1, "transformers", dtype=dtype, respacing=None,
        timed=f"{count} new tokens behind {PROMPT}, the prompt's pass included",
    )  # fmt: skip

    def prepare() -> Callable[[], Any]:
        import torch
        import transformers

        c = narrow(PYTHIA_1_4B) if scale.toy else PYTHIA_1_4B
        config = transformers.GPTNeoXConfig(
            vocab_size=c.vocab_size, hidden_size=c.width, num_hidden_layers=c.depth,
            num_attention_heads=c.heads, intermediate_size=c.mlp_width,
            max_position_embeddings=c.max_positions,
        )  # fmt: skip
        with defaults(dtype):
            model = transformers.GPTNeoXForCausalLM(config)
            model = model.to(device(), getattr(torch, dtype)).eval()
            prompt = torch.as_tensor(np.random.default_rng(0).integers(3, c.known_ids, (1, PROMPT)))

        def run() -> Any:
            with torch.inference_mode():
                there = torch.ones_like(prompt)
                out = model.generate(
                    prompt, attention_mask=there, max_new_tokens=count, min_new_tokens=count, do_sample=False,
                    pad_token_id=0,
                )  # fmt: skip
                finish()
            return out

        return run

    return TorchCase(row, prepare, count, "transformers")
