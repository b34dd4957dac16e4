"""Fetching by name, with a hub of files on disk in the place of the network."""

import hashlib
from pathlib import Path
from unittest import mock

import hf_folder
import numpy as np
import pytest
from commands import printed, run
from recorded import GOLDEN
from safetensors.numpy import save_file

from cspd_jax import hub
from cspd_jax.check import UserError
from cspd_jax.converters.mar import HEADS_OF_WIDTH
from cspd_jax.converters.torch_file import open_checkpoint

huggingface_hub = pytest.importorskip("huggingface_hub")
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def snapshot(tmp_path, monkeypatch):
    """The folder of a repository's files in the cache of the real library, whose
    signatures hold."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "cache" / COMMIT
    folder.mkdir(parents=True)

    def download(repository, file, **where):
        if not (folder / file).exists():
            raise FileNotFoundError(f"{repository} has no {file}")
        return str(folder / file)

    whole = lambda *args, **kwargs: str(folder)
    for name, fake in (("hf_hub_download", download), ("snapshot_download", whole)):
        real = getattr(huggingface_hub, name)
        signed = mock.create_autospec(real, side_effect=fake)
        monkeypatch.setattr(huggingface_hub, name, signed)
    return folder


@pytest.mark.slow
def test_convert_by_name(snapshot, capsys, monkeypatch):
    state = open_checkpoint(GOLDEN / "mar_tiny.pth")["model_ema"]
    file = snapshot / "mar-base.safetensors"
    save_file({name: np.array(tensor.numpy()) for name, tensor in state.items()}, file)
    foreign = {"net.transformer.weight": np.zeros((2, 2), np.float32)}
    save_file(foreign, snapshot / "kl16.safetensors")
    source = f"jadechoghari/mar@{COMMIT}/mar-base.safetensors"
    assert hub.fetch("mar-base") == (file, source)
    with monkeypatch.context() as patch:
        patch.setitem(HEADS_OF_WIDTH, 32, 4)
        model = hub.load("mar-base")
    assert model.config.seq_len == 16 and model.metadata["source"] == source
    description = printed(capsys, "convert mar-base out --heads 4,4")
    assert description["source"] == source
    assert description["source_sha256"] == hashlib.sha256(file.read_bytes()).hexdigest()
    assert run("convert kl16 other") == 2
    assert "its tensors are: net.transformer.weight" in capsys.readouterr().err
    assert not Path("other").exists()
    with pytest.raises(UserError, match=r"not be fetched .*has no mar-huge\.safe"):
        hub.fetch("mar-huge")


@pytest.mark.slow
@pytest.mark.parametrize("files", [1, 2])
def test_language_models_by_name(snapshot, capsys, files):
    """Config, weights in one or several files; then `text` and `convert`."""
    hf_folder.write(snapshot, hf_folder.LLAMA, files=files)
    how = "--prompt-ids 1,2 --new-tokens 4 --method plain"
    by_name, by_path = (
        printed(capsys, f"text --target {target} {how}")["ids"]
        for target in ("someone/tiny-1.5b", snapshot)
    )
    assert by_name == by_path
    description = printed(capsys, "convert someone/tiny-1.5b out")
    assert description["source"] == f"someone/tiny-1.5b@{COMMIT}"
    assert description["kind"] == "lm"
