"""Shapes of models that recipes name: they are those published, and a plan needs nothing else where there is no hub."""

import os
from pathlib import Path

import huggingface_hub.constants
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests import running
from tinyrl.cli.preflight import ask_hub_once
from tinyrl.config.recipe import packaged_recipes, read_recipe
from tinyrl.config.schema import Config
from tinyrl.models.meta import LLAMA, SHAPES, described
from tinyrl.rollout.components import Options
from tinyrl.starter import starter_path
from tinyrl.training.launch import plan

# Of the model cards and the papers (2412.15115, 2505.09388), in billions.
PUBLISHED = {"0.5B": 0.494, "1.5B": 1.544, "3B": 3.086, "7B": 7.616, "1.7B": 1.721, "4B": 4.022, "1B": 1.236}


def test_every_model_of_a_recipe_is_known() -> None:
    named = {read_recipe(path).values["model"].get("path", "starter") for path in packaged_recipes().values()}
    on_the_hub = {name for name in named if starter_path(name) is None and "/" in name}
    assert on_the_hub == {*SHAPES}


@pytest.mark.parametrize("name", SHAPES)
def test_a_known_model_has_as_many_weights_as_published(name: str) -> None:
    facts = described(name)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**facts))
    size = next(part for part in name.split("-") if part in PUBLISHED)
    assert model.num_parameters() / 1e9 == pytest.approx(PUBLISHED[size], abs=6e-4)


@pytest.mark.parametrize("method", ["grpo", "ppo", "sft", "dpo", "reward"])
@pytest.mark.wide
def test_a_plan_without_a_hub_goes_by_shapes(method: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setitem(SHAPES, "own/tiny", (LLAMA, (32, 64, 2, 4, 2, 8, 800, 2048, True)))
    rows = {"name": "rows", "data": "own/rows"}
    settings = running.config(method, Path("own/tiny"), task=rows, model={"path": "own/tiny"})
    planned = plan(settings, options=Options(device="cpu"), output_dir=str(tmp_path))
    assert planned.offline
    assert planned.text.startswith("offline: by the shapes of own/tiny")
    assert "memory on cpu" in planned.text
    monkeypatch.delitem(SHAPES, "own/tiny")
    with pytest.raises(ValueError, match="own/tiny"):
        plan(settings, options=Options(device="cpu"), output_dir=str(tmp_path))


def test_a_hub_that_does_not_answer_is_asked_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And that nothing is asked from then on is said."""
    asked: list[str] = []

    def refuse(request: object, *, timeout: float) -> None:
        asked.append(getattr(request, "full_url", ""))
        raise OSError("no network")

    monkeypatch.setenv("HF_HUB_OFFLINE", "")  # so that it is taken away again
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setattr("urllib.request.urlopen", refuse)
    ask_hub_once(Config.model_validate({"method": "grpo", "task": {"name": "sort"}}))
    assert asked == []
    for _ in range(2):
        ask_hub_once(Config.model_validate({"method": "grpo", "model": {"path": "own/tiny"}}))
    assert len(asked) == 1
    assert capsys.readouterr().err.count("HF_HUB_OFFLINE") == 1
    assert os.environ["HF_HUB_OFFLINE"] == "1"
