"""The model in `tinyrl check`: a sound model passes; what is wrong with one is found by the check that is for it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.tiny_models import TinyModels, tiny_model
from tinyrl.config.schema import Config
from tinyrl.generation.engines import FusedEngine
from tinyrl.rollout.load import load_method
from tinyrl.runs.launched import Options
from tinyrl.tools.check import loaded as model_checks
from tinyrl.tools.check.loaded import Check, check_parts

SPEAKS = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}END{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def checked(folder: Path, **sections: Any) -> dict[str, Check]:
    values = {"method": "grpo", "model": {"path": str(folder)}, "task": {"name": "sort"}, **sections}
    trainer = load_method(Config.model_validate(values), options=Options(device="cpu"))
    try:
        return {one.name: one for one in check_parts(trainer.policy, trainer.collector.engine)}
    finally:
        trainer.close()


def wrong(found: dict[str, Check]) -> list[str]:
    return [name for name, one in found.items() if one.result == "wrong"]


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_sound_model_passes(tiny: TinyModels, kind: str) -> None:
    found = checked(tiny(kind))
    assert wrong(found) == []
    assert {"padded = unpadded", "cached generation = rescored"} <= {*found}
    assert found["end of text"].said == "<eos> (1)"


def test_positions_that_padding_shifts_are_found(tiny: TinyModels, monkeypatch: pytest.MonkeyPatch) -> None:
    real = model_checks.make_batch

    def shifted(*rows: Any, **options: Any) -> Any:
        batch = real(*rows, **options)
        return replace(batch, position_ids=batch.position_ids + 3) if batch.num_rows == 4 else batch

    monkeypatch.setattr(model_checks, "make_batch", shifted)
    assert "padded = unpadded" in wrong(checked(tiny("gpt2")))


def test_a_cache_that_gives_other_numbers_is_found(tiny: TinyModels, monkeypatch: pytest.MonkeyPatch) -> None:
    real = FusedEngine.sample

    def off(self: FusedEngine, *arguments: Any, **options: Any) -> Any:
        groups = real(self, *arguments, **options)
        return [[replace(c, logprobs=[p - 0.01 for p in c.logprobs]) for c in group] for group in groups]

    monkeypatch.setattr(FusedEngine, "sample", off)
    assert wrong(checked(tiny("llama"))) == ["cached generation = rescored"]


def with_template(folder: Path, template: str) -> Path:
    tiny_model(folder, "llama")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder


def test_a_turn_that_ends_with_no_end_token_is_found(tmp_path: Path) -> None:
    found = checked(with_template(tmp_path / "bad", SPEAKS))
    assert wrong(found) == ["chat template"]
    assert found["chat template"].said == "a turn ends with 'END', and no token of that ends a completion"
    assert checked(with_template(tmp_path / "good", SPEAKS.replace("END", "<eos>")))["chat template"].result == "ok"


def test_a_prompt_begins_with_bos_once(tmp_path: Path) -> None:
    """Some templates begin every message with it."""
    every = SPEAKS.replace("<{{", "<pad><{{").replace("END", "<eos>")
    for name, template, result in (("once", every, "ok"), ("twice", "<pad>" + every, "wrong")):
        folder = with_template(tmp_path / name, template)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        tokenizer.bos_token = "<pad>"
        tokenizer.save_pretrained(folder)
        assert checked(folder)["chat template"].result == result
