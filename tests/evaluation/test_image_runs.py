"""`tinyrl eval` on rows with images: runs, checkpoints and models, paired by prompts and their pictures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests import running
from tests.images import image_file
from tests.tiny_vision import tiny_vision
from tests.training.rows import write_rows
from tests.training.test_vision_runs import settings
from tinyrl.evaluation.prepared import prepare_comparison, prepare_evaluation
from tinyrl.evaluation.targets import Asked
from tinyrl.process.launched import Options
from tinyrl.runs.run_dir import RunDir
from tinyrl.tools.compare import compare, evaluate_target

OPTIONS = Options(device="cpu")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_vision("smolvlm", tmp_path_factory.mktemp("model") / "smolvlm")


@pytest.fixture(scope="module")
def run(model: Path, tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """A run of one step on eight pictures beside one question, evaluated on the same rows."""
    folder = tmp_path_factory.mktemp("run")
    config = settings(model, folder, num_steps=1)
    section = config.run.model_copy(update={"eval_every": 1})
    code, done, _ = running.train(config.model_copy(update={"run": section}), folder)
    assert code == 0
    return done


def evaluated(target: str, asked: Asked | None = None, vs: str | None = None) -> dict[str, Any]:
    prepared = prepare_evaluation(target, asked or Asked(), vs=vs)
    return evaluate_target(prepared, options=OPTIONS).as_json()


def test_a_run_has_the_numbers_of_its_own_evaluation(run: RunDir) -> None:
    own = running.metrics(run)[-1]
    assert evaluated(str(run.path))["reward_mean"] == pytest.approx(own["eval/reward_mean"], abs=1e-9)


def test_a_model_is_compared_on_the_pictures_that_a_run_holds_out(run: RunDir, model: Path) -> None:
    """Its own configuration knows of no images."""
    prepared = prepare_comparison([str(run.path), str(model)], Asked(split="eval"))
    sides = compare(prepared, options=OPTIONS).sides
    assert [side.as_json()["num_prompts"] for side in sides] == [8, 8]


def test_rows_that_a_run_was_trained_on_are_counted_by_their_pictures(run: RunDir, tmp_path: Path) -> None:
    """Two pictures of the run's, and one that is new, beside the same question."""
    folder = Path(str(run.read_config().task.data)).parent
    image_file(tmp_path / "new.png", color=(1, 2, 3), size=(32, 32))
    lines = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()[:3]]
    lines[0]["image"] = str(tmp_path / "new.png")
    rows = write_rows(
        tmp_path / "rows.jsonl", [lines[0], *({**line, "image": str(folder / line["image"])} for line in lines[1:])]
    )
    assert evaluated(str(run.path), Asked(data=str(rows)))["trained_on"] == 2
