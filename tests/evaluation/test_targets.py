"""What `tinyrl eval` is asked for, before any model is read: targets, rows, settings, and what nothing would read."""

import json
from pathlib import Path
from typing import Any

import pytest

from tinyrl.config.evaluated import measured_by
from tinyrl.config.recipe import dump_config
from tinyrl.config.schema import Config
from tinyrl.evaluation.prepared import prepare_evaluation
from tinyrl.evaluation.side import OwnSide
from tinyrl.evaluation.targets import Asked, Target, check_asked, find, find_side, trained_on
from tinyrl.runs import checkpoint as checkpoints
from tinyrl.runs.resolve import config_of
from tinyrl.runs.run_dir import TAKEN_NAMES

METHODS = ("grpo", "sft", "reward")
PAIRS = [{"prompt": f"say {n}", "completion": str(n), "chosen": "yes", "rejected": "no"} for n in range(40)]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder: rows, a reward, and a run of each method."""
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in PAIRS))
    Path("rewards.py").write_text("def size(prompts, completions, **columns): ...\ndef other(**columns): ...\n")
    for method in METHODS:
        run(method, method)
    return tmp_path


def run(name: str, method: str, **sections: Any) -> None:
    values = {"method": method, "task": {"data": "rows.jsonl", "system_prompt": "be brief"}, **sections}
    if method == "grpo":
        values |= {"reward": {"functions": [{"use": "rewards.py:other"}], "timeout_s": 7.0}}
    Path("runs", name).mkdir(parents=True)
    Path("runs", name, "config.yaml").write_text(dump_config(config_of(values)))


def sampled(path: str, asked: Asked) -> Config:
    return find(path, asked).config


def measured(path: str, asked: Asked | None = None) -> Config:
    config = find(path, asked or Asked()).measured
    assert config is not None
    return config


def test_a_run_is_sampled_or_measured_by_its_method() -> None:
    found = {name: find(f"runs/{name}", Asked()) for name in METHODS}
    assert found["grpo"].measured is found["sft"].sampled is found["reward"].sampled is None
    assert [measured(f"runs/{name}").method for name in ("sft", "reward")] == ["sft", "reward"]


def test_a_seed_is_called_by_the_folder_of_its_seeds_too() -> None:
    for path, name in (("runs/two/seed-1", "two/seed-1/step-000002"), ("runs/grpo", "grpo/step-000002")):
        assert Target(path, Path(path), None, checkpoint=Path(path) / "checkpoints/step-000002").name == name


def test_a_policy_and_a_reward_model_are_not_compared() -> None:
    for first, other in (("sft", "reward"), ("reward", "sft"), ("grpo", "reward")):
        with pytest.raises(ValueError, match=f"runs/{other}"):
            prepare_evaluation(f"runs/{first}", Asked(), vs=f"runs/{other}")


def test_text_is_sampled_too_where_something_judges() -> None:
    """Dropout is off outside training; a model that starts from nothing has nothing to stay near to."""
    run("dropout", "sft", lora={"dropout": 0.1})
    run("drawn", "sft", lora={"enabled": False}, model={"random_init": True})
    judged = Asked(settings=("reward.functions=[{use: rewards.py:size}]",))
    config = sampled("runs/sft", judged)
    assert measured("runs/sft", judged).method == "sft"
    assert (config.method, config.task.name, config.task.system_prompt) == ("grpo", "rows", "be brief")
    assert config.task.data == str(Path("rows.jsonl").absolute())
    assert config.reward.functions[0].use == f"{Path('rewards.py').absolute()}:size"
    dropout, drawn = (sampled(f"runs/{name}", Asked(task="sort")) for name in ("dropout", "drawn"))
    assert (dropout.lora.dropout, dropout.reference.kind, drawn.reference.kind) == (0.0, "auto", "none")


def test_a_reward_or_a_task_that_is_named_takes_the_place_of_the_run_s() -> None:
    config = sampled("runs/grpo", Asked(settings=("reward.model=owner/judge", "generation.temperature=0.5")))
    assert (config.reward.model, config.reward.functions, config.reward.timeout_s) == ("owner/judge", [], 7.0)
    assert config.generation.temperature == 0.5
    weighed = sampled("runs/grpo", Asked(settings=("reward.timeout_s=9",)))
    assert weighed.reward.functions[0].use.endswith("rewards.py:other")
    sort = sampled("runs/grpo", Asked(task="sort"))
    assert (sort.task.name, sort.task.data, sort.task.system_prompt) == ("sort", None, "be brief")
    assert sort.reward.is_verifier


def test_a_file_takes_the_place_of_the_held_out_rows() -> None:
    Path("more.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    more, asked = str(Path("more.jsonl").absolute()), Asked(data="more.jsonl")
    config = sampled("runs/grpo", asked)
    assert (config.task.data, config.task.eval_data) == (more, more)
    own = measured("runs/sft", asked)
    assert (own.task.data, own.task.eval_data) == (str(Path("rows.jsonl").absolute()), more)
    both = Asked(data="more.jsonl", task="rows")
    assert (sampled("runs/sft", both).task.eval_data, measured("runs/sft", both).task.eval_data) == (more, None)
    model = sampled("starter", asked)
    assert (model.task.name, model.task.eval_data, model.reference.kind) == ("rows", more, "none")


def test_rows_with_a_reference_answer_are_not_taken_for_answers_to_learn() -> None:
    Path("asked.jsonl").write_text('{"prompt": "a", "answer": "b"}\n' * 2)
    with pytest.raises(ValueError, match="--task rows"):
        prepare_evaluation("runs/sft", Asked(data="asked.jsonl"))


@pytest.mark.parametrize(
    ("path", "asked", "parts"),
    [
        ("runs/none", Asked(), "runs/none is not a run.*`runs/grpo`.*--task NAME"),
        ("runs/grpo", Asked(task="srot"), "task.name.*srot"),
        ("runs/grpo", Asked(settings=("model.path=x",)), "override 'model.path=x'"),
        ("runs/sft", Asked(settings=("generation.top_k=1",)), "runs/sft is a run of sft"),
        ("runs/reward", Asked(task="sort"), "runs/reward is a reward model"),
        ("runs/grpo", Asked(data="rows.jsonl", split="train"), "--data FILE.*--split train"),
        ("runs/sft", Asked(save_samples="s.jsonl"), "--save-samples.*runs/sft"),
        ("runs/sft", Asked(samples=2), "--samples 2: .*runs/sft"),
        ("runs/reward", Asked(samples=2), "--samples 2: .*runs/reward"),
        ("runs/grpo", Asked(save_samples="no/s.jsonl"), "--save-samples no/s.jsonl: there is no folder"),
    ],
)
def test_what_cannot_be_asked(path: str, asked: Asked, parts: str) -> None:
    with pytest.raises(ValueError, match=f"^{parts}"):
        check_asked(find(path, asked), asked)


def test_the_other_side_is_measured_on_the_rows_of_the_first() -> None:
    """A reward model reads them as it has learnt to read; a policy's are written as the first one's."""
    Path("else.jsonl").write_text("".join(json.dumps(row) + "\n" for row in PAIRS[:20]))
    task = {"data": "else.jsonl", "system_prompt": "at length"}
    run("other-reward", "reward", task=task, model={"path": "lookup"})
    run("other-sft", "sft", task=task, lora={"r": 4})
    for name, prompt in (("reward", "at length"), ("sft", "be brief")):
        config = measured_by(measured(f"runs/{name}"), measured(f"runs/other-{name}"))
        assert (config.task.data, config.task.system_prompt) == ("rows.jsonl", prompt)
        assert (config.model.path, config.lora.r) == (("lookup", 16) if name == "reward" else ("starter", 4))


def test_prompts_of_every_method_are_known_by_the_same_keys() -> None:
    found = [trained_on(f"runs/{method}") for method in METHODS]
    assert found[0] == found[1] == found[2]
    assert len(found[0]) == 36  # a tenth is held out
    assert trained_on("starter") == frozenset()


def test_no_run_may_be_called_as_a_side_is() -> None:
    assert {*OwnSide} <= {*TAKEN_NAMES}


@pytest.mark.parametrize("word", ["base", "start", "teacher"])
def test_a_word_for_a_model_of_the_run_is_refused_where_a_run_or_a_model_is_called_so_here(
    word: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find_side(word)
    Path(word).mkdir()
    find_side(word)  # a folder of something else
    Path(word, "config.json").touch()
    with pytest.raises(ValueError, match=f"./{word}"):
        find_side(word)
    run(word, "grpo")
    monkeypatch.chdir(folder / "runs")
    with pytest.raises(ValueError, match=f"./{word}"):
        prepare_evaluation("grpo", Asked(), vs=word)
    assert isinstance(find_side(f"./{word}"), Target)


def test_a_bad_row_to_evaluate_on_is_refused_before_a_model_is_loaded() -> None:
    Path("bad.jsonl").write_text('{"prompt": "a", "completion": "b"}\n{"completion": 3}\n')
    for name in ("sft", "grpo"):
        checkpoint = Path("runs", name, "checkpoints", "step-000001")
        checkpoint.mkdir(parents=True)
        (checkpoint / "adapter_config.json").write_text("{}")
        checkpoints.seal(checkpoint, 1)
        with pytest.raises(ValueError, match=r"bad\.jsonl:2"):
            prepare_evaluation(f"runs/{name}", Asked(data="bad.jsonl"))
