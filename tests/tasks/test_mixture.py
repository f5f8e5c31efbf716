"""Several sources in one run: each row keeps its own prompt and verifier, and each batch the weights."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests import running
from tests.tiny_models import TinyModels
from tinyrl.config.schema import Config
from tinyrl.data.rows import weighted_indices
from tinyrl.rewards.functions import FunctionReward
from tinyrl.tasks import load_split, load_task

SOURCES: list[dict[str, Any]] = [
    {"task": "sort", "max_samples": 24, "weight": 3.0},
    {"task": "sums", "name": "adding", "max_samples": 24},
]


def config(**sections: Any) -> Config:
    return Config.model_validate({"method": "grpo", "task": {"sources": SOURCES}, **sections})


@pytest.fixture
def own(tmp_path: Path) -> Path:
    rows = [{"prompt": f"{i} + 1 =", "answer": i + 1} for i in range(40)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return tmp_path / "rows.jsonl"


def test_rows_keep_their_task_and_gold_answers_have_full_marks(own: Path) -> None:
    settings = config(task={"sources": [*SOURCES, {"data": str(own), "name": "mine"}]})
    rows, task = load_split(settings, "train"), load_task(settings.task.name or "")
    assert {row["source"] for row in rows} == {"sort", "adding", "mine"}
    names = dict.fromkeys(name for row in rows for name in row if name != "prompt")
    columns = {name: [row.get(name) for row in rows] for name in names}
    gold = [task.gold(row) for row in rows]
    with FunctionReward(task.grader or "", timeout_s=60.0) as grader:
        scores = grader([task.prompt(row) for row in rows], gold, columns).scores
        wrong = grader([task.prompt(row) for row in rows], ["?"] * len(rows), columns).scores
    assert scores == [1.0] * len(rows)
    assert wrong == [0.0] * len(rows)
    held_out = {str(task.prompt(row)) for row in load_split(settings, "eval")}
    assert not held_out & {str(task.prompt(row)) for row in rows}


@pytest.mark.parametrize("num_prompts", [1, 7, 32])
def test_batches_keep_the_weights_and_every_row_comes_as_often(num_prompts: int) -> None:
    sources = [(3.0, [*range(10)]), (1.0, [*range(10, 14)]), (0.5, [*range(14, 17)])]
    steps = 900 // num_prompts
    batches = [weighted_indices(5, step, num_prompts=num_prompts, sources=sources) for step in range(steps)]
    assert all(len(batch) == num_prompts for batch in batches)
    drawn = [i for batch in batches for i in batch]
    for weight, rows in sources:
        counts = [drawn.count(i) for i in rows]
        assert sum(counts) == pytest.approx(len(drawn) * weight / 4.5, abs=1.5)
        assert max(counts) - min(counts) <= 2
    again = [weighted_indices(5, step, num_prompts=num_prompts, sources=sources) for step in range(steps)]
    assert again == batches
    assert [weighted_indices(6, step, num_prompts=num_prompts, sources=sources) for step in range(steps)] != batches


def test_a_run_tells_its_sources_apart_and_is_resumed(tiny: TinyModels, tmp_path: Path) -> None:
    settings = running.config("grpo", tiny("llama"), reward={"functions": []}, run={"num_steps": 2})
    values = settings.model_dump()
    values["task"] = {"sources": SOURCES}
    values["generation"]["max_prompt_tokens"] = 200
    settings = Config.model_validate(values)
    code, run, looks = running.train(settings, tmp_path, name="whole")
    assert code == 0
    lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    assert {"reward/source/sort", "reward/source/adding"} <= set(lines[-1])
    assert {"eval/reward/source/sort", "eval/reward/source/adding"} <= set(lines[0])
    code, stopped, _ = running.train(settings, tmp_path, name="stopped", stop_at=looks // 2)
    assert code == 75
    assert running.go_on(stopped) == 0
    assert running.lasting(stopped) == running.lasting(run)


@pytest.mark.parametrize(
    ("sections", "named"),
    [
        ({"task": {"sources": SOURCES, "name": "sort"}}, "sources"),
        ({"task": {"sources": [{"task": "sort"}, {"task": "sort"}]}}, "sources"),
        ({"environment": {"use": "python"}}, "environment.use"),
        ({"grpo": {"refill_rounds": 2}}, "refill_rounds"),
    ],
)
def test_what_does_not_go_with_sources_is_refused(sections: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        config(**sections)


@pytest.mark.parametrize("source", [{"task": "mixture"}, {"task": "srot"}, {"data": "/no/such.jsonl"}])
def test_a_source_that_cannot_be_one_is_named(source: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"task\.sources"):
        load_split(config(task={"sources": [SOURCES[0], {**source, "name": "other"}]}), "train")
