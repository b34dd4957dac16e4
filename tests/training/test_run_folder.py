"""The folder of a run: what is in the way, what goes on, and the model that comes of it."""

import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest
from training_run import TINY

from cspd_jax import __main__ as cli
from cspd_jax import weights
from cspd_jax.cli.train import fitting_schedule
from cspd_jax.errors import UserError
from cspd_jax.training import presets, settings
from cspd_jax.training.checkpointing import newest_step
from cspd_jax.training.data import Digits
from cspd_jax.training.image import trainer
from cspd_jax.training.image.step import Metrics, init_state
from cspd_jax.training.image.trainer import train
from cspd_jax.training.recipe import Trained
from cspd_jax.training.run import MetricsLog, RunOptions

SOURCE = Digits(TINY.data)
LONG = dataclasses.replace(TINY, steps=20)


def identical(a, b):
    a, b = jax.tree.leaves(a), jax.tree.leaves(b)
    return len(a) == len(b) and all(np.array_equal(x, y) for x, y in zip(a, b))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Orbax leaves files open
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_goes_on(tmp_path):
    """A run that was stopped after 10 steps, with checkpoints of 8 and 10."""
    whole = train(LONG, SOURCE, tmp_path / "whole", RunOptions(progress=False))
    out = tmp_path / "run"
    train(LONG, SOURCE, out, RunOptions(progress=False, stop_at=10))
    assert newest_step(out) == 10 and newest_step(tmp_path) == 0
    newest = out / "checkpoints" / "10"
    max((f for f in newest.rglob("*") if f.is_file()), key=lambda f: f.stat().st_size).write_bytes(b"")
    with pytest.raises(UserError, match=r"checkpoint 10 in .* cannot be restored"):
        train(LONG, SOURCE, out, RunOptions(resume=True, progress=False))
    shutil.rmtree(newest)
    assert identical(train(LONG, SOURCE, out, RunOptions(resume=True, progress=False)), whole)
    steps = [json.loads(line)["step"] for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, 21))


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """The preset `tiny`, a model of its sizes in `first`, and the weights that runs start from."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(presets.PRESETS, "tiny", TINY)
    params = init_state(TINY).params
    weights.save("first", "mar", TINY.model, jax.tree.map(lambda a: a + 1, params))
    seen = []

    def killed_at_once(config, source, out, options, *_):
        seen.append(options.initial)
        raise KeyboardInterrupt

    monkeypatch.setattr(trainer, "train", killed_at_once)
    return seen


def command(*arguments):
    return cli.main([str(a) for a in arguments])


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (["--set", "model.respacing=ddim0"], "ddim0"),
        (["--set", "model.respacing=ddim1001"], "ddim1001"),
        (["--steps", "3", "--set", "warmup=9"], "do not fit"),
        (["--init", "nothing"], "nothing is neither"),
        (["--vae", "nothing"], "nothing is neither"),
    ],
)
def test_what_cannot_be_is_found_before_the_folder_is_made(tiny, tmp_path, arguments, sentence, capsys):
    assert command("train", "--preset", "tiny", "--out", "run", *arguments) == 2
    assert sentence in capsys.readouterr().err and not (tmp_path / "run").exists()


def test_a_run_goes_on_with_its_own_settings(tiny, tmp_path, capsys):
    begin = ["train", "--preset", "tiny", "--out", "run", "--init", "first"]
    assert command(*begin) == 130
    first = jax.tree.map(lambda a: a + 1, init_state(TINY).params)
    assert identical(tiny[0], first)
    (tmp_path / "run" / "config.json").write_text(json.dumps(settings.to_json(TINY)))
    assert command(*begin) == 2 and "is not empty" in capsys.readouterr().err
    assert command("train", "--out", "run", "--resume", "--steps", "50") == 130
    assert command("train", "--out", "run", "--resume", "--set", "model.head_width=24") == 2
    assert "the model, data and seed of the run in run stay as they are" in capsys.readouterr().err


def test_a_short_run_has_a_short_schedule(tiny, capsys):
    assert command("train", "--preset", "tiny", "--out", "run", "--steps", "8") == 130
    assert (
        "parts of the run are shortened to fit into 8 steps: warmup=1, decay=2\n" in capsys.readouterr().err
    )


def test_a_short_run_has_few_first_contexts():
    words = presets.preset("words")
    assert fitting_schedule(words, 3_600) == ["warmup=60", "decay=2700", "settle=450"]
    assert fitting_schedule(words, words.steps) == []
    assert fitting_schedule(words, 40, ["warmup=1", "decay=1", "ema=0"]) == []
    assert fitting_schedule(words, 40, ["warmup=30"]) == ["decay=10", "settle=5"]
    assert fitting_schedule(words, 40, ["warmup=30", "decay=30", "settle=1"]) == []


def test_a_model_takes_the_place_of_a_link_and_leaves_what_it_led_to(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "mine").touch()
    (tmp_path / "model").symlink_to(tmp_path / "elsewhere")
    Trained("mar", TINY, 40, init_state(TINY).params, {}, {}).save(tmp_path / "model", "a test")
    assert not (tmp_path / "model").is_symlink() and (tmp_path / "elsewhere" / "mine").exists()
    assert {p.name for p in (tmp_path / "model").iterdir()} == {"config.json", "params"}


def test_a_run_that_diverged_is_no_model(tmp_path):
    trained = Trained("mar", TINY, 40, {"w": np.array([1.0, np.nan])}, {}, {})
    with pytest.raises(UserError, match="model is not written: training diverged"):
        trained.save(tmp_path / "model", "a test")
    with MetricsLog(tmp_path / "metrics.jsonl", 0, 1) as log:
        log.add(Metrics(np.nan, 1.0, np.inf, 0.5, 0.1))
        log.write(1)
    line = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=pytest.fail)
    assert line["loss"] is None and line["mse"] == 1
