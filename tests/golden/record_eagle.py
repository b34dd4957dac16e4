"""Records small EAGLE-3 heads in the forms in which they are published, and what
PyTorch makes with them.

    # Needs torch and transformers; writes tests/golden/eagle.zip.
    python tests/golden/record_eagle.py

The layer is transformers' Llama layer as the published description changes it:
`input_layernorm` of the embedding and `hidden_norm` of the state side by side into the
attention, the state as the residual. Three heads: `research` (pytorch_model.bin, ids of
its own), `specforge` (model.safetensors, named layers, every id, an embedding of its
own) and `speculators` (layers.0, sizes in an object, the normed state as the residual).
"""

import io
import json
import pathlib
import zipfile

import numpy as np
import torch
from safetensors.torch import save
from transformers import DynamicCache, LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaDecoderLayer,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)

IDS = 40
WIDTH = 24
LENGTH = 9
SIZES = {
    "model_type": "llama",
    "hidden_size": WIDTH,
    "intermediate_size": 36,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "vocab_size": IDS,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64,
    "hidden_act": "silu",
    "rope_theta": 500.0,
    "head_dim": 6,
    "tie_word_embeddings": False,
}
# name: (ids of its own, width of the target's states, how its configuration says it)
HEADS = {
    "research": (
        28,
        24,
        {**SIZES, "architectures": ["LlamaForCausalLM"], "draft_vocab_size": 28},
    ),
    "specforge": (
        IDS,
        20,
        {
            **SIZES,
            "architectures": ["LlamaForCausalLMEagle3"],
            "target_hidden_size": 20,
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 4, 7]},
        },
    ),
    "speculators": (
        31,
        24,
        {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "transformer_layer_config": SIZES,
            "draft_vocab_size": 31,
            "norm_before_residual": True,
            "eagle_aux_hidden_state_layer_ids": [2, 5, 8],
        },
    ),
}


class Head(torch.nn.Module):
    """One layer over [embedding, state], with a cache of what it saw."""

    def __init__(self, own, width, normed):
        super().__init__()
        config = LlamaConfig(**SIZES, attn_implementation="eager")
        linear = lambda inside, outside: torch.nn.Linear(inside, outside, bias=False)
        self.fc = linear(3 * width, WIDTH)
        self.lm_head = linear(WIDTH, own)
        self.midlayer = LlamaDecoderLayer(config, 0)
        self.norm = LlamaRMSNorm(WIDTH, 1e-5)
        self.midlayer.hidden_norm = LlamaRMSNorm(WIDTH, 1e-5)
        for name, outside in (("q_proj", 24), ("k_proj", 12), ("v_proj", 12)):
            setattr(self.midlayer.self_attn, name, linear(2 * WIDTH, outside))
        self.rotary = LlamaRotaryEmbedding(config)
        self.cache = DynamicCache()
        self.normed = normed

    def forward(self, embedded, state, start):
        """[Q, D] each -> the states after them [Q, D]."""
        layer = self.midlayer
        at = torch.arange(start, start + len(state))
        normed = layer.hidden_norm(state)
        x = torch.cat([layer.input_layernorm(embedded), normed], dim=-1)[None]
        unseen = torch.arange(start + len(state)) > at[:, None]
        mask = torch.zeros(unseen.shape).masked_fill(unseen, -torch.inf)[None, None]
        out, _ = layer.self_attn(x, self.rotary(x, at[None]), mask, self.cache)
        h = (normed if self.normed else state) + out[0]
        return h + layer.mlp(layer.post_attention_layernorm(h))


@torch.no_grad()
def record(name, own, width, config):
    generator = torch.Generator().manual_seed(len(name))
    draw = lambda *shape: torch.randn(*shape, generator=generator)
    head = Head(own, width, normed=name == "speculators")
    for parameter in head.parameters():
        parameter.copy_(0.3 * draw(*parameter.shape) + (parameter.ndim == 1))
    table = draw(IDS, WIDTH)
    ids = torch.randperm(IDS, generator=generator)[:own].sort()[0]
    prefix = "layers.0." if name == "speculators" else "midlayer."
    tensors = {
        key.replace("midlayer.", prefix): t.contiguous()
        for key, t in head.state_dict().items()
    }
    if name != "research":
        tensors["embed_tokens.weight"] = table
    if own < IDS:
        tensors |= {
            "d2t": ids - torch.arange(own),
            "t2d": torch.isin(torch.arange(IDS), ids),
        }

    states = draw(LENGTH, 3 * width)
    tokens = torch.randint(IDS, (LENGTH + 1,), generator=generator)
    after = head(table[tokens[1:]], head.fc(states), 0)
    logits = [head.lm_head(head.norm(after))]
    state = after[-1:]
    drafted = []
    for step in range(3):  # its own states fed back
        drafted.append(int(ids[logits[-1][-1].argmax()]))
        state = head(table[drafted[-1:]], state, LENGTH + step)
        logits.append(head.lm_head(head.norm(state)))
    arrays = {
        "states": states,
        "tokens": tokens,
        "table": table,
        "ids": ids,
        "logits": torch.cat(logits),
    }
    weights = io.BytesIO()
    recorded = io.BytesIO()
    torch.save(tensors, weights)
    np.savez(
        recorded,
        drafted=np.array(drafted),
        **{key: array.numpy() for key, array in arrays.items()},
    )
    of_weights = {"pytorch_model.bin": weights.getvalue()}
    return {
        "config.json": json.dumps(config).encode(),
        **(of_weights if name == "research" else {"model.safetensors": save(tensors)}),
        "recorded.npz": recorded.getvalue(),
    }


if __name__ == "__main__":
    with zipfile.ZipFile(
        pathlib.Path(__file__).with_name("eagle.zip"), "w", zipfile.ZIP_DEFLATED
    ) as archive:
        for name, how in HEADS.items():
            for file, content in record(name, *how).items():
                archive.writestr(
                    zipfile.ZipInfo(f"{name}/{file}", (2026, 1, 1, 0, 0, 0)), content
                )
