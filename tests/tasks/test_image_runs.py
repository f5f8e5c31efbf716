"""Rows with images as runs read them: which methods take them, and that prompts are told apart by their images."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.images import BLUE, RED, image_cache, image_file, picture  # noqa: F401 a fixture
from tests.running import rows_for
from tests.training.rows import write_rows
from tinyrl.api import overrides_from
from tinyrl.data.formats import shared_prompt, text_examples
from tinyrl.data.images import IMAGE_MARK, images_of
from tinyrl.data.kinds import Texts
from tinyrl.data.readers import Row
from tinyrl.data.rows import fingerprint, fingerprints, prompt_key, prompt_keys, row_key, train_eval_split
from tinyrl.data.sources import placed_rows
from tinyrl.evaluation.targets import trained_on
from tinyrl.runs.resolve import config_of
from tinyrl.runs.run_dir import RunDir
from tinyrl.tasks.run_rows import RunRows, row_texts, shared_by_splits, text_rows

ASKED = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what?"}]}]
ANSWERED = [*ASKED, {"role": "assistant", "content": "red"}]
OTHER = [*ASKED, {"role": "assistant", "content": "blue"}]


def write(folder: Path, rows: list[Row]) -> Path:
    """Write rows beside `red.png` and `blue.png`."""
    image_file(folder / "red.png", RED)
    image_file(folder / "blue.png", BLUE)
    return write_rows(folder / "rows.jsonl", rows)


def read(data: Path, method: str = "grpo", **sections: Any) -> RunRows:
    task = {"name": "rows", "data": str(data), "eval_data": str(data)}
    return rows_for(config_of({"method": method, "task": task, **sections}))


def two_pictures(folder: Path) -> tuple[Row, Row]:
    """Return two rows that are equal but for their pictures, of equal size."""
    data = write(folder, [{"prompt": ASKED, "image": name, "answer": "x"} for name in ("red.png", "blue.png")])
    red, blue = (row for _, row in placed_rows(str(data)))
    return red, blue


# ---- which methods take them ----


@pytest.mark.parametrize(("method", "row"), [
    ("grpo", {"prompt": ASKED, "answer": "red"}), ("sft", {"messages": ANSWERED}),
    ("sft", {"prompt": "what?", "completion": "red"}), ("dpo", {"prompt": "what?", "chosen": "x", "rejected": "y"}),
    ("dpo", {"prompt": ASKED, "chosen": ANSWERED[1:], "rejected": OTHER[1:]}),
    ("dpo", {"chosen": ANSWERED, "rejected": OTHER}), ("reward", {"chosen": ANSWERED, "rejected": OTHER}),
    ("dpo", {"prompt": ASKED, "chosen": "x", "rejected": "y"}), ("reward", {"messages": ANSWERED, "label": 1}),
    ("sft", {"prompt": ASKED, "completion": ANSWERED[1:]}),
])  # fmt: skip
def test_prompts_and_texts_take_images_in_prompts(tmp_path: Path, method: str, row: Row) -> None:
    found = read(write(tmp_path, [{**row, "image": "red.png"}]), method)
    assert found.has_images
    [first, *_] = found.train
    prompt = text_examples(first)[0].prompt if method == "sft" else found.kind.prompt(first)
    assert [image.path for image in images_of(prompt)] == [str(tmp_path / "red.png")]


def test_a_run_of_text_has_no_images(tmp_path: Path) -> None:
    assert not read(write(tmp_path, [{"prompt": "a", "answer": "x", "image": None}])).has_images


PAIR = {"prompt": "a", "chosen": "x", "rejected": "y"}
BOTH = [{"role": "user", "content": "a"}, {"role": "assistant", "content": [{"type": "image", "image": "red.png"}]}]


@pytest.mark.parametrize(("method", "row", "named"), [
    ("dpo", {"chosen": BOTH, "rejected": [BOTH[0], {"role": "assistant", "content": "y"}]}, "answer has an image"),
    ("reward", {"messages": BOTH, "label": 1}, "answer has an image"),
    ("dpo", {"prompt": "a", "chosen": BOTH, "rejected": BOTH[:1]}, "chosen"),
    ("dpo", {"chosen": "a x", "rejected": "a y", "image": "red.png"}, "shows none"),
    ("sft", {"messages": BOTH}, "answer to learn"), ("sft", {"prompt": "a", "completion": BOTH[1:]}, "answer to learn"),
    ("sft", {"prompt": ASKED, "image": "red.png", "completion": BOTH[1:]}, "answer to learn"),
    ("sft", {"text": "x", "image": "red.png"}, "none of them is before an answer"),
])  # fmt: skip
def test_images_elsewhere_are_refused_by_row(tmp_path: Path, method: str, row: Row, named: str) -> None:
    labelled = {"messages": [BOTH[0], {"role": "assistant", "content": "x"}], "label": 0}
    good = {"dpo": PAIR, "reward": labelled}.get(method, {"prompt": "a", "completion": "x"})
    with pytest.raises(ValueError, match=rf"rows\.jsonl:2: .*{named}"):
        read(write(tmp_path, [good, row]), method)


def test_images_are_not_learnt_with_their_prompts(tmp_path: Path) -> None:
    data = write(tmp_path, [{"messages": ANSWERED, "image": "red.png"}])
    with pytest.raises(ValueError, match=r"rows\.jsonl:1: .*sft\.loss_on"):
        read(data, "sft", sft={"loss_on": "all"})


def test_text_beside_ppo_has_images_before_an_answer_only(tmp_path: Path) -> None:
    data = write(tmp_path, [{"messages": ANSWERED, "image": "red.png"}, {"messages": BOTH}])
    config = config_of({"method": "ppo", "ppo": {"ptx_data": str(data), "ptx_coef": 1.0}})
    with pytest.raises(ValueError, match=r"rows\.jsonl:2: .*answer to learn"):
        text_rows(config)
    data.write_text(data.read_text().splitlines()[0])
    assert RunRows(train=[], held_out=[], kind=Texts(), notes=[], text=text_rows(config)).has_images


def test_a_task_that_shows_no_images_is_refused(tmp_path: Path) -> None:
    data = write(tmp_path, [{"question": "what?", "answer": "a\n#### 1", "image": "red.png"}])
    task = {"name": "gsm8k", "data": str(data), "eval_data": str(data)}
    with pytest.raises(ValueError, match=r"rows\.jsonl:1: .*gsm8k.*images"):
        rows_for(config_of({"method": "grpo", "task": task}))


# ---- where rows come from ----


def test_rows_of_the_python_api_have_objects_of_pil(tmp_path: Path, image_cache: Path) -> None:  # noqa: F811
    rows = [{"prompt": ASKED, "images": [picture(color)], "answer": "x"} for color in (RED, BLUE)]
    [_, _, data] = overrides_from({}, None, rows, inputs=tmp_path)
    found = read(Path(data.partition("=")[2]))
    assert len({row_key(row) for row in found.train}) == 2
    assert all(Path(row["images"][0]["path"]).is_relative_to(image_cache) for row in found.train)


TASK = """
from pathlib import Path
from tinyrl.tasks import Task
RED = str(Path(__file__).parent / "red.png")
part = {"type": "image", "image": "blue.png"}
text = {"type": "text", "text": "what?"}
TASK = Task(
    name="pictures", columns=(),
    rows=lambda split: [{"number": 1, "image": "red.png"}, {"number": 2}],
    prompt=lambda row: [{"role": "user", "content": [part, text] if row["number"] == 2 else [{"type": "image"}, text]}],
)
"""


def test_a_task_of_ones_own_may_return_messages_with_images(tmp_path: Path) -> None:
    write(tmp_path, [])
    (tmp_path / "own.py").write_text(TASK)
    task = {"name": f"{tmp_path / 'own.py'}:TASK"}
    rows = rows_for(config_of({"method": "grpo", "task": task}))
    first, second = (rows.kind.prompt(row) for row in rows.train)
    assert first[0]["content"] == second[0]["content"] == f"{IMAGE_MARK}what?"
    assert [images_of(prompt)[0].path for prompt in (first, second)] == [
        str(tmp_path / name) for name in ("red.png", "blue.png")
    ]
    assert [row["images"] for row in rows.train] == [prompt[0]["images"] for prompt in (first, second)]
    assert rows.has_images


def test_prompts_that_are_listed_show_an_image_and_leave_a_texts_own_characters(tmp_path: Path) -> None:
    own = f"{IMAGE_MARK} in a text"
    data = write(tmp_path, [{"prompt": ASKED, "image": "red.png", "answer": "x"}, {"prompt": own, "answer": "y"}])
    config = config_of({"method": "grpo", "task": {"name": "rows", "data": str(data), "eval_data": str(data)}})
    run = RunDir(tmp_path / "run")
    run.path.mkdir()
    (run.path / "config.yaml").write_text(yaml.safe_dump(config.model_dump()))
    keys = {place: row_key(row) for place, row in enumerate(rows_for(config).train)}
    notes = list[str]()
    assert sorted(row_texts(run, keys, notes).values()) == ["[image]what?", own]
    assert notes == []


# ---- identity ----


def test_keys_of_prompts_and_rows_tell_pictures_apart(tmp_path: Path) -> None:
    red, blue = two_pictures(tmp_path)
    assert prompt_key(red["prompt"]) != prompt_key(blue["prompt"])
    assert prompt_keys(red["prompt"], system_prompt="s").isdisjoint(prompt_keys(blue["prompt"], system_prompt="s"))
    assert row_key(red) != row_key(blue)
    assert fingerprint([red]) != fingerprint([blue])


def test_fingerprints_of_a_run_name_the_images(tmp_path: Path) -> None:
    red, blue = two_pictures(tmp_path)
    before, after = fingerprints([red], [red]), fingerprints([blue], [red])
    assert [name for name in before if before[name] != after[name]] == ["training", "images of the training"]
    assert fingerprints([{"prompt": "a"}], []).keys() == {"training", "held-out"}


def test_a_picture_elsewhere_is_the_same_prompt_and_row(tmp_path: Path) -> None:
    red, _ = two_pictures(tmp_path / "before")
    shutil.move(tmp_path / "before", tmp_path / "after")
    moved = placed_rows(str(tmp_path / "after" / "rows.jsonl"))[0][1]
    assert moved["images"] != red["images"]
    assert (prompt_key(moved["prompt"]), row_key(moved)) == (prompt_key(red["prompt"]), row_key(red))


def test_one_question_on_many_pictures_is_split_by_picture(tmp_path: Path) -> None:
    rows = list[Row]()
    for shade in range(20):
        image_file(tmp_path / f"{shade}.png", (shade, 0, 0))
        rows.append({"prompt": ASKED, "image": f"{shade}.png", "answer": "x"})
    read_rows = [row for _, row in placed_rows(str(write_rows(tmp_path / "rows.jsonl", rows)))]
    train, held_out = train_eval_split(read_rows, prompt=shared_prompt, seed=0)
    assert (len(train), len(held_out)) == (18, 2)


def test_held_out_pictures_are_not_those_trained_on(tmp_path: Path) -> None:
    red, blue = two_pictures(tmp_path)
    kind = read(tmp_path / "rows.jsonl").kind
    assert shared_by_splits([red], [blue], kind, system_prompt=None) == []
    assert len(shared_by_splits([red], [red], kind, system_prompt=None)) == 1


def test_a_comparison_leaves_out_only_the_pictures_that_were_trained_on(tmp_path: Path) -> None:
    red, blue = two_pictures(tmp_path / "rows")
    data = write(tmp_path / "trained", [{"prompt": ASKED, "image": "red.png", "answer": "x"}])
    config = config_of({"method": "grpo", "task": {"name": "rows", "data": str(data), "eval_data": str(data)}})
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text(yaml.safe_dump(config.model_dump()))
    seen = trained_on(str(run))
    keys = [prompt_keys(row["prompt"], system_prompt=None) for row in (red, blue)]
    assert [seen.isdisjoint(found) for found in keys] == [False, True]
