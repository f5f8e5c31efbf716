"""A marked setting: absolute paths, checks before torch, hashes of a resume and masked URLs follow from the mark."""

from pathlib import Path
from typing import Annotated, Any

import pytest
from pydantic import Field

from tinyrl.config.marks import Names
from tinyrl.config.schema import Config, without_secrets
from tinyrl.config.sections import Section
from tinyrl.rollout.preflight import check_named
from tinyrl.runs.resolve import absolute_paths, config_of, resolve
from tinyrl.tasks import task_of
from tinyrl.training.changes import ChangedInput, changed_sources
from tinyrl.training.inputs import named_inputs, read_sources

SECRET = "http://me:pw@127.0.0.1:1/?key=abc"
TASK = "from tinyrl.tasks import Task\nTASK = Task('mine', rows=lambda split: [{'prompt': 'a'}])\n"


class Item(Section):
    code: Annotated[str, Names("code", "none")]


class New(Section):
    """A section as somebody would add it: a field of each kind, and two lists."""

    model: Annotated[str | None, Names("model")] = None
    rows: Annotated[str | None, Names("rows")] = None
    code: Annotated[str | None, Names("code")] = None
    server: Annotated[str | None, Names("server")] = None
    file: Annotated[str | None, Names("file")] = None
    made: Annotated[str | None, Names("file", made=True)] = None  # by runs, which change it
    items: list[Item] = Field(default_factory=list)
    files: list[Annotated[str, Names("file")]] = Field(default_factory=list)


class Wider(Config):
    new: New = Field(default_factory=New)


GIVEN: dict[str, Any] = {
    "model": "base", "rows": "rows.jsonl", "code": "mine.py:f", "server": SECRET, "file": "a.txt", "made": "made.txt",
    "items": [{"code": "item.py:f"}, {"code": "none"}], "files": ["b.txt"],
}  # fmt: skip


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with all that GIVEN names."""
    monkeypatch.chdir(tmp_path)
    Path("base").mkdir()
    Path("base/config.json").write_text("{}")
    Path("rows.jsonl").write_text('{"prompt": "a"}\n')
    for name in ("a.txt", "b.txt", "made.txt"):
        Path(name).write_text("x")
    for name in ("mine.py", "item.py"):
        Path(name).write_text("def f(): ...\n")
    Path("task.py").write_text(TASK)
    return tmp_path


def check_names(config: Config) -> None:
    check_named(config, task_of(config))


def wider(**new: Any) -> Wider:
    return Wider.model_validate({"method": "grpo", "task": {"name": "sort"}, "new": GIVEN | new})


def hashed(config: Config) -> set[str]:
    return {*read_sources(named_inputs(config), rows={}, known={}).files}


def test_every_kind_becomes_absolute_where_it_is_a_file(folder: Path):
    values = absolute_paths(wider().model_dump(), schema=Wider)
    assert values["new"] == {
        "model": f"{folder}/base",
        "rows": f"{folder}/rows.jsonl",
        "code": f"{folder}/mine.py:f",
        "server": SECRET,
        "file": f"{folder}/a.txt",
        "made": f"{folder}/made.txt",
        "items": [{"code": f"{folder}/item.py:f"}, {"code": "none"}],
        "files": [f"{folder}/b.txt"],
    }


def test_names_of_the_hub_and_of_modules_stay():
    names = {"model": "owner/base", "rows": "owner/rows", "code": "package.module:f"}
    assert absolute_paths({"new": names}, schema=Wider) == {"new": names}


@pytest.mark.parametrize(
    ("new", "label"),
    [
        ({"model": "./gone"}, "new.model"),
        ({"rows": "gone.jsonl"}, "gone.jsonl"),
        ({"code": "gone.py:f"}, "new.code"),
        ({"code": "mine.py"}, "new.code"),
        ({"server": "127.0.0.1"}, "new.server"),
        ({"file": "gone.txt"}, "new.file"),
        ({"items": [{"code": "item.py:g"}]}, "new.items: code"),
        ({"files": ["a.txt", "gone.txt"]}, "new.files"),
    ],
)
def test_every_kind_is_looked_for_before_torch(new: dict[str, Any], label: str):
    check_names(wider())
    with pytest.raises(ValueError, match=label):
        check_names(wider(**new))


def test_every_file_of_every_kind_but_rows_and_what_runs_make_is_hashed(folder: Path):
    found = {name for name in hashed(wider()) if name.startswith("new.")}
    assert found == {
        "new.model: config.json", "new.file: a.txt", "new.files: b.txt",
        "new.code: mine.py", "new.items: item.py",
    }  # fmt: skip


def test_a_url_is_masked_and_nothing_else():
    masked = {**GIVEN, "server": "http://***@127.0.0.1:1/?key=***"}
    assert wider().written()["new"] == masked
    assert without_secrets({"new": GIVEN}, schema=Wider) == {"new": masked}


def test_values_that_another_version_wrote_stay():
    odd: dict[str, Any] = {"new": {"model": 3, "items": "text", "files": None, "gone": "x"}, "other": 1}
    assert absolute_paths(odd, schema=Wider) == odd


# ---- what people set ----


def test_an_own_task_is_a_file_like_a_reward(folder: Path):
    config = resolve(config_of({"method": "grpo", "task": {"name": "task.py:TASK"}}))
    assert config.task.name == f"{folder}/task.py:TASK"
    first = read_sources(named_inputs(config), rows={}, known={})
    Path("task.py").write_text(TASK + "# another verifier\n")
    now = read_sources(named_inputs(config), rows={}, known={})
    assert changed_sources(first, now) == [ChangedInput(f"task.name: {folder}/task.py", "has changed")]


def test_a_shipped_task_is_no_file():
    assert not any(name.startswith("task.") for name in hashed(config_of({"method": "grpo"})))


def test_a_teacher_s_address_is_masked():
    values = {"method": "distill", "teacher": {"path": SECRET}}
    assert config_of(values).written()["teacher"]["path"] == "http://***@127.0.0.1:1/?key=***"


def test_a_word_is_no_folder_of_that_name(folder: Path):
    for word in ("self", "elsewhere"):
        Path(word).mkdir()
    values = {"teacher": {"path": "self"}, "environment": {"name": "search"}}
    assert absolute_paths(values) == values
    assert absolute_paths({"teacher": {"path": "elsewhere"}}) == {"teacher": {"path": f"{folder}/elsewhere"}}


def test_a_judge_s_cache_need_not_exist_and_its_rubric_must():
    judge = {"use": "judge", "url": "http://127.0.0.1:1/v1", "model": "m", "rubric": "a.txt", "cache": "gone.sqlite"}
    values: dict[str, Any] = {"method": "grpo", "task": {"name": "sort"}, "reward": {"functions": [judge]}}
    config = config_of(values)
    check_names(config)
    assert {name for name in hashed(config) if name.startswith("reward.")} == {"reward.functions: a.txt"}
    judge["rubric"] = "gone.txt"
    with pytest.raises(ValueError, match=r"rubric=gone\.txt"):
        check_names(config_of(values))


def test_a_setting_that_does_not_count_is_not_looked_for():
    teacher = {"path": "./gone"}
    check_names(config_of({"method": "grpo", "task": {"name": "sort"}, "teacher": teacher}))
    counted = {"method": "grpo", "task": {"name": "sort"}, "teacher": {**teacher, "kl_coef": 0.1}}
    with pytest.raises(ValueError, match=r"teacher\.path"):
        check_names(config_of(counted))


def test_rows_are_compared_as_they_were_read():
    first = read_sources(named_inputs(wider()), rows={"training": "a"}, known={})
    Path("rows.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    assert changed_sources(first, read_sources(named_inputs(wider()), rows={"training": "a"}, known={})) == []
    now = read_sources(named_inputs(wider()), rows={"training": "b"}, known={})
    assert changed_sources(first, now) == [ChangedInput("training rows", "have changed")]
