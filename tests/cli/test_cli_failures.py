"""What ends a command: requests that cannot be, the system's refusals, signals, readers that go away."""

import errno
import json
import os
import signal
import subprocess
import sys
import time

import pytest
import tiny

from cspd_jax import __main__ as cli
from cspd_jax._utils import files
from cspd_jax.cli import _failures, info


def command(*arguments):
    try:
        return cli.main([str(a) for a in arguments])
    except SystemExit as refused:  # by argparse
        return refused.code


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (["genrate"], "is generate meant?"),
        (["generate", "--metod", "plain"], "unrecognized arguments: --metod plain; is --method meant?"),
        (["generate", "--seed", "-1"], "'-1' is not a whole number from 0 to 4294967295"),
        (["generate", "--labels", "99"], "is out of range: the model has classes 0 to 7"),
        (["generate", "--out", ""], "the name of the folder for the results is empty"),
        (["generate", "--out", "/proc/xx"], "/proc/xx cannot be made: /proc is not writable"),
        (["generate", "--gamma", "4"], "--gamma needs a method to go with: add --method self or cspd"),
        (["generate", "--target", "text-default"], "text-default is a language model; it goes with cspd-jax"),
        (["text", "--target", "default"], "default is an image model; it goes with cspd-jax generate"),
        (["text", "--draft", "nosuch"], "--draft nosuch is none of lookup, int8, int4, text-default"),
        (["text", "--prompt", "a", "--new-tokens", "1000000000"], "more than the 1024 positions"),
        (["text", "--method", "plain", "--gamma", "3"], "--gamma is for the methods that draft"),
        (["text", "--method", "tree", "--gamma", "3"], "--gamma is not for draft trees"),
        (["convert", "default", "/proc/xx"], "/proc/xx cannot be made: /proc is not writable"),
        (["convert", "", "there"], "the name of what should be converted is empty"),
        (["train", "--preset", "nosuch", "--out", "made"], "preset 'nosuch' is unknown"),
        (["train", "--out", "run", "--data", "here"], "here' does not exist; name one with --data"),
        (["distill", "--out", "run", "--preset", "text-states"], "give --target and --prompts"),
    ],
)
def test_what_cannot_be(arguments, sentence, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert command(*arguments) == 2
    told = capsys.readouterr().err
    assert sentence in told.splitlines()[-1] and told.count("\n") <= 2 and len(told) < 4000
    assert list(tmp_path.iterdir()) == []


def no_space(*_, **__):
    raise OSError(errno.ENOSPC, "No space left on device", "samples")


def wrapped(*_):
    try:
        no_space()
    except OSError as error:
        raise ValueError("a library's own words") from error


def too_long(*_):
    os.stat("x" * 5000)


def refused(*_):
    raise PermissionError(errno.EACCES, "Permission denied", "there")


def memory(*_):
    raise MemoryError


def pipe(*_):
    raise BrokenPipeError(errno.EPIPE, "Broken pipe")


@pytest.mark.parametrize(
    "raised, sentence",
    [
        (no_space, "samples: the disk is full"),
        (wrapped, "samples: the disk is full"),
        (too_long, "File name too long"),
        (refused, "there: Permission denied"),
        (memory, "too little memory"),
        (pipe, "nobody reads the output any more"),
    ],
)
def test_refusals_of_the_system(raised, sentence, monkeypatch, capsys):
    monkeypatch.setattr(info, "run", raised)
    monkeypatch.setattr(_failures, "silence_output", lambda: None)
    assert command("info", "default") == 2
    told = capsys.readouterr().err
    assert told.startswith("cspd-jax: error: ") and sentence in told and told.count("\n") == 1


def test_a_mistake_of_the_program_is_not_hidden(monkeypatch):
    def missing(*_):
        try:
            os.stat("/nowhere/at/all")
        except OSError as error:
            raise KeyError("mistake") from error

    monkeypatch.setattr(info, "run", missing)
    with pytest.raises(KeyError):
        command("info", "default")


SLEEPS = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where tests run in the background
from cspd_jax import __main__ as cli
from cspd_jax._utils.files import written_beside
from cspd_jax.cli import info
def wait(args):
    with written_beside(args.path) as partial:
        partial.write_text("half")
        print("ready", flush=True)
        time.sleep(60)
info.run = wait
sys.exit(cli.main(["info", sys.argv[1]]))
"""


@pytest.mark.parametrize(
    "number, code, word",
    [(signal.SIGTERM, 143, "terminated"), (signal.SIGINT, 130, "interrupted"), (signal.SIGKILL, -9, "")],
)
def test_signals(tmp_path, number, code, word):
    """What is half written is removed; after SIGKILL by the next who writes there."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen([sys.executable, "-c", SLEEPS, tmp_path / "result"], **pipes)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(number)
    _, told = process.communicate(timeout=30)
    assert process.returncode == code and word in told and "Traceback" not in told
    assert len(list(tmp_path.iterdir())) == (number == signal.SIGKILL)
    files.write_text(tmp_path / "result", "whole")
    assert [f.name for f in tmp_path.iterdir()] == ["result"]


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
def test_images_are_written_before_they_are_compared(tmp_path, monkeypatch, capsys):
    """Ctrl-C in the comparison loses nothing."""
    from cspd_jax.image import comparison

    monkeypatch.chdir(tmp_path)
    folder = tiny.save_mar(tmp_path / "model", tiny.PIXELS)

    def interrupted(*_):
        time.sleep(0.01)
        raise KeyboardInterrupt

    monkeypatch.setattr(comparison, "beside_plain", interrupted)
    argv = ("generate", "--target", folder, "--method", "self", "--gamma", "1", "--compare", "--n", "1")
    assert command(*argv, "--labels", "0", "--num-iter", "2", "--out", "made") == 130
    assert {f.name for f in (tmp_path / "made").iterdir()} >= {"samples.npz", "samples.png", "report.json"}
    report = json.loads((tmp_path / "made" / "report.json").read_text())
    assert report["images"] == 1
    assert "the images are in made; comparing self with the plain sampler" in capsys.readouterr().err
