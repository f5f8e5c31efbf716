"""Comparison of two runs: the same policy under other settings differs by nothing, whatever those settings are."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import ANY

import pytest
import torch
import yaml
from safetensors.torch import save_file

from tests import running
from tests.tiny_models import tiny_model, tiny_tokenizer
from tinyrl.api import evaluate
from tinyrl.config.sections import RewardConfig
from tinyrl.evaluation.prepared import prepare_comparison, prepare_evaluation
from tinyrl.evaluation.targets import Asked
from tinyrl.process.launched import Options
from tinyrl.rewards.model_text import TextFormat
from tinyrl.rewards.scorer import Scorer
from tinyrl.tasks import load_task
from tinyrl.tools.compare import SampledSides, evaluate_target
from tinyrl.tools.compare import compare as compare_all

REWARDS = """
def number(prompts, completions, **columns):
    return [float(p.split()[0]) + len(set(c)) for p, c in zip(prompts, completions)]

def vowels(prompts, completions, completion_ids, **columns):
    return [100.0 * len(ids) - sum(c.count(v) for v in "aeiou") for c, ids in zip(completions, completion_ids)]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows (400, so 40 are held out), rewards, and two models whose tokenizers number the same bytes differently."""
    folder = tmp_path_factory.mktemp("compare")
    rows = [{"prompt": f"{i} is"} for i in range(400)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "rewards.py").write_text(REWARDS)
    tiny_model(folder / "model", "llama")
    tiny_model(folder / "other-model", "llama", seed=1, pad_is_eos=True)
    for name, model in (("first", "model"), ("other-tokenizer", "other-model")):
        use = {"functions": [{"use": f"{folder}/rewards.py:number"}]}
        task = {"name": "rows", "data": str(folder / "rows.jsonl"), "max_samples": None}
        few = {"num_steps": 1, "eval_prompts": 0}
        running.train(running.config("grpo", folder / model, task=task, reward=use, run=few), folder, name=name)
    return folder


def variant(folder: Path, name: str, **sections: dict[str, Any]) -> str:
    """The first run under another name, with other settings in its config.yaml: the very same policy."""
    shutil.copytree(folder / "first", folder / name)
    path = folder / name / "config.yaml"
    values = yaml.safe_load(path.read_text())
    for section, fields in sections.items():
        values[section] |= fields
    path.write_text(yaml.safe_dump(values, sort_keys=False))
    return str(folder / name)


def compare(folder: Path, other: str, *, split: str = "eval", num_prompts: int = 512) -> dict[str, Any]:
    first = str(folder / "first")
    asked = Asked(split=split, num_prompts=num_prompts, samples=2)
    return evaluate_target(prepare_evaluation(first, asked, vs=other), options=Options(device="cpu")).as_json()


SAME = {"reward_mean": 0.0, "distinguishable": False}  # without an interval: no prompt differs


@pytest.mark.wide
def test_the_same_policy_differs_by_nothing(folder: Path, tmp_path: Path) -> None:
    """The first target's seed, reward, sampling settings and rows count, not the other's."""
    sections: dict[str, Any] = {
        "run": {"seed": 7},
        "reward": {"functions": [{"use": f"{folder}/rewards.py:vowels", "weight": 3.0}]},
        "generation": {"temperature": 0.5, "max_new_tokens": 2},
        "task": {"name": "sort", "data": None},
    }
    result = compare(folder, variant(folder, tmp_path.name, **sections))
    assert result["difference"].items() >= {**SAME, "left_out": 0}.items()
    assert result["num_prompts"] == result["other"]["num_prompts"] == 40
    assert result["reward/number"] == result["other"]["reward/number"] > 100  # the prompts' numbers, about 200
    assert result["greedy"]["reward_mean"] == result["other"]["greedy"]["reward_mean"]


def test_runs_of_one_name_are_called_by_their_paths(folder: Path, tmp_path: Path) -> None:
    first = str(folder / "first")
    other = str(shutil.copytree(folder / "first", tmp_path / "first"))
    asked = Asked(num_prompts=2)
    result = evaluate_target(prepare_evaluation(first, asked, vs=other), options=Options(device="cpu"))
    assert [side.target for side in result.sides] == [first, other]
    beside_base = evaluate_target(prepare_evaluation(first, asked, vs="base"), options=Options(device="cpu"))
    assert beside_base.side.target == "first/step-000001"


def layout(values: dict[str, Any]) -> list[Any]:
    """Return the keys of a JSON object in their order; those of an object or of nulls with what they hold."""
    keys = list[Any]()
    for key, value in values.items():
        if isinstance(value, dict):
            keys.append({key: layout(value)})
        elif value is None or value == [None, None]:
            keys.append({key: value})
        else:
            keys.append(key)
    return keys


def test_the_json_of_a_comparison_has_these_keys_in_this_order(folder: Path, tmp_path: Path) -> None:
    other = shutil.copytree(folder / "first", tmp_path / "same")
    rewards = ("reward_mean", "reward_median", "reward_std", "reward_ci", "reward/number")
    greedy = [*rewards, "mean_length", "truncated", "dropped", "distinct"]
    sampled = [*greedy, "num_prompts", "num_samples", "kl", "entropy", {"greedy": greedy}]
    no_interval = {"reward_ci": [None, None]}  # no prompt differs
    difference = ["reward_mean", no_interval, "pairs", "distinguishable", "left_out"]
    assert layout(evaluate(folder / "first", vs=other, num_prompts=6, device="cpu")) == [
        "target",
        *sampled,
        {"difference": difference},
        {"win_rate": ["mean", "ci", "ties"]},
        {"other": ["target", *sampled]},
    ]


def test_the_json_has_null_where_the_rows_a_run_was_trained_on_are_gone(folder: Path, tmp_path: Path) -> None:
    run = variant(folder, tmp_path.name, task={"data": str(tmp_path / "gone.jsonl")})
    found = evaluate(run, data=str(folder / "rows.jsonl"), num_prompts=2, device="cpu")
    assert layout(found)[-1] == {"trained_on": None}


@pytest.mark.slow
def test_prompts_that_the_other_run_was_trained_on_are_left_out_or_too_many(folder: Path, tmp_path: Path) -> None:
    rows = str(folder / "rows.jsonl")
    other = variant(folder, f"{tmp_path.name}-some", task={"eval_data": rows, "max_samples": 100})
    held = running.rows_of("rows", "eval", data=rows)
    trained = running.rows_of("rows", "train", data=rows, eval_data=rows)[:100]
    seen = {row["prompt"] for row in held} & {row["prompt"] for row in trained}
    assert 0 < len(seen) < 30
    result = compare(folder, other)
    assert result["difference"].items() >= {**SAME, "left_out": len(seen)}.items()
    assert result["num_prompts"] == result["other"]["num_prompts"] == 40 - len(seen)
    other = variant(folder, f"{tmp_path.name}-all", task={"eval_data": rows})
    with pytest.raises(ValueError, match=r"was trained on 40 of the 40 .*--split train"):
        compare(folder, other)
    result = compare(folder, other, split="train", num_prompts=12)
    assert (result["difference"]["left_out"], result["num_prompts"]) == (0, 12)


def test_each_of_several_is_compared_from_its_own_side_with_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two prompts: the first policy has one reward, the second both, the third none."""
    names = ("first", "better", "worse")
    rewards = ([[1.0], [0.0]], [[1.0], [1.0]], [[0.0], [0.0]])
    evaluations: Any = [SimpleNamespace(rewards=each) for each in rewards]
    found = SampledSides(evaluations, prompts=[], left_out=0)
    monkeypatch.setattr("tinyrl.tools.compare._sample", lambda *_, **__: found)
    others = [SimpleNamespace(path=name) for name in names[1:]]
    prepared: Any = SimpleNamespace(first=SimpleNamespace(path=names[0]), others=others, sampled=())
    sides = compare_all(prepared, options=Options(device="cpu")).sides
    assert [side.target for side in sides] == [*names]
    assert [side.against and side.against.difference.reward_mean for side in sides] == [None, 0.5, -0.5]
    assert [side.against and side.against.win_rate.mean for side in sides] == [None, 0.75, 0.25]


@pytest.mark.slow  # Fast: the comparisons of two, and of several by their rewards (above).
def test_several_are_compared_as_each_is_alone_with_the_first(folder: Path, tmp_path: Path) -> None:
    """One result a policy with the numbers and win rates of `eval BASELINE --vs POLICY`, seen from the policy's side;
    what any of them was trained on is left out. Another tokenizer is judged as text: as by its own evaluation.
    """
    first, other = str(folder / "first"), str(folder / "other-tokenizer")
    same = variant(
        folder, tmp_path.name, task={"eval_data": str(folder / "rows.jsonl"), "max_samples": 100}, run={"seed": 7}
    )
    asked, options = Asked(samples=2), Options(device="cpu")
    rows = compare_all(prepare_comparison([first, other, same], asked), options=options).as_json()
    assert [row["target"].partition("/")[0] for row in rows] == ["first", "other-tokenizer", tmp_path.name]
    assert {row["num_prompts"] for row in rows} == {40 - compare(folder, same)["difference"]["left_out"]} != {40}
    assert rows[2].pop("win_rate") == {"mean": 0.5, "ci": ANY, "ties": ANY}
    assert rows[2].pop("difference")["reward_mean"] == 0.0
    assert {**rows[2], "target": rows[0]["target"]} == rows[0]
    alone = compare_all(prepare_comparison([first, other], asked), options=options).as_json()[1]
    pair = compare(folder, other)
    assert alone.pop("win_rate")["mean"] == pytest.approx(1 - pair["win_rate"]["mean"])
    assert alone.pop("difference")["reward_mean"] == pytest.approx(-pair["difference"]["reward_mean"])
    assert alone == pair["other"] == evaluate_target(prepare_evaluation(other, asked), options=options).as_json()


def test_a_reward_adapter_judges_its_own_vocabulary_only(tmp_path: Path) -> None:
    task = load_task("sort")
    save_file({"weight": torch.zeros(1, 2)}, tmp_path / "score_head.safetensors")
    rest: dict[str, Any] = {"policy": None, "micro_batches": None, "policy_format": TextFormat()}
    scorer = Scorer(RewardConfig(model=str(tmp_path)), task, tokenizer=tiny_tokenizer(), **rest)
    same = tiny_tokenizer()
    assert scorer.with_tokenizer(same).tokenizer is same
    with pytest.raises(ValueError, match="another vocabulary"):
        scorer.with_tokenizer(tiny_tokenizer(pad_is_eos=True))
