"""What ends a command: requests that cannot be, the system's refusals, signals, readers that go away."""

import errno
import json
import signal
import subprocess
import sys
import time

import pytest
import tiny

from cspd_jax import image
from cspd_jax._utils import files
from cspd_jax.cli import info, main


def command(*arguments):
    try:
        return main([str(a) for a in arguments])
    except SystemExit as refused:  # by argparse
        return refused.code


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (["genrate"], "invalid choice: 'genrate'"),
        (["generate", "--metod", "plain"], "unrecognized arguments: --metod plain"),
        (["generate", "--labels", "99"], "label '99' is unknown; write class numbers from 0 to 7"),
        (["generate", "--out", "/proc/xx"], "/proc/xx cannot be made: /proc is not writable"),
        (["generate", "--target", "text-default"], "of kind lm; the model must be of kind mar"),
        (["text", "--target", "default"], "of kind mar; the language model must be of kind lm"),
        (["text", "--target", "masked-default"], "is a masked-diffusion model; use cspd-jax masked"),
        (["text", "--draft", "nosuch"], "nosuch is neither a checkpoint folder nor one of the names"),
        (["text", "--method", "tree", "--draft", "lookup"], "look-up makes no trees"),
        (["text", "--prompt", "a", "--new-tokens", "1000000000"], "more than the 1024 positions"),
        (["masked", "--method", "stepwise", "--gamma", "3"], "--gamma has no effect with --method stepwise"),
        (["convert", "default", "/proc/xx"], "/proc/xx cannot be made: /proc is not writable"),
        (["train", "--preset", "nosuch", "--out", "made"], "preset 'nosuch' is unknown"),
        (["train", "--out", "run", "--data", "here"], "here: No such file or directory"),
        (["distill", "--out", "run", "--preset", "text-states"], "give --target and --prompts"),
    ],
)
def test_what_cannot_be(arguments, sentence, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert command(*arguments) == 2
    told = capsys.readouterr().err
    assert sentence in told.splitlines()[-1] and told.count("\n") <= 2 and len(told) < 4000
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "error, sentence",
    [
        (OSError(errno.ENOSPC, "No space left on device", "samples"), "samples: No space left on device"),
        (PermissionError(errno.EACCES, "Permission denied", "there"), "there: Permission denied"),
        (RuntimeError("RESOURCE_EXHAUSTED: out of memory"), "too little memory"),
        (ModuleNotFoundError(name="matplotlib"), 'this needs pip install "cspd-jax[train]"'),
    ],
)
def test_refusals_of_the_system(error, sentence, monkeypatch, capsys):
    def run(args):
        raise error

    monkeypatch.setattr(info, "run", run)
    assert command("info", "default") == 2
    told = capsys.readouterr().err
    assert told.startswith("cspd-jax: error: ") and sentence in told and told.count("\n") == 1


def test_a_mistake_of_the_program_is_not_hidden(monkeypatch):
    monkeypatch.setattr(info, "run", lambda args: {}["mistake"])
    with pytest.raises(KeyError):
        command("info", "default")


SLEEPS = """
import sys, time
from cspd_jax import __main__ as program
from cspd_jax._utils.files import written_beside
from cspd_jax.cli import info
def wait(args):
    with written_beside(args.path) as partial:
        partial.write_text("half")
        print("ready", flush=True)
        time.sleep(60)
info.run = wait
program.command()
"""


def test_a_signal_leaves_nothing_half_written(tmp_path):
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen([sys.executable, "-c", SLEEPS, "info", tmp_path / "result"], **pipes)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    _, told = process.communicate(timeout=30)
    assert process.returncode == 130 and "interrupted" in told and "Traceback" not in told
    assert not list(tmp_path.iterdir())


def test_what_another_process_writes_stays(tmp_path):
    with files.written_beside(tmp_path / "result") as mine:
        mine.touch()
        files.write_text(tmp_path / "result", "other")
        assert mine.exists()
        mine.write_text("mine")
    assert (tmp_path / "result").read_text() == "mine"


@pytest.mark.slow
def test_a_reader_that_goes_away():
    script = f"{sys.executable} -m cspd_jax info default | head -c 5"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True)
    assert done.stdout == "path:"[:5] and "Traceback" not in done.stderr and "Exception" not in done.stderr


@pytest.mark.slow
def test_images_are_written_before_they_are_compared(tmp_path, monkeypatch):
    """Ctrl-C in the comparison loses nothing."""
    monkeypatch.chdir(tmp_path)
    folder = tiny.save_mar(tmp_path / "model", tiny.PIXELS)

    def interrupted(*_):
        time.sleep(0.01)
        raise KeyboardInterrupt

    monkeypatch.setattr(image, "compare", interrupted, raising=False)
    argv = ("generate", "--target", folder, "--method", "self", "--gamma", "1", "--compare", "--n", "1")
    assert command(*argv, "--labels", "0", "--num-iter", "2", "--out", "made") == 130
    assert {f.name for f in (tmp_path / "made").iterdir()} >= {"samples.npz", "samples.png", "report.json"}
    assert json.loads((tmp_path / "made" / "report.json").read_text())["rows"] == 1
