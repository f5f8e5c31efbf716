"""`tinyrl eval` of runs trained on text or pairs: measured by their trainer, sampled where something judges."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests import running
from tests.tiny_models import tiny_model
from tinyrl import api
from tinyrl.data.rows import prompt_key
from tinyrl.evaluation.evaluate import evaluate
from tinyrl.evaluation.prepared import prepare_comparison, prepare_evaluation
from tinyrl.evaluation.result import TrainedOn
from tinyrl.evaluation.side import OwnSide
from tinyrl.evaluation.targets import Asked, find, seen_in_training, trained_on
from tinyrl.process.launched import Options
from tinyrl.rollout.load import load_collector
from tinyrl.rollout.prepared import prepare
from tinyrl.runs.resolve import config_of
from tinyrl.runs.run_dir import open_run
from tinyrl.tools.compare import _trained_on, evaluate_target

OPTIONS = Options(device="cpu")
LETTERS = "abcdefghij"
ROWS = [
    {"prompt": f"{a}{b}:", "completion": a * 3, "chosen": "yes yes" + a, "rejected": "no no no" + a}
    for a in LETTERS
    for b in LETTERS
]
REWARD = "def yes(completions, **columns): return [float(c.count('e')) + len(set(c)) for c in completions]\n"
STEPS = {"num_steps": 4, "eval_every": 2, "save_every": 2, "threads": 1, "eval_prompts": 100}
SHORT = "generation.max_new_tokens=5"


def write_rows(file: Path, rows: list[dict[str, Any]]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """100 rows, of which 10 are held out; a base; and runs: sft, sft of every weight, dpo, a reward model."""
    folder = tmp_path_factory.mktemp("text-runs")
    write_rows(folder / "rows.jsonl", ROWS)
    (folder / "rewards.py").write_text(REWARD)
    tiny_model(folder / "base", "llama", pad_is_eos=True)
    for name, method, lora, rate in (
        ("sft", "sft", True, 1e-2),
        ("full", "sft", False, 3e-3),
        ("dpo", "dpo", True, 1e-2),
        ("judge", "reward", True, 1e-2),
    ):
        values = {"method": method, "model": {"path": str(folder / "base")}, "lora": {"enabled": lora}, "run": STEPS}
        values |= {"task": {"data": str(folder / "rows.jsonl")}, "optim": {"learning_rate": rate}}
        assert running.train(config_of(values), folder, name=name)[0] == 0
    return folder


def ask(folder: Path, target: str, **given: Any) -> dict[str, Any]:
    vs, settings = given.pop("vs", None), tuple(given.pop("settings", ()))
    asked = Asked(settings=settings, **given)
    return evaluate_target(prepare_evaluation(str(folder / target), asked, vs=vs), options=OPTIONS).as_json()


def recorded(folder: Path, run: str, step: int) -> dict[str, float]:
    """What the run itself wrote of its held-out rows at a step."""
    line = next(line for line in running.metrics(open_run(folder / run)) if line["step"] == step)
    return {key.removeprefix("eval/"): value for key, value in line.items() if key.startswith("eval/")}


@pytest.mark.parametrize(("run", "vs"), [("sft", "base"), ("full", "start"), ("judge", None)])
@pytest.mark.wide
def test_a_run_is_measured_as_it_measured_itself(folder: Path, run: str, vs: str | None) -> None:
    """And beside where it started."""
    result = ask(folder, run, vs=vs)
    assert result["target"] == f"{run}/step-000004"
    assert "reference" not in result["held_out"]
    assert result["held_out"] == pytest.approx(recorded(folder, run, 4), rel=1e-5)
    if vs is not None:
        assert result["other"]["target"] == vs
        assert result["other"]["held_out"] == pytest.approx(recorded(folder, run, 0), rel=1e-5)
    earlier = ask(folder, f"{run}/checkpoints/step-000002")
    assert earlier["held_out"] == pytest.approx(recorded(folder, run, 2), rel=1e-5)
    assert earlier["held_out"]["loss"] != pytest.approx(result["held_out"]["loss"], rel=1e-3)


def test_a_run_of_dpo_is_measured_on_pairs_and_sampled(folder: Path) -> None:
    """Another policy is measured on the same pairs, against where it started itself."""
    settings = [f"reward.functions=[{{use: {folder}/rewards.py:yes}}]", SHORT]
    result = ask(folder, "dpo", settings=settings, vs="start")
    assert result["held_out"]["accuracy"] > 0.9
    assert result["held_out"]["reference"] == result["other"]["held_out"]["reference"] == "own"
    assert result["other"]["held_out"]["accuracy"] == 0.5  # a policy against itself: all ties
    assert result["other"]["held_out"]["loss"] == pytest.approx(0.693147, abs=1e-5)
    assert result["reward_mean"] > result["other"]["reward_mean"]
    other = ask(folder, "dpo", vs=str(folder / "sft"))["other"]
    assert other["held_out"]["num_pairs"] == 10
    assert other["held_out"]["loss"] != pytest.approx(0.693147, abs=1e-3)


def test_a_run_is_measured_on_rows_that_are_named(folder: Path, tmp_path: Path) -> None:
    shown = ask(folder, "sft", split="train")["held_out"]
    assert shown["num_rows"] == 90
    assert ask(folder, "sft", num_prompts=3)["held_out"]["num_rows"] == 3
    rows = write_rows(tmp_path / "more.jsonl", [{"prompt": "zz:", "completion": "@@@"}] * 4)
    strange = ask(folder, "sft", data=str(rows))["held_out"]
    assert strange["num_rows"] == 4
    assert strange["loss"] > shown["loss"] + 0.5
    result = ask(folder, "judge", split="train", vs=str(folder / "judge"))
    assert result["held_out"]["num_pairs"] == 90
    assert result["other"]["held_out"] == result["held_out"]
    with pytest.raises(ValueError, match="--vs base: a reward model starts from nothing"):
        ask(folder, "judge", vs="base")


def test_a_text_run_is_sampled_where_a_reward_is_named(folder: Path) -> None:
    """Its prompts are its held-out rows. Another way to this policy is a run of grpo that starts from its adapter."""
    reward = f"reward.functions=[{{use: {folder}/rewards.py:yes}}]"
    result = ask(folder, "sft", settings=[reward, SHORT], samples=2, vs="start")
    assert result["held_out"] == ask(folder, "sft")["held_out"]
    assert result["num_prompts"] == 10
    parts = load_collector(
        prepare(
            running.config(
                "grpo",
                folder / "base",
                model={"path": str(folder / "base"), "adapter": str(folder / "sft" / "checkpoints" / "step-000004")},
                task={"name": "rows", "data": str(folder / "rows.jsonl"), "max_samples": None},
                reward={"functions": [{"use": f"{folder}/rewards.py:yes"}]},
                generation={"max_new_tokens": 5},
            )
        ),
        options=OPTIONS,
    )
    expected = evaluate(parts, parts.eval_prompts, samples=2)
    parts.close()
    for key in ("reward_mean", "reward_ci", "mean_length", "entropy"):
        assert result[key] == pytest.approx(expected.metrics[key], rel=1e-5)
    assert result["greedy"]["reward_mean"] == expected.greedy["reward_mean"]
    assert result["kl"] > 0.01  # to the base, which sft started from
    assert result["other"]["kl"] == pytest.approx(0.0, abs=1e-5)
    assert result["other"]["held_out"] == pytest.approx(recorded(folder, "sft", 0), rel=1e-5)
    assert 0 <= result["win_rate"]["mean"] <= 1


def test_the_json_of_a_run_that_is_measured_and_sampled_has_these_keys_in_this_order(folder: Path) -> None:
    reward = {"reward.functions": [{"use": f"{folder}/rewards.py:yes"}], "generation.max_new_tokens": 5}
    found = api.evaluate(folder / "sft", settings=reward, vs="start", num_prompts=2, device="cpu")
    assert [key for key in found if key not in found["greedy"]] == [
        *("target", "num_prompts", "num_samples", "kl", "entropy", "greedy"),
        *("difference", "win_rate", "other", "held_out", "left_out"),
    ]
    assert [key for key in found["other"] if key not in found["greedy"]] == [
        *("target", "held_out", "num_prompts", "num_samples", "kl", "entropy", "greedy"),
    ]
    assert list(found["held_out"]) == ["loss", "perplexity", "num_rows"]


def test_a_reward_model_of_a_run_judges_runs_of_text(folder: Path, tmp_path: Path) -> None:
    """Samples of both sides are kept. The same rows are held out in both, so none is left out."""
    file = tmp_path / "samples.jsonl"
    settings = [f"reward.model={folder / 'judge'}", SHORT]
    result = ask(folder, "sft", settings=settings, vs=str(folder / "dpo"), save_samples=str(file))
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["target"] for line in lines] == ["sft/step-000004"] * 20 + ["dpo/step-000004"] * 20
    assert [line["kind"] for line in lines[:20]] == ["eval"] * 10 + ["eval-greedy"] * 10
    assert result["reward_mean"] == pytest.approx(sum(line["rewards"]["model"] for line in lines[:10]) / 10)
    assert result["difference"]["left_out"] == 0
    with pytest.raises(ValueError, match="is a reward model, which writes nothing"):
        ask(folder, "sft", settings=settings, vs=str(folder / "judge"))


# ---- rows that a run was trained on ----


@pytest.fixture(scope="module")
def known(folder: Path) -> list[dict[str, Any]]:
    """Rows of the file that every run here is trained on: 20 that none of them holds out."""
    seen = trained_on(str(folder / "sft"))
    return [row for row in ROWS if prompt_key(row["prompt"]) in seen][:20]


def fresh(count: int) -> list[dict[str, Any]]:
    return [{"prompt": f"new {n}:", "completion": "zz", "chosen": "yes", "rejected": "no"} for n in range(count)]


def test_rows_of_a_file_that_the_run_was_trained_on_are_counted(
    folder: Path, known: list[dict[str, Any]], tmp_path: Path
) -> None:
    """Sampled, and measured; its own held-out rows are none of them."""
    judged = [f"reward.functions=[{{use: {folder}/rewards.py:yes}}]", SHORT]
    rows = str(write_rows(tmp_path / "rows.jsonl", known[:3] + fresh(2)))
    assert ask(folder, "sft", settings=judged, data=rows)["trained_on"] == 3
    assert ask(folder, "sft", data=rows)["trained_on"] == 3
    assert ask(folder, "sft", data=rows, num_prompts=2)["trained_on"] == 2
    assert ask(folder, "judge", data=rows)["trained_on"] == 3
    assert "trained_on" not in ask(folder, "sft")
    new = str(write_rows(tmp_path / "new.jsonl", fresh(4)))
    assert ask(folder, "sft", settings=judged, data=new)["trained_on"] == 0


def test_a_comparison_leaves_out_rows_that_a_side_was_trained_on(
    folder: Path, known: list[dict[str, Any]], tmp_path: Path
) -> None:
    """They are measured and sampled as the new rows alone are."""
    judged = [f"reward.functions=[{{use: {folder}/rewards.py:yes}}]", SHORT]
    rows = str(write_rows(tmp_path / "rows.jsonl", known + fresh(12)))
    new = str(write_rows(tmp_path / "new.jsonl", fresh(12)))
    sampled = ask(folder, "sft", settings=judged, data=rows, vs="base")
    assert (sampled["num_prompts"], sampled["difference"]["left_out"]) == (12, 20)
    measured = ask(folder, "sft", data=rows, vs=str(folder / "full"))
    assert measured["left_out"] == 20
    assert measured["held_out"] == ask(folder, "sft", data=new)["held_out"]
    assert measured["other"]["held_out"]["num_rows"] == 12
    assert ask(folder, "sft", vs="base")["left_out"] == 0
    few = str(write_rows(tmp_path / "few.jsonl", known + fresh(9)))
    for settings in (judged, []):
        with pytest.raises(ValueError, match="was trained on 20 of the 29"):
            ask(folder, "sft", settings=settings, data=few, vs="base")


def test_a_run_whose_training_rows_are_gone_is_evaluated_on_others(folder: Path, tmp_path: Path) -> None:
    """Without a word on how many it knows; a comparison needs that."""
    run = Path(shutil.copytree(folder / "sft", tmp_path / "moved"))
    written = run / "config.yaml"
    written.write_text(written.read_text().replace(str(folder / "rows.jsonl"), str(tmp_path / "gone.jsonl")))
    judged = [f"reward.functions=[{{use: {folder}/rewards.py:yes}}]", SHORT]
    asked = Asked(task="rows", data=str(write_rows(tmp_path / "new.jsonl", fresh(12))), settings=tuple(judged))
    target = find(str(run), asked)
    assert target.sampled is not None
    alone = replace(target, measured=None)
    assert _trained_on(alone, asked, []) == TrainedOn(None)
    with pytest.raises(ValueError, match=r"gone\.jsonl"):
        seen_in_training(alone, [OwnSide.BASE], asked)


def test_a_baseline_without_a_reward_is_told_which_target_has_one(folder: Path, tmp_path: Path) -> None:
    """A run of grpo beside it has one; of two without, none is named."""
    rewarded = running.config("grpo", folder / "base", run={"num_steps": 1, "eval_prompts": 0, "save_every": 1})
    assert running.train(rewarded, tmp_path, name="rewarded")[0] == 0
    with pytest.raises(ValueError, match=f"--vs {tmp_path}/rewarded"):
        prepare_comparison([str(folder / "sft"), str(tmp_path / "rewarded")], Asked())
    with pytest.raises(ValueError, match="--task NAME") as refused:
        prepare_comparison([str(folder / "sft"), str(folder / "dpo")], Asked())
    assert "--vs" not in str(refused.value)
