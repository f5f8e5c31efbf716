"""Images of rows: the forms that people have become one; images and places that are not equally many are refused."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from tests.images import BLUE, RED, cut_jpeg, image_cache, image_file, picture, png  # noqa: F401 a fixture
from tests.training.rows import write_rows
from tinyrl.data.image_files import ImageFiles
from tinyrl.data.image_rows import (
    markdown_image,
    placed_prompt,
    unshown_columns,
    with_images,
    with_parts,
    written_place,
)
from tinyrl.data.images import IMAGE_MARK, images_of
from tinyrl.data.messages import messages_of, prompt_of
from tinyrl.data.readers import Row
from tinyrl.data.sources import placed_rows

M = IMAGE_MARK
PART = {"type": "image"}
TEXT = {"type": "text", "text": "what?"}
DATA_URL = f"data:image/png;base64,{base64.b64encode(png(RED)).decode()}"
SOURCE = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(png(RED)).decode()}


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


@pytest.fixture
def files(tmp_path: Path, image_cache: Path) -> ImageFiles:  # noqa: F811
    """Return where `red.png` and `blue.png` are."""
    image_file(tmp_path / "red.png", RED)
    image_file(tmp_path / "blue.png", BLUE)
    return ImageFiles(tmp_path)


def shown(row: Row, files: ImageFiles, column: str = "prompt") -> list[Any]:
    """Return the contents of a row's messages, each with the colours of its images."""
    names = {files.image_of(f"{name}.png").sha256: name for name in ("red", "blue")}
    read = with_images(row, files)
    found = list[Any]()
    for message in messages_of(read[column], column):
        found.append(message["content"])
        found += [names[image["sha256"]] for image in message.get("images", [])]
    assert [names[image["sha256"]] for image in read["images"]] == [one for one in found if one in names.values()]
    return found


@pytest.mark.parametrize(("row", "contents"), [
    ({"prompt": [user([PART, TEXT])], "image": "red.png"}, [f"{M}what?", "red"]),  # TRL
    ({"prompt": [user([PART, TEXT])], "image": ["red.png"]}, [f"{M}what?", "red"]),
    ({"prompt": [user([TEXT, PART, TEXT, PART])], "images": ["red.png", "blue.png"]},
     [f"what?{M}what?{M}", "red", "blue"]),
    ({"prompt": [user("first"), user("then")], "images": ["red.png", "blue.png"]},
     [f"{M}{M}first", "red", "blue", "then"]),
    ({"prompt": "what?", "images": ["red.png"]}, [f"{M}what?", "red"]),
    ({"prompt": [{"role": "system", "content": "s"}, user("what?")], "image": "red.png"}, ["s", f"{M}what?", "red"]),
    ({"prompt": [user([{"type": "image_url", "image_url": {"url": DATA_URL, "detail": "low"}}, TEXT])]},  # OpenAI
     [f"{M}what?", "red"]),
    ({"prompt": [user([{"type": "input_image", "image_url": DATA_URL}])]}, [M, "red"]),
    ({"prompt": [user([{"type": "image", "image": "blue.png", "text": None}, TEXT])]}, [f"{M}what?", "blue"]),  # Qwen
    ({"prompt": "a <image> and <image>", "images": ["red.png", "blue.png"]}, [f"a {M} and {M}", "red", "blue"]),
    ({"prompt": [user("<image>\nwhat?")], "images": [{"bytes": png(RED), "path": "gone.png"}]},  # verl
     [f"{M}\nwhat?", "red"]),
    ({"prompt": [user([{**PART, "image": "red.png"}])], "images": ["red.png"]}, [M, "red"]),  # said twice
    ({"prompt": [user([{**PART, "source": SOURCE, "cache_control": {"type": "ephemeral"}}, TEXT])]},  # Anthropic
     [f"{M}what?", "red"]),
    ({"prompt": [user([PART, {"type": "text", "text": "a <image>?"}])], "image": "red.png"}, [f"{M}a <image>?", "red"]),
])  # fmt: skip
def test_forms_of_rows_become_one(files: ImageFiles, row: Row, contents: list[str]) -> None:
    assert shown(row, files) == contents


@pytest.mark.parametrize("column", ["messages", "conversations"])
def test_conversations_have_images_too(files: ImageFiles, column: str) -> None:
    turns: list[Any] = [user("<image>what?"), {"role": "assistant", "content": "an <image>"}, user("<image>?")]
    if column == "conversations":
        turns = [{"from": {"user": "human", "assistant": "gpt"}[t["role"]], "value": t["content"]} for t in turns]
    row = {column: turns, "images": ["blue.png", "red.png"]}
    assert shown(row, files, column) == [f"{M}what?", "blue", "an <image>", f"{M}?", "red"]


def test_a_row_that_was_read_is_read_alike(files: ImageFiles) -> None:
    row = {"prompt": [user([PART, TEXT])], "image": "red.png", "answer": "1"}
    read = with_images(row, files)
    assert json.loads(json.dumps(read)) == read == with_images(read, files)
    assert {*read} == {"prompt", "images", "answer"}


@pytest.mark.parametrize("row", [
    {"prompt": "an <image>"}, {"prompt": "an <image>", "images": []}, {"prompt": f"an {M}", "image": None},
    {"prompt": [user([TEXT])]}, {"messages": '[{"role": "user", "content": "an image"}]'}, {"prompt": 3, "x": None},
    {"prompt": [user("<|image_pad|>")], "images": ""},
])  # fmt: skip
def test_rows_of_text_stay_as_they_are(files: ImageFiles, row: Row) -> None:
    assert with_images(row, files) is row


@pytest.mark.parametrize(("row", "named"), [
    ({"prompt": [user([PART, PART])], "images": ["red.png"]}, "more places"),
    ({"prompt": [user([PART])]}, "names none"),
    ({"prompt": [user([PART])], "images": ["red.png", "blue.png"]}, "2 images.* 1 of"),
    ({"prompt": "<image>", "images": ["red.png", "blue.png"]}, "2 images.* 1 of"),
    ({"prompt": "<image><image>", "image": "red.png"}, "more places"),
    ({"prompt": [{"role": "system", "content": "s"}], "image": "red.png"}, "no message of the user"),
    ({"prompt": "a", "image": "red.png", "images": ["red.png"]}, "both"),
    ({"prompt": "a", "image": "gone.png"}, r"'image'.*gone\.png.*unused=image"),
    ({"prompt": f"a {M}", "image": "red.png"}, r"U\+FFFC"),
    ({"prompt": [user([PART, {"type": "text", "text": M}])], "image": "red.png"}, r"U\+FFFC"),
    ({"prompt": [user([PART, {"type": "video", "video": "a.mp4"}])], "image": "red.png"}, "'video'"),
    ({"prompt": [user([{**PART, "image": "red.png", "min_pixels": 4}])]}, "`min_pixels`"),
    ({"prompt": [user([{**PART, "image": "red.png", "text": "what?"}])]}, "`text`"),
    ({"prompt": [{**user("a"), "images": ["red.png"]}]}, "`images`"),
    ({"prompt": [user([{**PART, "image": "http://pictures.example/a.png"}])]}, r"task\.fetch_images"),
    ({"prompt": [user([{**PART, "source": {"type": "url", "url": "http://pictures.example/a.png"}}])]},
     r"task\.fetch_images"),
    ({"prompt": [user([{**PART, "source": {"type": "file", "file_id": "a"}}])]}, "base64 and url"),
    ({"prompt": "<|image_pad|>what?", "image": "red.png"}, r"<\|image_pad\|>.*write <image>"),
    ({"prompt": "<image><|image|>", "image": "red.png"}, r"<\|image\|>"),
    ({"prompt": [user([PART, {"type": "text", "text": "<IMG_CONTEXT>what?"}])], "image": "red.png"}, "<IMG_CONTEXT>"),
    ({"messages": [user("<start_of_image>what?"), {"role": "assistant", "content": "red"}], "image": "red.png"},
     "<start_of_image>"),
    ({"conversations": [{"from": "human", "value": "<img>a.png</img>what?"}], "image": "red.png"}, "<img>a.png</img>"),
])  # fmt: skip
def test_what_cannot_be_shown_is_refused(files: ImageFiles, row: Row, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        with_images(row, files)


@pytest.mark.parametrize(("row", "place"), [
    ({"prompt": "an <image>"}, "<image>"), ({"prompt": [user("an <image>")], "images": []}, "<image>"),
    ({"messages": '[{"role": "user", "content": "<image>"}]'}, "<image>"),
    ({"conversations": [{"from": "human", "value": "<image>"}]}, "<image>"), ({"chosen": [user("<image>")]}, "<image>"),
    ({"prompt": "<|vision_start|><|image_pad|><|vision_end|>what?"}, "<|image_pad|>"),
    ({"messages": [user("a"), user("<img>7.png</img>what?")]}, "<img>7.png</img>"),
    ({"prompt": "an image"}, None), ({"prompt": "a", "completion": "<image>"}, None), ({"text": "<image>"}, None),
    ({"prompt": "what is an <img> or <img src='7.png'>?"}, None), ({"prompt": "<svg><image href='a'/></svg>"}, None),
    ({"messages": [user("a"), {"role": "assistant", "content": "<image>"}]}, None),
])  # fmt: skip
def test_what_a_text_of_the_user_has_for_an_image(row: Row, place: str | None) -> None:
    assert written_place(row) == place


@pytest.mark.parametrize(("row", "file"), [
    ({"prompt": "what is ![a dot](dots/7.png)?"}, "dots/7.png"), ({"prompt": [user("![](data:image/png;base64,AA)")]},
                                                                  "data:image/png;base64,AA"),
    ({"messages": [user("![](a.txt) ![](http://pictures.example/7.PNG)")]}, "http://pictures.example/7.PNG"),
    ({"prompt": "wow![1](7.txt)"}, None), ({"prompt": "[a dot](7.png)"}, None),
    ({"messages": [user("a"), {"role": "assistant", "content": "![](7.png)"}]}, None),
])  # fmt: skip
def test_an_image_in_markdown(row: Row, file: str | None) -> None:
    assert markdown_image(row) == file


def test_a_placeholder_in_an_answer_beside_images_stays_text(files: ImageFiles) -> None:
    row = {"messages": [user("what?"), {"role": "assistant", "content": "<|image_pad|>"}], "image": "red.png"}
    assert shown(row, files, "messages") == [f"{M}what?", "red", "<|image_pad|>"]


def test_a_prompt_of_a_task_with_a_models_own_placeholder_is_refused_beside_images_of_its_row(
    files: ImageFiles,
) -> None:
    row = with_images({"question": "what?", "image": "red.png"}, files)
    with pytest.raises(ValueError, match=r"<\|image_pad\|>"):
        placed_prompt("<|image_pad|>what?", row, files)
    assert placed_prompt("<|image_pad|>what?", {"question": "what?"}, files) == "<|image_pad|>what?"


@pytest.mark.parametrize(("row", "columns"), [
    ({"image_path": "pictures/7.PNG"}, ["image_path"]), ({"Images": ["7.png"]}, ["Images"]),
    ({"picture": "data:image/png;base64,AAAA"}, ["picture"]), ({"picture": {"path": "7.jpg"}}, ["picture"]),
    ({"url": "https://pictures.example/7.webp"}, ["url"]), ({"pictures": [{"url": "7.gif"}]}, ["pictures"]),
    ({"multi_modal_data": {"image": ["7.png"]}}, ["multi_modal_data.image"]),
    ({"answer": "7.png", "images": ["7.png"], "id": "7.png", "unused": "7.png"}, []),
    ({"about": "see 7.png", "name": "png", "n": 7, "none": None, "list": [], "table": {"a": 1}}, []),
])  # fmt: skip
def test_a_column_that_names_images_and_is_shown_by_no_prompt(row: Row, columns: list[str]) -> None:
    assert unshown_columns({"prompt": "a.png", **row}) == columns


def test_a_message_has_as_many_marks_as_images(files: ImageFiles) -> None:
    entry = files.image_of("red.png").entry
    assert prompt_of([{**user(M), "images": [entry]}]) == [{**user(M), "images": [entry]}]
    assert prompt_of([user(M)]) == [user(M)]  # a character like others
    for message in ({**user("a"), "images": [entry]}, {**user(M), "images": ["red.png"]}, user([PART, TEXT])):
        with pytest.raises(ValueError, match="image"):
            prompt_of([message])


def test_a_prompt_of_a_task_takes_the_images_of_its_row(files: ImageFiles) -> None:
    row = with_images({"question": "what?", "image": "red.png"}, files)
    for prompt in ("what?", [user([PART, TEXT])], [user([{**PART, "image": row["images"][0]}, TEXT])]):
        assert placed_prompt(prompt, row, files) == [{**user(f"{M}what?"), "images": row["images"]}]
    assert placed_prompt("what?", {"question": "what?"}, files) == "what?"


def test_parts_are_those_of_the_places(files: ImageFiles) -> None:
    read = with_images({"prompt": [user([TEXT, PART, PART, TEXT]), user("a")], "images": ["red.png"] * 2}, files)
    assert with_parts(read["prompt"]) == [user([TEXT, PART, PART, TEXT]), user("a")]
    assert len(images_of(read["prompt"])) == 2


# ---- files of rows ----


def test_a_bad_image_is_refused_with_the_place_of_its_row(files: ImageFiles) -> None:
    rows = [{"prompt": "a", "image": "red.png"}, {"prompt": "a", "image": "gone.png"}]
    data = write_rows(files.base / "rows.jsonl", rows)
    with pytest.raises(ValueError, match=r"rows\.jsonl:2: .*gone\.png"):
        placed_rows(str(data))
    assert len(placed_rows(str(data), most=1)) == 1


def test_a_jpeg_that_was_cut_off_is_refused_with_the_place_of_its_row(files: ImageFiles) -> None:
    (files.base / "cut.jpg").write_bytes(cut_jpeg())
    rows = [{"prompt": "a", "image": "red.png"}, {"prompt": "a", "image": "cut.jpg"}]
    with pytest.raises(ValueError, match=r"rows\.jsonl:2: .*cut\.jpg.*truncated"):
        placed_rows(str(write_rows(files.base / "rows.jsonl", rows)))


def test_a_csv_has_paths(files: ImageFiles) -> None:
    (files.base / "a.csv").write_text('q,images\nwhat?,"[""red.png"", ""blue.png""]"\nwhat?,red.png\n')
    first, second = (row for _, row in placed_rows(str(files.base / "a.csv"), columns={"prompt": "q"}))
    assert first["prompt"][0]["content"] == f"{M}{M}what?"
    assert second["prompt"][0]["content"] == f"{M}what?"


def test_a_parquet_file_has_bytes(files: ImageFiles) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = [{"prompt": [user("<image>what?")], "pictures": [{"bytes": png(BLUE), "path": None}]}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), str(files.base / "a.parquet"))
    [(_, row)] = placed_rows(str(files.base / "a.parquet"), columns={"images": "pictures"})
    assert row["images"][0]["sha256"] == files.image_of("blue.png").sha256


@pytest.mark.parametrize("decode", [True, False])
def test_a_saved_data_set_has_its_images(files: ImageFiles, decode: bool) -> None:
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({"prompt": datasets.Value("string"), "image": datasets.Image(decode=decode)})
    rows = [{"prompt": "a", "image": picture(RED)}, {"prompt": "b", "image": {"bytes": png(BLUE), "path": None}}]
    datasets.Dataset.from_list(rows, features=features).save_to_disk(str(files.base / "saved"))
    read = [row for _, row in placed_rows(str(files.base / "saved"))]
    assert read[1]["images"][0]["sha256"] == files.image_of("blue.png").sha256
    assert [row["prompt"][0]["content"] for row in read] == [f"{M}a", f"{M}b"]
