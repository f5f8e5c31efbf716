"""The real model's folder in one file or more, by a tiny model in place of the package's."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.tiny_models import TinyModels
from tinyrl.starter import smollm2


@pytest.fixture
def packaged(tiny: TinyModels, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of what stands for the package's weights: read as it is, since a gguf needs a package to be made."""
    folder = tiny("llama")
    monkeypatch.setattr(smollm2, "weights_file", lambda: folder / "weights.gguf")
    for auto in (AutoModelForCausalLM, AutoTokenizer):
        read = auto.from_pretrained

        def plainly(*args: Any, gguf_file: str, read: Any = read, **named: Any) -> Any:
            assert gguf_file == "weights.gguf"
            return read(*args, **named)

        monkeypatch.setattr(auto, "from_pretrained", plainly)
    return folder


def test_weights_are_written_in_files_of_a_size(packaged: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    smollm2.main([str(tmp_path / "one")])
    smollm2.main([str(tmp_path / "several"), "--max-shard-size", "60KB"])
    monkeypatch.undo()
    assert [file.name for file in (tmp_path / "one").glob("*.safetensors")] == ["model.safetensors"]
    whole = (tmp_path / "one" / "model.safetensors").stat().st_size
    files = sorted((tmp_path / "several").glob("*.safetensors"))
    assert len(files) == whole // 60_000 + 1 == 2
    assert all(file.stat().st_size < 65_000 for file in files)  # the limit is of the numbers, without their names
    index = json.loads((tmp_path / "several" / "model.safetensors.index.json").read_text())
    assert {*index["weight_map"].values()} == {file.name for file in files}
    read: list[Any] = [AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("one", "several")]
    before = AutoModelForCausalLM.from_pretrained(packaged).state_dict()
    for name, weights in read[0].state_dict().items():
        assert torch.equal(weights, read[1].state_dict()[name]), name
        assert torch.equal(weights, before[name].bfloat16()), name
