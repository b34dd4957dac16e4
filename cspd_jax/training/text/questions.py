"""Questions that a chat model asks itself: what it writes where its template has the user speak."""

from __future__ import annotations

import pathlib

import jax
import numpy as np
from tqdm import tqdm

from cspd_jax._utils.files import write_text
from cspd_jax.errors import UserError
from cspd_jax.networks import narrow
from cspd_jax.networks.lm import LM
from cspd_jax.training.data.prompts import read_lines
from cspd_jax.training.step import Purpose, run_key
from cspd_jax.training.text.answers import TEMPERATURE, answered
from cspd_jax.weights.chat import chat_template
from cspd_jax.weights.models import TextModel
from cspd_jax.weights.tokenizers import load_tokenizer

_TOGETHER = 64  # rows of a batch
_LONGEST = 64  # ids of a question
_MARK = "@@@@"
_TRIES = 4  # batches for each that would be enough if every row were a new question


def opening(model: TextModel) -> list[int]:
    """The ids of the model's chat template up to where the user's words begin."""
    template, tokenizer = chat_template(model.folder), load_tokenizer(model)
    if template is None or tokenizer is None:
        raise UserError(f"{model.name} has no chat template, so it cannot ask questions; give --prompts")
    text, mark, _ = template([{"role": "user", "content": _MARK}]).partition(_MARK)
    begin = tokenizer.encode(text, begin=False)
    if not mark or not begin:
        raise UserError(
            f"the chat template of {model.name} does not show where the user speaks; give --prompts"
        )
    return begin


def own_questions(model: TextModel, count: int, path: pathlib.Path, seed: int = 0) -> list[str]:
    """`count` different questions, or as many as the model comes up with in a while; made once, kept in the
    file `path`, one per line.

    A model that was tuned on chats has learnt what people ask. Continuing its template from where the user's
    words begin makes questions of the kind that it was tuned on, and no list of prompts is needed.
    """
    if path.exists():
        return read_lines(path)
    begin, tokenizer = opening(model), load_tokenizer(model)
    assert tokenizer is not None
    rows = np.zeros((_TOGETHER, len(begin) + _LONGEST), np.int32)
    rows[:, : len(begin)] = begin
    given = np.full(_TOGETHER, len(begin), np.int32)
    warm = np.full(_TOGETHER, TEMPERATURE, np.float32)
    network, weights, ends = LM(model.config), narrow.as_read(model.params), np.array(model.config.eos_ids)
    found: dict[str, None] = {}
    with tqdm(total=count, desc="questions") as bar:
        for batch in range(_TRIES * -(-count // _TOGETHER)):
            key = jax.random.fold_in(run_key(seed, Purpose.QUESTIONS), batch)
            made = answered(network, weights, key, rows, given, warm, (0,), len(begin))
            for row in np.asarray(made.tokens)[:, len(begin) :]:
                if (ended := np.isin(row, ends)).any():
                    text = " ".join(tokenizer.decode(row[: ended.argmax()].tolist()).split())
                    if text and len(found) < count:
                        found.setdefault(text)
            bar.update(len(found) - bar.n)
            if len(found) == count:
                break
    if not found:
        raise UserError(f"{model.name} asks no question that ends within {_LONGEST} ids; give --prompts")
    write_text(path, "".join(f"{text}\n" for text in found))
    return list(found)
