"""What ends a command: one line and code 2 for what a caller can mend; a signal leaves
no half files."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
import torch_writer

from cspd_jax.__main__ import main
from cspd_jax.cli import info
from cspd_jax.tools import demo

GOLDEN = Path(__file__).parents[1] / "golden"
SHORT = {
    "GENERATE": "generate --method plain --target target --labels 0 --n 1",
    "DRAFT": "generate --target target --method draft --draft",
    "TINY": str(GOLDEN / "mar_tiny.pth"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tiny.save_models(tmp_path_factory.mktemp("here"))
    for name in ("text.pth", "full/x"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("hello")
    (folder / "run" / "checkpoints").mkdir(parents=True)
    (folder / "run" / "config.json").write_text('{"begun_with": {}}')
    torch_writer.write(
        folder / "evil.pth",
        {},
        pickle=b"\x80\x02cposix\nsystem\nX\x02\x00\x00\x00id\x85R.",
    )
    return folder


MISTAKES = {
    "GENERATE --labels 9": "label 9 is out of range: the model has classes 0 to 4",
    "GENERATE --labels 5-2": "label '5-2' is neither a number, such as 0 or",
    "GENERATE --out full": "full exists already",
    "GENERATE --out /proc/xx": "/proc/xx cannot be made: /proc is not writable",
    "GENERATE --method self --final-noise off": "needs noise in the last denoising",
    "GENERATE --method self --gtr 1": "shortcuts of the plain sampler",
    "GENERATE --temperature 1e38 --num-iter 1": "the model diverged",
    "GENERATE --method draft": "needs --draft MODEL; --draft and --criterion go",
    "GENERATE --prompt red": "makes images of classes",
    "GENERATE --gamma 8": "--gamma goes with --method self or draft, and",
    "GENERATE --window 0": "window is 0; it must be at least 1",
    "GENERATE --n -3": "argument --n: -3 is not at least 1",
    "sample --out made --num-iter 1000": "num_iter are of MAR",
    "text --method tree --gamma 4": "with --method speculation",
    "masked --method auto --gamma 2": "goes with --method ssd",
    "text --target full/y": "full/y does not exist",
    "info run": "has not ended; give its command again",
    "text --target run/model": "run is the folder of a training run; it",
    "text --mesh data=1,dta=8": "its axes are data and model",
    "GENERATE --image nosuch.png --keep border": "error: No such file or directory: ",
    "GENERATE --vae vae": "does not fit",
    "DRAFT latents": "tokens of dimension 4, the target tokens of dimension 16",
    "generate --target wrods": "did you mean words?",
    "info words-cau": "did you mean words-causal",
    "generate --lables 3": "--lables 3; did you mean --labels?",
    "text --draft lokup": "error: --draft MODEL|int8|int4|lookup: lokup is no",
    "text --prompt-ids a": "invalid 'integers' value: 'a'",
    "GENERATE --anneal 50": "invalid 'FIRST:LAST' value: '50'",
    "GENERATE --compare": "plain is the reference itself",
    "text --method plain --compare": "plain is the reference itself",
    "generate --target text-default": "takes an image model (cspd-jax generate)",
    "text --target default": "is an image model (cspd-jax generate); this takes",
    "text --target masked-default": "is a masked-diffusion model; use cspd-jax masked",
    "masked --target text-default": "is a causal model; use cspd-jax text",
    "text --method tree --draft lookup": "PromptLookup makes no trees",
    "text --prompt a --new-tokens 1000000000": "more than the 1024 positions",
    "convert none.pth out": "none.pth does not exist",
    "convert text.pth out": "or no PyTorch checkpoint",
    "convert evil.pth out": "posix.system, which is not among",
    "convert TINY out": "--heads ENC,DEC",
    "info full": "full is not a checkpoint",
    "train --preset nosuch --out made": "preset 'nosuch' is unknown",
    "train --set stpes=3 --out made": "no setting 'stpes'; there are steps, batc",
    "distill --out run --preset text-states": "give --target and --prompts",
    "calibrate masked-default": "not a checkpoint folder that can be written to",
    "--distributed host:1,2 info default": "is neither auto nor HOST:PORT,I,N",
}


@pytest.mark.parametrize("line, sentence", MISTAKES.items())
def test_what_cannot_be(line, sentence, folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    before = sorted(os.listdir())
    for name, words in SHORT.items():
        line = line.replace(name, words)
    try:
        code = main(line.split())
    except SystemExit as refused:  # by argparse
        code = refused.code
    out, err = capsys.readouterr()
    assert (
        code == 2
        and out == ""
        and "error: " in err
        and sentence in err.splitlines()[-1]
    )
    assert sorted(os.listdir()) == before


@pytest.mark.parametrize(
    "error, sentence",
    [
        (
            PermissionError(13, "Permission denied", "there"),
            "Permission denied: 'there'",
        ),
        (RuntimeError("RESOURCE_EXHAUSTED: out of memory"), "too little memory"),
        (
            ModuleNotFoundError(name="gradio"),
            'gradio is missing; this needs pip install ".[demo]"',
        ),
    ],
)
def test_what_is_not_there(error, sentence, monkeypatch, capsys):
    def run(args):
        raise error

    monkeypatch.setattr(demo, "run", run)
    assert main(["demo"]) == 2
    assert sentence in (told := capsys.readouterr().err) and told.count("\n") == 1


def test_a_mistake_of_the_program_is_not_hidden(monkeypatch):
    monkeypatch.setattr(info, "run", lambda args: {}["mistake"])
    with pytest.raises(KeyError):
        main(["info", "default"])


def test_ctrl_c_has_nothing_to_say_while_the_package_is_imported():
    program = "import signal, sys; sys.argv = ['bin/cspd-jax']; import cspd_jax;"
    program += "signal.raise_signal(signal.SIGINT)"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True)
    assert ended.returncode == -signal.SIGINT and not ended.stderr


SLEEPS = """
import sys, time
from cspd_jax import __main__ as program
from cspd_jax._utils.files import written_beside
from cspd_jax.cli import info
def wait(args):
    with written_beside(args.path) as partial:
        partial.write_text("half")
        WAIT
info.run = wait
program.command()
"""
SLEEP = "(print('ready', flush=True), time.sleep(60))"
IGNORES = f"type('', (), {{'__del__': lambda _: {SLEEP}}})(); {SLEEP}"


@pytest.mark.parametrize("wait, ignored", [(SLEEP, False), (IGNORES, True)])
def test_a_signal_leaves_nothing_half_written(wait, ignored, tmp_path):
    """Also if Python ignores it at first, because of where it comes."""
    program = SLEEPS.replace("WAIT", wait)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(
        [sys.executable, "-c", program, "info", tmp_path / "result"], **pipes
    )
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    _, told = process.communicate(timeout=30)
    assert process.returncode == 143 and "interrupted" in told
    assert ("Traceback" in told) == ignored
    assert not list(tmp_path.iterdir())
