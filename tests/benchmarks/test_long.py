"""Long texts: both steps learn texts of the lengths that the table names, in the order of their file."""

import json
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import long
from benchmarks.__main__ import parse
from benchmarks.given import given_completions
from benchmarks.rewards import zero_and_one
from benchmarks.work import SIZES, build, read_rows
from tests import running
from tinyrl.data.rows import batch_indices
from tinyrl.models.loading import load_tokenizer
from tinyrl.runs.resolve import config_of

SHAPE = replace(SIZES["xs"], early_ends=False)
LENGTH = 200
OPTIONS = Namespace(steps=2, threads=1, set=[])


@pytest.fixture
def files(tmp_path: Path) -> Path:
    build(SHAPE, tmp_path / "model")
    return tmp_path


def test_texts_have_their_length_with_prompt_and_eos_and_the_warm_up_is_first(files: Path):
    name = long.prepare_texts(files, SHAPE, LENGTH)
    tokenizer = load_tokenizer(str(files / "model"))

    def count(text: str) -> int:
        ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]  # pyright: ignore
        return len(ids)

    rows = read_rows(files / f"{name}.jsonl")
    assert [count(row["prompt"]) + count(row["completion"]) + 1 for row in rows] == [long.WARM_UP, LENGTH]
    groups = read_rows(files / f"{name}.given.jsonl")
    for group, length in zip(groups, (long.WARM_UP, LENGTH, long.WARM_UP), strict=True):
        assert [count(group["prompt"]) + len(ids) for ids in group["completions"]] == [length, length]
        assert group["completions"][0] != group["completions"][1]
    assert [batch_indices(long.SEED, step, num_prompts=1, num_rows=2) for step in range(2)] == [[0], [1]]


@pytest.mark.parametrize("method", long.METHODS)
def test_a_step_learns_the_given_texts(method: str, files: Path):
    """A text of SFT and two completions of GRPO, prompt aside; these are not sampled, and the model moves."""
    name = long.prepare_texts(files, SHAPE, LENGTH)
    question = long.our_question(files, name, method=method, length=LENGTH, dtype="float32", options=OPTIONS)
    settings = config_of(question["recipe"])
    with given_completions(files / f"{name}.given.jsonl"):
        code, run, _ = running.train(settings, files)
    assert code == 0
    steps = [line for line in running.metrics(run) if "completion/tokens" in line]
    groups = read_rows(files / f"{name}.given.jsonl")[:2]
    texts = 1 if method == "sft" else 2
    lengths = [sum(len(ids) for ids in group["completions"][:texts]) for group in groups]
    assert [step["completion/tokens"] for step in steps] == lengths
    assert all(step["optim/grad_norm"] > 0 for step in steps)


def test_positions_are_raised_to_the_texts_and_never_lowered(tmp_path: Path):
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 8192, "hidden_size": 576}')
    long.raise_positions(tmp_path, 2048)
    assert json.loads((tmp_path / "config.json").read_text()) == {"max_position_embeddings": 8192, "hidden_size": 576}
    long.raise_positions(tmp_path, 16384)
    assert json.loads((tmp_path / "config.json").read_text())["max_position_embeddings"] == 32768


def test_a_side_that_did_not_run_is_a_dash():
    assert long.cells({"peak_mb": 1500.0, "imports_mb": 400.0, "cpu": [3.0, 1.0, 2.0]}) == ["1.10", "2.0"]
    assert long.cells(None) == ["-", "-"]


def test_rewards_of_a_group_of_two_differ():
    assert zero_and_one(["a"] * 4, ["b"] * 4) == [0.0, 1.0, 0.0, 1.0]


def test_lengths_of_the_peer_are_all_unless_named():
    words = ["long", "--peer-python", "python", "--lengths", "2048", "4096"]
    assert parse(words).peer_lengths is None
    assert parse([*words, "--peer-lengths", "2048"]).peer_lengths == [2048]
    assert parse([*words, "--peer-lengths"]).peer_lengths == []
