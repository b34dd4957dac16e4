"""The tokenizer in a GGUF file's metadata, written as Hugging Face's tokenizer.json and its companion.

Byte-level byte-pair encoding only. The metadata names the patterns by which a text is split before it is
encoded; what stands behind a name is in `_SPLITS`. Files with another tokenizer are converted without one.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from cspd_jax.errors import UserError, shown

_CONTROL, _USER_DEFINED, _UNUSED = 3, 4, 5  # types of tokens
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _by_pattern(pattern: str) -> list[dict[str, Any]]:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return [split, _byte_level(use_regex=False)]


def _byte_level(use_regex: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


# The metadata's name -> the steps of splitting. ByteLevel's own pattern is that of GPT-2.
_SPLITS = {
    "gpt-2": [_byte_level(use_regex=True)],
    "default": [_byte_level(use_regex=True)],
    "smollm": [{"type": "Digits", "individual_digits": True}, _byte_level(use_regex=True)],
    "qwen2": _by_pattern(_WORDS % ""),
    "llama-bpe": _by_pattern(_WORDS % "{1,3}"),
}


def files(metadata: Mapping[str, Any], where: str) -> dict[str, bytes]:
    """name -> content; none if `missing` says why."""
    if missing(metadata) is not None:
        return {}
    tokens, types = _tokens(metadata, where)
    written = {"tokenizer.json": _tokenizer(metadata, tokens, types, where), **_settings(metadata, tokens)}
    return {name: json.dumps(v, ensure_ascii=False).encode() for name, v in written.items()}


def missing(metadata: Mapping[str, Any]) -> str | None:
    """Why a file is converted without a tokenizer; None if it has one."""
    model, split = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre", "default")
    if model is None:
        return "the file has no tokenizer"
    if model != "gpt2":
        return f"the file's tokenizer is of kind {shown(model)}, and only gpt2 (byte-level BPE) is converted"
    if not isinstance(split, str) or split not in _SPLITS:
        return f"the file's tokenizer splits texts by {shown(split)}; known are {', '.join(_SPLITS)}"
    return None


def known_ids(metadata: Mapping[str, Any], where: str, vocab_size: int) -> int:
    """1 + the last id in use, at most vocab_size; vocab_size without a list of tokens."""
    if "tokenizer.ggml.tokens" not in metadata:
        return vocab_size
    _, types = _tokens(metadata, where)
    used = np.flatnonzero(types != _UNUSED)
    if not used.size:
        raise UserError(f"{where} has no tokens")
    return min(1 + int(used[-1]), vocab_size)


def _tokens(metadata: Mapping[str, Any], where: str) -> tuple[list[str], np.ndarray]:
    """The tokens and their types."""
    tokens, types = _texts(metadata, "tokens", where), metadata.get("tokenizer.ggml.token_type")
    if types is None:
        return tokens, np.ones(len(tokens), int)
    if not isinstance(types, list) or len(types) != len(tokens):
        raise UserError(f"{where}: tokenizer.ggml.token_type is not one number for each of the tokens")
    return tokens, np.array(types)


def _texts(metadata: Mapping[str, Any], name: str, where: str) -> list[str]:
    texts = metadata.get(f"tokenizer.ggml.{name}")
    if not isinstance(texts, list):
        raise UserError(f"{where}: tokenizer.ggml.{name} is {shown(texts)}; it must be a list of texts")
    return texts


def _tokenizer(
    metadata: Mapping[str, Any], tokens: list[str], types: np.ndarray, where: str
) -> dict[str, Any]:
    split = metadata.get("tokenizer.ggml.pre", "default")
    vocab: dict[str, int] = {}
    for i in np.flatnonzero(types != _UNUSED).tolist():
        if vocab.setdefault(tokens[i], i) != i:
            raise UserError(f"{where} has token {shown(tokens[i])} twice, as {vocab[tokens[i]]} and {i}")
    added = np.flatnonzero((types == _CONTROL) | (types == _USER_DEFINED)).tolist()
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_added(i, tokens[i], bool(types[i] == _CONTROL)) for i in added],
        "normalizer": {"type": "NFC"} if split == "qwen2" else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": _SPLITS[split]},
        "post_processor": _beginning(metadata, tokens, split, where),
        "decoder": _byte_level(use_regex=True),
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": split == "llama-bpe",
            "vocab": vocab,
            "merges": _merges(metadata, vocab, where),
        },
    }


def _added(i: int, token: str, special: bool) -> dict[str, Any]:
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": i, "content": token, **plain, "special": special}


def _merges(metadata: Mapping[str, Any], vocab: Mapping[str, int], where: str) -> list[str]:
    merges = _texts(metadata, "merges", where)
    for merge in merges:
        left, _, right = merge.partition(" ")
        if not (left in vocab and right in vocab and left + right in vocab):
            raise UserError(f"{where} merges {shown(merge)}, which are not two tokens that make a third")
    return merges


def _beginning(metadata: Mapping[str, Any], tokens: list[str], split: str, where: str) -> dict[str, Any]:
    """Puts the token that begins a text before it, if the file says so; Llama 3 does unless told not to."""
    plain = _byte_level(use_regex=True) | {"trim_offsets": False}
    if not metadata.get("tokenizer.ggml.add_bos_token", split == "llama-bpe"):
        return plain
    i = metadata.get("tokenizer.ggml.bos_token_id")
    if type(i) is not int or not 0 <= i < len(tokens):
        raise UserError(f"{where} begins every text with token {shown(i)}, which it does not have")
    first = tokens[i]
    template = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": first, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": list(
            itertools.chain.from_iterable(
                ({"SpecialToken": {"id": first, "type_id": n}}, {"Sequence": {"id": name, "type_id": n}})
                for n, name in enumerate("AB")
            )
        ),
        "special_tokens": {first: {"id": first, "ids": [i], "tokens": [first]}},
    }
    return {"type": "Sequence", "processors": [plain, template]}


def _settings(metadata: Mapping[str, Any], tokens: list[str]) -> dict[str, dict[str, Any]]:
    """tokenizer_config.json: the special tokens by their roles, and the chat template."""
    found: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    roles = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}
    for name, role in roles.items():
        i = metadata.get(f"tokenizer.ggml.{role}_token_id")
        if type(i) is int and 0 <= i < len(tokens):
            found[name] = tokens[i]
    if isinstance(template := metadata.get("tokenizer.chat_template"), str):
        found["chat_template"] = template
    return {"tokenizer_config.json": found}
