"""What is prepared before torch is imported is handed on, and not found again."""

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.images import image_file
from tests.training.rows import write_rows
from tinyrl.cli.commands import app
from tinyrl.config.recipe import dump_config
from tinyrl.evaluation.prepared import prepare_evaluation
from tinyrl.evaluation.targets import Asked
from tinyrl.rollout.prepared import PreparedRun, prepare
from tinyrl.runs.resolve import config_of

TASK = """
from pathlib import Path
from tinyrl.tasks import Task

def rows(split):
    with Path(__file__).with_name("reads.txt").open("a") as file:
        file.write(f"{split}\\n")
    return [{"prompt": f"{split} {i}", "answer": "a"} for i in range(20)]

def verify(prompts, completions, answer, **columns):
    return [float(a in c) for a, c in zip(answer, completions)]

TASK = Task(name="counted", rows=rows, verify=verify, gold=lambda row: row["answer"])
"""


def test_check_reads_the_rows_of_a_task_once(tmp_path: Path) -> None:
    (tmp_path / "counted.py").write_text(TASK)
    done = CliRunner().invoke(app, ["check", "grpo", f"task.name={tmp_path / 'counted.py'}:TASK", "--quick"])
    assert done.exit_code == 0, done.output
    assert (tmp_path / "reads.txt").read_text().split() == ["train", "eval"]


# ---- rows with images ----

ASKED = {"prompt": "what?", "answer": "red"}
SIDES = {"chosen": "red", "rejected": "blue"}
PAIR = {"messages": [{"role": "user", "content": "what?"}, {"role": "assistant", "content": "red"}]}


def prepared(
    folder: Path, sections: dict[str, Any], *, config: dict[str, Any], image: str | None = "red.png"
) -> PreparedRun:
    """Prepare a run on two rows with an image, of a model of which there is config.json alone."""
    image_file(folder / "red.png")
    data = write_rows(folder / "rows.jsonl", [{**ASKED, **PAIR, **SIDES, "image": image}] * 2)
    (folder / "model").mkdir(exist_ok=True)
    (folder / "model" / "config.json").write_text(json.dumps(config))
    task = {"data": str(data), "eval_data": str(data)}
    return prepare(config_of({"method": "grpo", "model": {"path": str(folder / "model")}, "task": task, **sections}))


SEES = {"model_type": "qwen2_5_vl", "vision_config": {}}
JUDGE = {"use": "judge", "url": "http://127.0.0.1:9", "model": "m", "rubric": "rubric.txt"}


@pytest.mark.parametrize("method", ["grpo", "sft", "ppo", "dpo", "reward"])
def test_images_are_taken_with_a_model_that_has_a_tower(tmp_path: Path, method: str) -> None:
    assert prepared(tmp_path, {"method": method}, config=SEES).rows.has_images


@pytest.mark.parametrize("method", ["grpo", "sft"])
def test_images_are_refused_with_a_model_that_has_no_tower(tmp_path: Path, method: str) -> None:
    with pytest.raises(ValueError, match=r"model\.path=.* no vision tower"):
        prepared(tmp_path, {"method": method}, config={"model_type": "qwen2"})
    assert not prepared(tmp_path, {"method": method}, config={"model_type": "qwen2"}, image=None).rows.has_images


@pytest.mark.parametrize(("sections", "setting"), [
    ({"method": "distill", "teacher": {"path": "starter"}}, r"teacher\.path"),
    ({"reward": {"model": "starter-reward"}}, r"reward\.model"),
    ({"teacher": {"path": "http://127.0.0.1:9", "kl_coef": 0.1}}, "teacher at an address"),
    ({"generation": {"engine": "server", "url": "http://127.0.0.1:9"}}, r"generation\.engine"),
])  # fmt: skip
def test_what_does_not_see_images_is_refused_before_a_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sections: dict[str, Any], setting: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rubric.txt").write_text("{prompt} {completion} {answer}")
    with pytest.raises(ValueError, match=f"images, which .*{setting}"):
        prepared(tmp_path, sections, config=SEES)
    assert not prepared(tmp_path, sections, config=SEES, image=None).rows.has_images


@pytest.mark.parametrize(("images", "count"), [(False, 1), (True, 0)])
def test_a_judge_that_does_not_see_the_images_of_rows_is_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, images: bool, count: int
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rubric.txt").write_text("Is it {answer}?")
    reward = {"functions": [{**JUDGE, "images": images}]}
    notes = prepared(tmp_path, {"reward": reward}, config=SEES).rows.notes
    assert len([note for note in notes if "judge" in note]) == count
    notes = prepared(tmp_path, {"reward": reward}, config=SEES, image=None).rows.notes
    assert not [note for note in notes if "judge" in note]


def test_a_separate_critic_on_another_base_is_refused_for_rows_with_images(tmp_path: Path) -> None:
    critic = {"kind": "separate", "path": str(tmp_path / "model")}
    with pytest.raises(ValueError, match=r"critic\.path=.* images"):
        prepared(tmp_path, {"method": "ppo", "critic": critic}, config=SEES)
    assert not prepared(tmp_path, {"method": "ppo", "critic": critic}, config=SEES, image=None).rows.has_images


def test_an_evaluation_refuses_images_for_a_model_without_a_tower(tmp_path: Path) -> None:
    prepared(tmp_path, {}, config=SEES)
    (tmp_path / "model" / "config.json").write_text('{"model_type": "qwen2"}')
    with pytest.raises(ValueError, match="no vision tower"):
        prepare_evaluation(str(tmp_path / "model"), Asked(data=str(tmp_path / "rows.jsonl")))


LOST = [({"prompt": "<image>what?"}, "<image>"), ({"picture": "red.png"}, "`picture`")]  # what a row has of an image
READS: dict[str, Any] = {"reward": {"functions": [{"use": "rewards.py:score"}]}}


def prepared_without_images(
    folder: Path, row: dict[str, Any], *, config: dict[str, Any], goes_on: bool = False, **sections: Any
) -> PreparedRun:
    """Prepare a run on two rows of which one has something of an image, of a model of which there is config.json."""
    (folder / "rewards.py").write_text("def score(completions, **columns):\n    return [0.0] * len(completions)\n")
    data = write_rows(folder / "rows.jsonl", [{**ASKED, **row}, ASKED])
    (folder / "config.json").write_text(json.dumps(config))
    task = {"data": str(data), "eval_data": str(write_rows(folder / "eval.jsonl", [ASKED]))}
    given = {"method": "grpo", "model": {"path": str(folder)}, "task": task, **sections}
    return prepare(config_of(given), goes_on=goes_on)


@pytest.mark.parametrize(("row", "named"), LOST)
def test_what_seems_an_image_is_refused_where_a_model_sees_images(
    tmp_path: Path, row: dict[str, Any], named: str
) -> None:
    with pytest.raises(ValueError, match=f"{named}.*1 of 3|1 of 3.*{named}"):
        prepared_without_images(tmp_path, row, config=SEES)
    assert not prepared_without_images(tmp_path, {"prompt": "an image"}, config=SEES).rows.notes


@pytest.mark.parametrize(("row", "named"), LOST)
def test_what_seems_an_image_is_noted_where_a_model_sees_none(tmp_path: Path, row: dict[str, Any], named: str) -> None:
    [note] = prepared_without_images(tmp_path, row, config={"model_type": "qwen2"}).rows.notes
    assert named in note


@pytest.mark.parametrize(("row", "named"), LOST)
def test_what_seems_an_image_is_noted_where_rows_are_said_to_be_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, row: dict[str, Any], named: str
) -> None:
    """Also a column that a reward function may read."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"model\.with_images"):
        prepared_without_images(tmp_path, row, config=SEES, **READS)
    model = {"path": str(tmp_path), "with_images": True}
    [note] = prepared_without_images(tmp_path, row, config=SEES, **READS, model=model).rows.notes
    assert named in note


@pytest.mark.parametrize("config", [SEES, {"model_type": "qwen2"}])
def test_an_image_in_markdown_is_noted_and_not_refused(tmp_path: Path, config: dict[str, Any]) -> None:
    [note] = prepared_without_images(tmp_path, {"prompt": "what is ![](7.png)?"}, config=config).rows.notes
    assert "1 of 3" in note
    assert "7.png" in note
    assert not prepared_without_images(tmp_path, {"prompt": "what is ![](7.txt)?"}, config=config).rows.notes


@pytest.mark.parametrize(("content", "count"), [
    ([{"type": "image"}, {"type": "text", "text": "<image>what?"}], 1), ("<image>what?", 0), ("what?", 0),
])  # fmt: skip
def test_a_place_that_stays_text_beside_an_image_is_noted(tmp_path: Path, content: Any, count: int) -> None:
    image_file(tmp_path / "red.png")
    prompt = [{"role": "user", "content": content}]
    notes = prepared_without_images(tmp_path, {"prompt": prompt, "image": "red.png"}, config=SEES).rows.notes
    assert len([note for note in notes if "<image>" in note]) == count


@pytest.mark.parametrize(("row", "named"), LOST)
def test_what_a_run_has_trained_on_as_text_is_noted_where_it_goes_on(
    tmp_path: Path, row: dict[str, Any], named: str
) -> None:
    [note] = prepared_without_images(tmp_path, row, config=SEES, goes_on=True).rows.notes
    assert named in note


def test_an_evaluation_refuses_what_seems_an_image_where_a_model_sees_images(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SEES))
    for row, is_refused in (({"prompt": "<image>what?"}, True), ({}, False)):
        data = str(write_rows(tmp_path / "rows.jsonl", [{**ASKED, **row}]))
        with pytest.raises(ValueError, match="<image>") if is_refused else nullcontext():
            prepare_evaluation(str(tmp_path), Asked(data=data))


def test_an_evaluation_of_a_model_takes_rows_that_are_said_to_be_text(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SEES))
    data = str(write_rows(tmp_path / "rows.jsonl", [{**ASKED, "prompt": "<image>what?"}]))
    found = prepare_evaluation(str(tmp_path), Asked(data=data, settings=("model.with_images=true",)))
    assert found.sampled is not None
    assert found.sampled.config.model.with_images


@pytest.mark.parametrize(("prompt", "asked", "count"), [
    ("<image>what?", {"data": "rows.jsonl"}, 1),
    ("what?", {"data": "rows.jsonl"}, 0),
    ("<image>what?", {"settings": ("generation.temperature=0.5",)}, 0),  # of its own rows the run has warned
])  # fmt: skip
def test_an_evaluation_of_a_run_warns_of_what_seems_an_image(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    prompt: str,
    asked: dict[str, Any],
    count: int,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(SEES))
    write_rows(tmp_path / "rows.jsonl", [{**ASKED, "prompt": prompt}])
    config = config_of({"method": "grpo", "model": {"path": str(tmp_path)}, "task": {"data": "rows.jsonl"}})
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text(dump_config(config))
    with pytest.raises(ValueError, match="no checkpoint"):  # which is looked for when rows have been read
        prepare_evaluation("run", Asked(**asked))
    assert capsys.readouterr().err.count("<image>") == count


def test_a_run_is_evaluated_with_the_class_of_its_training(tmp_path: Path) -> None:
    config = config_of({"method": "grpo", "task": {"name": "sort"}})
    (tmp_path / "config.yaml").write_text(dump_config(config))
    with pytest.raises(ValueError, match=r"model\.with_images is for a model"):
        prepare_evaluation(str(tmp_path), Asked(settings=("model.with_images=true",)))


def test_rows_that_are_trained_on_and_evaluated_are_counted_once(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    data = write_rows(tmp_path / "rows.jsonl", [{**ASKED, "prompt": f"<image>{i}", "system": "s"} for i in range(4)])
    task = {"data": str(data)}  # of which none are held out
    notes = prepare(config_of({"method": "grpo", "model": {"path": str(tmp_path)}, "task": task})).rows.notes
    assert [("4 of 4" in note, "system" in note) for note in notes] == [(True, True), (True, False)]
