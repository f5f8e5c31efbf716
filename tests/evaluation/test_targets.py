"""What `tinyrl eval` is asked for, before any model is read: targets, rows, settings, and what nothing would read."""

import json
from pathlib import Path
from typing import Any

import pytest

from tinyrl.config.recipe import dump_config
from tinyrl.config.schema import Config
from tinyrl.evaluation.targets import Asked, check_asked, find, measured_by, prompt_keys, trained_on

PAIRS = [{"prompt": f"say {n}", "completion": str(n), "chosen": "yes", "rejected": "no"} for n in range(40)]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder: rows, a reward, and a run of each method."""
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in PAIRS))
    Path("rewards.py").write_text("def size(prompts, completions, **columns): ...\ndef other(**columns): ...\n")
    for method in ("grpo", "sft", "reward"):
        run(method, method)
    return tmp_path


def run(name: str, method: str, **sections: Any) -> None:
    values = {"method": method, "task": {"data": "rows.jsonl", "system_prompt": "be brief"}, **sections}
    if method == "grpo":
        values |= {"reward": {"functions": [{"use": "rewards.py:other"}], "timeout_s": 7.0}}
    Path("runs", name).mkdir(parents=True)
    Path("runs", name, "config.yaml").write_text(dump_config(Config.model_validate(values)))


def test_a_run_is_evaluated_as_it_is() -> None:
    target = find("runs/grpo", Asked())
    assert target.sampled is not None
    assert target.sampled.reward.functions[0].use == "rewards.py:other"
    assert target.measured is None


def test_text_and_pairs_are_measured_and_sampled_only_where_something_judges() -> None:
    for name in ("sft", "reward"):
        target = find(f"runs/{name}", Asked())
        assert target.sampled is None
        assert target.measured is not None
        assert target.measured.method == name
    judged = find("runs/sft", Asked(settings=("reward.functions=[{use: rewards.py:size}]",)))
    assert judged.measured is not None
    assert judged.sampled is not None
    assert (judged.sampled.method, judged.sampled.task.name) == ("grpo", "rows")
    assert judged.sampled.task.data == str(Path("rows.jsonl").absolute())
    assert judged.sampled.task.system_prompt == "be brief"
    assert judged.sampled.reward.functions[0].use == f"{Path('rewards.py').absolute()}:size"


def test_a_policy_with_dropout_or_drawn_weights_can_be_sampled() -> None:
    """Dropout is off outside training; a model that starts from nothing has nothing to stay near to."""
    run("dropout", "sft", lora={"dropout": 0.1})
    run("drawn", "sft", lora={"enabled": False}, model={"random_init": True})
    dropout, drawn = (find(f"runs/{name}", Asked(task="sort")).sampled for name in ("dropout", "drawn"))
    assert dropout is not None
    assert drawn is not None
    assert dropout.lora.dropout == 0.0
    assert (dropout.reference.kind, drawn.reference.kind) == ("auto", "none")


def test_a_reward_that_is_named_takes_the_place_of_the_runs() -> None:
    sampled = find("runs/grpo", Asked(settings=("reward.model=owner/judge", "generation.temperature=0.5"))).sampled
    assert sampled is not None
    assert (sampled.reward.model, sampled.reward.functions) == ("owner/judge", [])
    assert sampled.reward.timeout_s == 7.0
    assert sampled.generation.temperature == 0.5
    weighed = find("runs/grpo", Asked(settings=("reward.timeout_s=9",))).sampled
    assert weighed is not None
    assert weighed.reward.functions[0].use.endswith("rewards.py:other")


def test_another_task_brings_its_own_rows_and_verifier() -> None:
    sampled = find("runs/grpo", Asked(task="sort")).sampled
    assert sampled is not None
    assert (sampled.task.name, sampled.task.data, sampled.task.system_prompt) == ("sort", None, "be brief")
    assert sampled.reward.is_verifier


def test_a_file_takes_the_place_of_the_held_out_rows() -> None:
    Path("more.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    more = str(Path("more.jsonl").absolute())
    sampled = find("runs/grpo", Asked(data="more.jsonl")).sampled
    assert sampled is not None
    assert (sampled.task.data, sampled.task.eval_data) == (more, more)
    measured = find("runs/sft", Asked(data="more.jsonl")).measured
    assert measured is not None
    assert (measured.task.data, measured.task.eval_data) == (str(Path("rows.jsonl").absolute()), more)
    both = find("runs/sft", Asked(data="more.jsonl", task="rows"))
    assert both.sampled is not None
    assert both.measured is not None
    assert (both.sampled.task.eval_data, both.measured.task.eval_data) == (more, None)
    model = find("starter", Asked(data="more.jsonl")).sampled
    assert model is not None
    assert (model.task.name, model.task.eval_data, model.reference.kind) == ("rows", more, "none")


@pytest.mark.parametrize(
    ("path", "asked", "sentence"),
    [
        (
            "runs/none",
            Asked(),
            "runs/none is not a run. Did you mean `runs/grpo`? To evaluate a model, say what on: --task NAME",
        ),
        ("runs/grpo", Asked(task="srot"), "task.name: there is no task 'srot'. Did you mean `sort`?"),
        ("runs/grpo", Asked(settings=("model.path=x",)), "override 'model.path=x': settings of"),
        ("runs/grpo", Asked(settings=("task.data=x",)), "override 'task.data=x': say it as --data FILE"),
        ("runs/grpo", Asked(settings=("task.name=sort",)), "override 'task.name=sort': say it as --task NAME"),
        ("runs/grpo", Asked(settings=("reward.modle=x",)), "override 'reward.modle=x': unknown key `reward.modle`"),
        ("runs/grpo", Asked(settings=("reward.model",)), "override 'reward.model' is not of the form section.key="),
        ("runs/sft", Asked(settings=("generation.top_k=1",)), "runs/sft is a run of sft, which is sampled where"),
        ("runs/reward", Asked(task="sort"), "runs/reward is a reward model, which writes nothing that could be"),
        ("runs/reward", Asked(settings=("generation.top_k=1",)), "runs/reward is a reward model, which writes"),
    ],
)
def test_what_cannot_be_asked(path: str, asked: Asked, sentence: str) -> None:
    with pytest.raises(ValueError, match=r"\S") as caught:
        find(path, asked)
    assert str(caught.value).startswith(sentence)


@pytest.mark.parametrize(
    ("path", "asked", "sentence"),
    [
        ("runs/grpo", Asked(data="rows.jsonl", split="train"), "--data FILE says which rows; --split train"),
        ("runs/sft", Asked(save_samples="s.jsonl"), "--save-samples: nothing is sampled from runs/sft; name a task"),
        ("runs/reward", Asked(save_samples="s.jsonl"), "--save-samples: nothing is sampled from runs/reward; a rewa"),
        ("runs/grpo", Asked(save_samples="no/s.jsonl"), "--save-samples no/s.jsonl: there is no folder no"),
    ],
)
def test_options_that_nothing_reads(path: str, asked: Asked, sentence: str) -> None:
    with pytest.raises(ValueError, match=r"\S") as caught:
        check_asked(find(path, asked), asked)
    assert str(caught.value).startswith(sentence)


def test_a_policy_and_a_reward_model_have_no_number_in_common() -> None:
    sft, reward = find("runs/sft", Asked()), find("runs/reward", Asked())
    assert sft.measured is not None
    assert reward.measured is not None
    with pytest.raises(ValueError, match="runs/reward is a reward model and the first one is a policy"):
        measured_by(sft.measured, reward)
    with pytest.raises(ValueError, match="runs/sft is a policy and the first one is a reward model"):
        measured_by(reward.measured, sft)


def test_the_other_side_is_measured_on_the_rows_of_the_first() -> None:
    """A reward model reads them as it has learnt to read; a policy's are written as the first one's."""
    Path("else.jsonl").write_text("".join(json.dumps(row) + "\n" for row in PAIRS[:20]))
    task = {"data": "else.jsonl", "system_prompt": "at length"}
    run("other-reward", "reward", task=task, model={"path": "lookup"})
    run("other-sft", "sft", task=task, lora={"r": 4})
    for name, prompt in (("reward", "at length"), ("sft", "be brief")):
        first = find(f"runs/{name}", Asked()).measured
        assert first is not None
        config = measured_by(first, find(f"runs/other-{name}", Asked()))
        assert (config.task.data, config.task.system_prompt) == ("rows.jsonl", prompt)
        assert (config.model.path, config.lora.r) == (("lookup", 16) if name == "reward" else ("starter", 4))


def test_prompts_of_every_method_are_known_by_the_same_keys() -> None:
    kept = [prompt_keys(Config.model_validate({"method": m, "task": {"data": "rows.jsonl"}}), "train") for m in METHODS]
    assert kept[0] == kept[1] == kept[2] == trained_on("runs/sft")
    assert len(kept[0]) == 36
    held_out = prompt_keys(Config.model_validate({"method": "sft", "task": {"data": "rows.jsonl"}}), "eval")
    assert len(held_out) == 4
    assert not held_out & kept[0]
    assert trained_on("starter") == frozenset()


METHODS = ("grpo", "sft", "reward")
