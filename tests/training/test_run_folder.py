"""The folder of a run: one writer, checkpoints that verify, and a beginning that holds when it is resumed."""

import dataclasses
import fcntl
import json
import pathlib
import shutil
import types

import jax
import numpy as np
import pytest
import tiny as tiny_models
from PIL import Image
from training_run import TINY

from cspd_jax import __main__ as cli
from cspd_jax import weights
from cspd_jax.cli.train import fitting_schedule
from cspd_jax.errors import UserError
from cspd_jax.training import presets, settings_file
from cspd_jax.training.checkpointing import Checkpoints
from cspd_jax.training.config import with_settings
from cspd_jax.training.data import Digits
from cspd_jax.training.image import trainer
from cspd_jax.training.image.step import Metrics, init_state
from cspd_jax.training.image.trainer import train
from cspd_jax.training.provenance import Provenance
from cspd_jax.training.recipe import Trained
from cspd_jax.training.run import MetricsLog, RunOptions
from cspd_jax.training.run_folder import LOCK, claimed, newest_step

SOURCE = Digits(TINY.data)
LONG = dataclasses.replace(TINY, steps=20)


def identical(a, b):
    a, b = jax.tree.leaves(a), jax.tree.leaves(b)
    return len(a) == len(b) and all(np.array_equal(x, y) for x, y in zip(a, b))


def test_one_writer(tmp_path):
    with claimed(tmp_path, resume=False), claimed(tmp_path, resume=False), pytest.raises(BlockingIOError):
        fcntl.flock((tmp_path / LOCK).open(), fcntl.LOCK_SH | fcntl.LOCK_NB)
    with open(tmp_path / LOCK) as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with (
            pytest.raises(UserError, match=r"another process \(\d+\) is training in"),
            claimed(tmp_path, True),
        ):
            pass
    with claimed(tmp_path, resume=False):  # the lock of a finished run is no content
        (tmp_path / "metrics.jsonl").touch()
    with pytest.raises(UserError, match="is not empty"), claimed(tmp_path, resume=False):
        pass


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run that was stopped after 10 steps, with checkpoints of 8 and 10, and the state of the whole run."""
    out = tmp_path_factory.mktemp("run")
    train(LONG, SOURCE, out, RunOptions(progress=False, stop_at=10))
    whole = train(LONG, SOURCE, tmp_path_factory.mktemp("whole"), RunOptions(progress=False))
    return out, whole


def largest(folder):
    return max((f for f in folder.rglob("*") if f.is_file()), key=lambda f: f.stat().st_size)


def flip(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def other_numbers(out):
    """A checkpoint that can be read and is not what was written."""
    sums = json.loads((out / "checkpoints.json").read_text())
    (out / "checkpoints.json").write_text(json.dumps({**sums, "10": "0" * 64}))


def emptied(out):
    shutil.rmtree(out / "checkpoints" / "10")
    (out / "checkpoints" / "10").mkdir()


def half_a_line(out):
    with (out / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3\n[1]\n{"loss": 2}\n\x00\n"')


DAMAGE = {
    "emptied": emptied,
    "stray step": lambda out: (out / "checkpoints" / "99").mkdir(),
    "stray file": lambda out: (out / "checkpoints" / "77").write_text("?"),
    "cut metadata": lambda out: (out / "checkpoints" / "10" / "_CHECKPOINT_METADATA").write_text("{"),
    "cut array": lambda out: largest(out / "checkpoints" / "10").write_bytes(b""),
    "flipped bit": lambda out: flip(largest(out / "checkpoints" / "10")),
    "other numbers": other_numbers,
    "half a line": half_a_line,
}  # fmt: skip


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Orbax leaves files open
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow) if name in ("stray file", "cut metadata") else name
        for name in DAMAGE
    ],
)
def test_a_damaged_run_is_resumed_from_what_is_whole(tmp_path, runs, name, capfd):
    out = tmp_path / "run"
    shutil.copytree(runs[0], out)
    DAMAGE[name](out)
    state = train(LONG, SOURCE, out, RunOptions(resume=True, progress=False))
    assert identical(state, runs[1])
    steps = [json.loads(line)["step"] for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, 21))
    if name in ("emptied", "cut array", "flipped bit", "other numbers"):
        assert "checkpoint 10 is damaged" in capfd.readouterr().err and (out / "damaged" / "10").exists()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_no_checkpoint_left(tmp_path, runs):
    """It does not begin anew without a word."""
    out = tmp_path / "run"
    shutil.copytree(runs[0], out)
    for step in ("8", "10"):
        largest(out / "checkpoints" / step).write_bytes(b"")
    with pytest.raises(UserError, match=r"no checkpoint in .* can be restored \(step 10: .*; step 8"):
        train(LONG, SOURCE, out, RunOptions(resume=True, progress=False))
    with pytest.raises(UserError, match=r"lacks the checkpoints of this run \(steps 8, 10\)"):
        train(LONG, SOURCE, out, RunOptions(resume=True, progress=False))
    assert newest_step(runs[0]) == 10 and newest_step(tmp_path) == 0
    shutil.rmtree(out / "checkpoints")
    (out / "checkpoints.json").unlink()
    (out / "model").mkdir()
    with pytest.raises(UserError, match="holds a model and none of the checkpoints that it came from"):
        train(LONG, SOURCE, out, RunOptions(resume=True, progress=False))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_another_models_checkpoint(tmp_path, runs):
    like = init_state(with_settings(LONG, ["model.head_width=24"]))
    shutil.copytree(runs[0], tmp_path / "run")
    with pytest.raises(UserError, match="no checkpoint in"):
        Checkpoints(tmp_path / "run").restore(like)


def test_metrics_of_a_damaged_file(tmp_path):
    (tmp_path / "m").write_bytes(b'{"step": 1}\n\xff\xfe\n{"step": "2"}\n{"step": 9}\n')
    with MetricsLog(tmp_path / "m", 5, 1):
        pass
    assert (tmp_path / "m").read_text() == '{"step": 1}\n'


BEGUN = Provenance("distill", "small", "default", "both", 128)


@pytest.mark.parametrize(
    "asked, sentence",
    [
        ({"command": "train"}, "was begun by cspd-jax distill"),
        ({"target": "other"}, "--target is other, but the run in here was begun with --target default"),
        ({"origin": "data"}, "--from is data, but the run in here was begun with --from both"),
        ({"samples": 64}, "--samples is 64, but the run in here was begun with --samples 128"),
        ({"vae": "kl16"}, "--vae is kl16, but the run in here was begun without --vae"),
    ],
)
def test_other_options_are_refused(asked, sentence):
    with pytest.raises(UserError, match=sentence):
        BEGUN.resumed(Provenance(**{"command": "distill", **asked}), "here")


def test_the_same_options_or_none():
    assert BEGUN.resumed(Provenance("distill"), "here") == BEGUN == BEGUN.resumed(BEGUN, "here")
    assert Provenance.from_json(json.loads(json.dumps(BEGUN.to_json()))) == BEGUN
    for values in ({"init": "x"}, {"command": "train", "more": 1}, []):
        with pytest.raises(TypeError, match="not a command and its options"):
            Provenance.from_json(values)


def test_other_weights_are_refused():
    known = BEGUN.with_weights("here", target=("config", {"w": np.zeros(3)}), init=None)
    assert known.weights.keys() == {"target"}
    with pytest.raises(UserError, match="default has other weights than when the run in here was begun"):
        known.with_weights("here", target=("config", {"w": np.ones(3)}))


def test_other_data_is_refused(tiny, tmp_path, capsys):
    """Of a class that was renamed the labels would be another's."""
    for name in ("cat", "dog"):
        (tmp_path / "data" / name).mkdir(parents=True)
        for number in range(4):
            Image.new("L", (16, 16), 50 * number).save(tmp_path / "data" / name / f"{number}.png")
    sizes = ["encoder_width=16", "encoder_heads=2", "decoder_width=16", "decoder_heads=2", "head_width=16"]
    settings = [word for size in sizes for word in ("--set", f"model.{size}")]
    begin = ["train", "--data", "data", "--out", "run", "--batch", "2", "--set", "data.held_out=0"]
    assert command(*begin, *settings) == 130, capsys.readouterr().err
    assert command("train", "--resume", "--out", "run") == 130
    assert "8 images of 2 classes: cat, dog" in capsys.readouterr().err
    (tmp_path / "data" / "cat").rename(tmp_path / "data" / "kitten")
    assert command("train", "--resume", "--out", "run") == 2
    assert "has classes ['dog', 'kitten'] now, and had ['cat', 'dog'] when it was" in capsys.readouterr().err
    (tmp_path / "data" / "kitten").rename(tmp_path / "data" / "cat")
    (tmp_path / "data" / "cat" / "3.png").unlink()
    assert command("train", "--resume", "--out", "run") == 2
    assert "has images 7 now, and had 8 when it was begun" in capsys.readouterr().err


def test_what_is_said_of_data_is_kept():
    source = types.SimpleNamespace(describe=lambda: {"python": "3.12", "sha256": "b"})
    assert BEGUN.with_data("here", object()) == BEGUN  # it depends on nothing
    assert BEGUN.with_data("here", source).data == source.describe()  # begun before this was kept
    known = dataclasses.replace(BEGUN, data={"python": "3.11", "sha256": "b"})
    assert known.with_data("here", source) == known
    with pytest.raises(UserError, match=r"has python '3\.12' now, and had '3\.11' when it was begun"):
        dataclasses.replace(BEGUN, data={"python": "3.11", "sha256": "a"}).with_data("here", source)


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


def test_a_run_killed_before_its_first_checkpoint_has_its_beginning(tiny, tmp_path, capsys, monkeypatch):
    assert command("train", "--preset", "tiny", "--out", "run", "--init", "first") == 130
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert command("train", "--resume", "--out", "../run") == 130
    assert identical(*tiny)
    capsys.readouterr()
    assert command("train", "--resume", "--out", "../run", "--init", "other") == 2
    assert "was begun with --init" in capsys.readouterr().err
    assert command("distill", "--resume", "--out", "../run") == 2
    assert "was begun by cspd-jax train" in capsys.readouterr().err
    shutil.rmtree(tmp_path / "first")
    weights.save(tmp_path / "first", "mar", TINY.model, init_state(TINY).params)
    assert command("train", "--resume", "--out", "../run") == 2
    assert "has other weights" in capsys.readouterr().err and len(tiny) == 2


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (["--learning-rate", "1"], "has taken its 40 steps, so nothing would come of these settings"),
        (["--set", "ema=0.5"], "has taken its 40 steps"),
        (["--tensorboard"], "has taken its 40 steps"),
        (["--stream"], "has taken its 40 steps"),
        (["--steps", "30"], "is at step 40, beyond the 30 asked for"),
        (["--stop-at", "10"], "is at step 40, beyond --stop-at 10"),
        (["--preset", "nosuch"], "preset 'nosuch' is unknown"),
        (["--preset", "glyphs"], "learns from something else than --preset glyphs"),
    ],
)
def test_settings_that_a_finished_run_would_not_use(tiny, capsys, arguments, sentence):
    settings_file.write(TINY, pathlib.Path("."))
    pathlib.Path("checkpoints", "40").mkdir(parents=True)
    before = pathlib.Path("config.json").read_text()
    assert command("train", "--resume", "--out", ".", *arguments) == 2
    assert sentence in capsys.readouterr().err
    assert pathlib.Path("config.json").read_text() == before and not tiny


def test_another_autoencoder_of_the_same_name_is_refused(tiny, tmp_path, capsys):
    """Its weights are part of what a run began with."""
    tiny_models.save_kl16(tmp_path / "kl")
    begun = Provenance("train", vae=str(tmp_path / "kl"), weights={"vae": "0" * 64})
    (tmp_path / "run").mkdir()
    settings_file.write(TINY, tmp_path / "run", begun)
    assert command("train", "--resume", "--out", "run") == 2
    assert "has other weights than when the run in run was begun with it (--vae)" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (["--set", "model.respacing=ddim0"], "ddim0"),
        (["--set", "model.respacing=ddim1001"], "ddim1001"),
        (["--steps", "3", "--set", "warmup=9"], "do not fit"),
        (["--init", "nothing"], "nothing is neither"),
        (["--vae", "nothing"], "nothing is neither"),
        (["--cache", "cache"], "for folders of images"),
    ],
)
def test_what_cannot_be_is_found_before_the_folder_is_made(tiny, tmp_path, arguments, sentence, capsys):
    assert command("train", "--preset", "tiny", "--out", "run", *arguments) == 2
    assert sentence in capsys.readouterr().err and not (tmp_path / "run").exists()


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
