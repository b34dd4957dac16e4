"""Training runs: exactly resumable, the optimiser and its schedules, several devices, the command."""

import argparse
import dataclasses
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache
from training_run import TINY

from cspd_jax import weights
from cspd_jax.cli import train as command
from cspd_jax.errors import UserError
from cspd_jax.networks.layers import Block
from cspd_jax.training import presets, settings
from cspd_jax.training.config import VAETrainConfig, with_settings
from cspd_jax.training.data import Digits, FolderConfig
from cspd_jax.training.image.step import Metrics, init_state, n_known
from cspd_jax.training.image.trainer import check_fit, grid, train
from cspd_jax.training.placement import Placement
from cspd_jax.training.run import MetricsLog, RunOptions
from cspd_jax.training.step import average, decayed, learning_rate
from cspd_jax.weights.models import VAE

HERE = pathlib.Path(__file__).parents[1]
SOURCE = Digits(TINY.data)


def identical(a, b):
    a, b = jax.tree.leaves(a), jax.tree.leaves(b)
    return len(a) == len(b) and all(np.array_equal(x, y) for x, y in zip(a, b))


def steps_logged(out):
    path = out / "metrics.jsonl"
    return [json.loads(line)["step"] for line in path.read_text().splitlines()] if path.exists() else []


def start(out, *settings, **environment):
    run = [sys.executable, HERE / "training_run.py", out, *settings]
    return subprocess.Popen(
        run, env={**os.environ, **environment}, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )


def kill_at(out, step, delay=0.0):
    """Runs in a process of its own and kills it after `step` steps (and a moment)."""
    process = start(out)
    try:
        deadline = time.monotonic() + 300
        while len(steps_logged(out)) < step:
            assert process.poll() is None, process.stderr.read()
            assert time.monotonic() < deadline, "the run does not get on"
            time.sleep(0.005)
        time.sleep(delay)
        process.send_signal(signal.SIGKILL)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == -signal.SIGKILL, "it ended before it could be killed"


@pytest.fixture(scope="module", autouse=True)
def compiled_once(tmp_path_factory):
    """All processes of these tests share what they compile, without optimisations: the steps are tiny."""
    folder = str(tmp_path_factory.mktemp("compiled"))
    settings = {
        "jax_enable_compilation_cache": True,
        "jax_compilation_cache_dir": folder,
        "jax_persistent_cache_min_compile_time_secs": 0,
    }
    before = {name: getattr(jax.config, name) for name in settings}
    optimised = "jax_disable_most_optimizations"
    before[optimised], settings[optimised] = jax.config.read(optimised), True
    with pytest.MonkeyPatch.context() as patch:
        for name, value in settings.items():
            jax.config.update(name, value)
            patch.setenv(name.upper(), str(value))
        compilation_cache.reset_cache()  # it remembers its folder
        yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@pytest.fixture(scope="module", autouse=True)
def _compiler():
    """In place of the shared fixture: the settings are those of the processes started here."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder and the final state of a run that nothing interrupted."""
    out = tmp_path_factory.mktemp("whole")
    return out, train(TINY, SOURCE, out, RunOptions(progress=False))


def check_resumed(out, whole):
    state = train(TINY, SOURCE, out, RunOptions(resume=True, progress=False))
    assert identical(state, whole[1])
    assert steps_logged(out) == list(range(1, TINY.steps + 1))
    losses = [
        [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
        for folder in (out, whole[0])
    ]
    assert losses[0] == losses[1]
    kept = {path.name for path in (out / "checkpoints").iterdir()}
    assert kept == {str(TINY.steps - TINY.checkpoint_every), str(TINY.steps)}


@pytest.mark.slow
def test_a_killed_run_continues_bit_for_bit(tmp_path, whole):
    kill_at(tmp_path, random.Random(0).randrange(5, 32))
    check_resumed(tmp_path, whole)


@pytest.mark.slow
def test_negative_control_one_lost_step_is_noticed(tmp_path, whole):
    """The comparison of resumed runs would see a single batch of another seed."""

    class Forgetful(Digits):
        def batch(self, index, size, *, seed=0, split="train"):
            return super().batch(index, size, seed=seed + (index == 30), split=split)

    config = dataclasses.replace(TINY, checkpoint_every=TINY.steps)
    state = train(config, Forgetful(TINY.data), tmp_path, RunOptions(progress=False))
    assert not identical(state, whole[1])


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [2])
def test_four_devices_give_the_same_run(tmp_path, whole, accumulate):
    """Same batches and noise; only the order of additions differs. The state is cut, not copied."""
    flags = "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0"
    process = start(tmp_path, "steps=15", "checkpoint_every=15", f"accumulate={accumulate}", XLA_FLAGS=flags)
    assert process.wait(300) == 0, process.stderr.read()
    process.communicate()
    losses = [
        [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()][:5]
        for folder in (tmp_path, whole[0])
    ]
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-4)


@pytest.mark.parametrize(
    "setting,match",
    [
        ("model.seq_len=16", "do not give 16 tokens"),
        ("model.token_dim=32", "dimension 16, the model's 32"),
        ("model.num_classes=9", "10 classes, the model 9"),
    ],
)
def test_model_and_data_must_fit(setting, match):
    with pytest.raises(UserError, match=match):
        check_fit(with_settings(TINY, [setting]), SOURCE)


def test_learning_rate():
    rate = jax.vmap(learning_rate(dataclasses.replace(TINY, warmup=10, decay=20, steps=60, final_rate=0.1)))
    values = np.array(rate(jnp.arange(61))) / TINY.learning_rate
    np.testing.assert_allclose(values[:10], np.arange(1, 11) / 10, rtol=1e-5)
    np.testing.assert_allclose(values[10:41], 1.0)
    np.testing.assert_allclose(values[[50, 60]], [0.55, 0.1], rtol=1e-5)
    constant = learning_rate(dataclasses.replace(TINY, decay=0))
    assert float(constant(59)) == pytest.approx(TINY.learning_rate)


def test_weight_decay_spares_the_head_biases_and_norms():
    params = init_state(TINY).params
    mask = decayed(params)
    assert not any(jax.tree.leaves(mask["head"]))
    block = mask["backbone"]["encoder_blocks_0"]
    assert block["attn"]["qkv"] == {"kernel": True, "bias": False}
    assert block["norm1"] == {"scale": False, "bias": False}
    assert mask["backbone"]["class_emb"]["embedding"]


def test_average_of_the_weights():
    ema = {"w": jnp.zeros(())}
    for step in range(200):
        ema = average(ema, {"w": jnp.ones(())}, jnp.int32(step), 0.9)
    assert float(ema["w"]) == pytest.approx(1.0, abs=1e-6)
    young = average({"w": jnp.zeros(())}, {"w": jnp.ones(())}, jnp.int32(0), 0.999)
    assert float(young["w"]) == pytest.approx(0.9)


def test_every_step_has_its_own_mask_ratio():
    numbers = [n_known(TINY, step) for step in range(200)]
    assert numbers == [n_known(TINY, step) for step in range(200)]
    assert set(numbers) == {0, 1}  # of 4 tokens, at least 70 % hidden


def test_the_first_steps_show_five_eighths():
    config = dataclasses.replace(TINY, settle=3, least_mask_ratio=0.1)
    assert [n_known(config, step) for step in range(3)] == [2, 2, 2]  # of 4 tokens
    assert len({n_known(config, step) for step in range(3, 60)}) > 1
    with pytest.raises(UserError, match=r"it must be at most 0\.375"):
        dataclasses.replace(TINY, settle=3)


@pytest.mark.slow
def test_a_run_that_begins_on_the_grid():
    config = dataclasses.replace(TINY, on_grid=True)
    backbone, usual = (init_state(c).params["backbone"] for c in (config, TINY))
    for name in ("encoder_pos_embed_learned", "decoder_pos_embed_learned"):
        table = np.array(backbone[name][0, -4:])  # of a grid of 2 x 2: the diagonals have one sum
        np.testing.assert_allclose(table[0] + table[3], table[1] + table[2], atol=1e-5)
        assert np.array_equal(backbone[name][0, :-4], usual[name][0, :-4])
        assert np.std(table) > 0.3
    block = backbone["encoder_blocks_0"]
    x = jax.random.normal(jax.random.key(0), (1, 3, config.model.encoder_width))
    assert jnp.array_equal(Block(config.model.encoder_heads).apply({"params": block}, x), x)
    assert jax.tree.structure(backbone) == jax.tree.structure(usual)


def test_metrics_past_the_checkpoint_are_dropped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 5}\n{"step": 10}\n{"step": 15}\n{"step": 2')
    with MetricsLog(path, 10, 4) as log:
        log.add(Metrics(3.0, 2.0, 1.0, 0.5, 0.1))
        log.add(Metrics(1.0, 0.5, 0.5, 0.5, 0.1))
        assert log.write(12).loss == 2.0
    assert steps_logged(tmp_path) == [5, 10, 12]


def test_pictures_are_tiled_row_by_row():
    images = np.stack([np.full((2, 2, 1), value) for value in (-1.0, 0.0, 1.0)])
    assert grid(images, 2)[::2, ::2].tolist() == [[0, 128], [255, 0]]
    assert not grid(np.full_like(images, np.nan), 2).any()


@pytest.mark.parametrize("name", presets.PRESETS)
def test_presets_survive_json(name):
    config = presets.preset(name)
    assert settings.from_json(json.loads(json.dumps(settings.to_json(config)))) == config
    hash(config)
    if isinstance(config.data, FolderConfig):
        return
    from cspd_jax.training.image import autoencoder
    from cspd_jax.training.image.data import SphereLatents, make_source

    source = make_source(config.data)
    if isinstance(config, VAETrainConfig):
        return autoencoder.check_fit(config, source)
    if getattr(config.model, "on_sphere", False):
        source = SphereLatents(source, VAE("svae", presets.preset("glyphs-svae").model, {}))
    check_fit(config, source)


@pytest.mark.parametrize(
    "settings,match",
    [
        (["steps"], "NAME=VALUE"),
        (["step=1"], "no setting 'step'; there are steps, batch"),
        (["model.depth=1"], r"no setting 'model.depth'.*model.encoder_depth.*data.size"),
        (["model=1"], "no setting 'model'"),
        (["steps=many"], "steps is a whole number"),
        (["steps=0"], "at least 1"),
        (["learning_rate=0"], "above 0"),
        (["ema=1"], "below 1"),
        (["decay=59"], "do not fit"),
        (["model.encoder_heads=3"], "not divisible"),
        (["dtype=int8"], "float32 or bfloat16"),
    ],
)
def test_bad_settings(settings, match):
    with pytest.raises(UserError, match=match):
        with_settings(TINY, settings)


def test_settings_by_name():
    config = with_settings(
        presets.preset("glyphs"), ["data.fonts=cmr10, cmss10", "model.head_depth=2", "ema=0"]
    )
    assert config.data.fonts == ("cmr10", "cmss10") and config.model.head_depth == 2 and config.ema == 0.0
    assert with_settings(presets.preset("mar-base"), ["data.flip=false"]).data.flip is False


def call(*arguments):
    parser = argparse.ArgumentParser()
    command.add_parser(parser.add_subparsers())
    args = parser.parse_args(["train", *map(str, arguments)])
    args.func(args)


def test_the_command(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(presets.PRESETS, "tiny", dataclasses.replace(TINY, sample_every=1000))
    out = tmp_path / "run"
    call("--preset", "tiny", "--out", out, "--stop-at", 3, "--json", "--set", "checkpoint_every=40")
    told = capsys.readouterr()
    assert json.loads(told.out)["steps"] == 3 and "--resume" in told.err
    assert not (out / "model").exists()
    with pytest.raises(UserError, match="not empty"):
        call("--preset", "tiny", "--out", out)
    with pytest.raises(
        UserError, match="has seed 0, not 8; the model, data and seed of a run cannot be changed"
    ):
        call("--out", out, "--resume", "--seed", 8)
    call("--out", out, "--resume", "--json")
    report = json.loads(capsys.readouterr().out)
    assert report["steps"] == 40 and pathlib.Path(report["model"]).is_dir()
    (out / "model" / "gains").mkdir()
    (out / "model" / "gains" / "mine.npz").touch()
    call("--out", out, "--resume")
    assert {p.name for p in (out / "model").iterdir()} == {"config.json", "params", "gains"}
    assert (out / "model" / "gains" / "mine.npz").exists() and len(list(out.glob(".model*"))) == 0
    model = weights.load(report["model"])
    assert model.kind == "mar" and model.config == TINY.model
    assert model.metadata["extra"]["class_names"] == list("0123456789")
    assert model.metadata["extra"]["training"]["checkpoint_every"] == 40
    assert (out / "pictures" / "step_0000040.png").exists()
    the_loss_falls(out / "metrics.jsonl")


def the_loss_falls(metrics):
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    errors = np.array([line["mse"] for line in lines])
    assert len(lines) == 40 and np.isfinite([line["loss"] for line in lines]).all()
    assert errors[-10:].mean() < 0.8 * errors[:10].mean()
    assert all(abs(line["loss"] - line["mse"] - line["vb"]) < 1e-5 for line in lines)


def test_a_batch_must_divide_among_devices():
    three = types.SimpleNamespace(shape={"data": 3, "model": 1})
    with pytest.raises(UserError, match="batch of 8 cannot be spread evenly over 3 devices"):
        Placement(TINY.batch, three)


def test_damaged_lines_of_the_metrics_are_dropped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = ['{"step": 1}', "{", "[" * 10**5, '{"step": "x"}', '{"step": 2}', '{"step": 3}']
    path.write_text("\n".join(lines) + "\n")
    MetricsLog(path, 2, 1).__exit__()
    assert path.read_text().splitlines() == [lines[0], lines[4]]
