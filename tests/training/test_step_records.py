"""What a step leaves behind: tokens with what the update made of them, prompts tried and solved, as many samples as
are asked for; and none of it changes the run.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import running
from tests.faults.lookup_runs import lookup
from tests.tiny_models import TinyModels
from tests.training.test_on_policy import samples_of
from tinyrl.environments.environment import Episode
from tinyrl.rollout.records import pieces, shown_samples, token_lines
from tinyrl.rollout.sample import Sample
from tinyrl.runs.run_dir import RunDir

NAN = float("nan")
LLAMA = "llama"


class Bytes:
    """A tokenizer whose tokens are bytes."""

    def decode(self, token_ids: list[int], **options: Any) -> str:
        return bytes(token_ids).decode("utf-8", "replace")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return TinyModels(tmp_path_factory.mktemp("model"))(LLAMA)


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b"ab", ["a", "b"]),
        ("a\u00e9b".encode(), ["a", "", "\u00e9", "b"]),
        ("\U0001f600".encode(), ["", "", "", "\U0001f600"]),
        (b"a\xe2\x82", ["a", "", "\ufffd"]),
        (b"\xffa", ["", "\ufffda"]),
        (b"\xff" * 9, ["", "", "", "", "", "", "", "\ufffd" * 8, "\ufffd"]),
        (b"", []),
    ],
)
def test_each_token_adds_a_piece_and_together_they_are_the_text(text: bytes, expected: list[str]) -> None:
    found = pieces(Bytes(), list(text), before=[ord("x")])
    assert found == expected
    assert "".join(found) == text.decode("utf-8", "replace")


def test_the_best_and_the_worst_of_each_prompt_come_first() -> None:
    def shown(samples: list[Sample], group_size: int) -> list[int]:
        return [samples.index(sample) for sample in shown_samples(samples, group_size=group_size)]

    rewards = [1.0, 3.0, 2.0, 5.0, 5.0, 5.0, NAN, 4.0, 6.0]
    assert shown(samples_of(rewards, [[0.0, 0.0]] * 9, kept=[True] * 6 + [False] * 3), 3) == [1, 0, 3, 2, 4, 5]
    many = samples_of([float(i) for i in range(20)], [[0.0, 0.0]] * 20)
    assert shown(many, 2) == [1, 0, 3, 2, 5, 4, 7, 6]
    assert shown(many, 1) == [*range(8)]


def one_row(**fields: Any) -> Sample:
    """A response "ab", "?" read, "c": three tokens chosen, one only read, after a prompt "x"."""
    mask, logprobs = [True, True, False, True], [-0.12345, -1.0, 0.0, -2.0]
    return Sample([ord("x")], [*b"ab?c"], mask, logprobs, 5, reward=0.75, **fields)


def of_tokens(sample: Sample, rewards: torch.Tensor | None = None) -> dict[str, Any]:
    new = torch.tensor([[-0.1, -0.9, 0.0, -2.5]])
    (line,) = token_lines(
        [sample], new_logprobs=new, rewards=rewards, tokenizer=Bytes(), prompts={5: "x"}, group_size=1
    )
    return line


def test_a_line_says_of_each_token_what_the_update_made_of_it() -> None:
    nothing = dict.fromkeys(("advantage", "old", "new", "ref", "teacher", "value", "reward"))
    of_group = one_row(advantage=torch.tensor(0.5), played=Episode(turn_ends=[1, 3], turn_rewards=[0.25, 0.0]))
    assert of_tokens(of_group) == {
        "kind": "train",
        "prompt_index": 5,
        "sample": 0,
        "prompt": "x",
        "reward": 0.75,
        "tokens": [
            {"piece": "a", "chosen": True, **nothing, "advantage": 0.5, "old": -0.123, "new": -0.1, "reward": 0.0},
            {"piece": "b", "chosen": True, **nothing, "advantage": 0.5, "old": -1.0, "new": -0.9, "reward": 0.25},
            {"piece": "?", "chosen": False, **nothing},
            {"piece": "c", "chosen": True, **nothing, "advantage": 0.5, "old": -2.0, "new": -2.5, "reward": 0.5},
        ],
    }


def test_advantages_values_and_rewards_of_single_tokens_are_their_own() -> None:
    of_ppo = one_row(
        advantage=torch.tensor([1.0, 2.0, 0.0, 3.0]),
        old=torch.tensor([-0.5, -0.6, 0.0, -0.7]),
        ref=torch.tensor([-0.8, -0.9, 0.0, -1.1]),
        values=torch.tensor([0.1, 0.2, 0.0, 0.3]),
    )
    found = of_tokens(of_ppo, torch.tensor([[-0.01, -0.02, 0.0, 0.9996]]))["tokens"]
    assert [t["advantage"] for t in found] == [1.0, 2.0, None, 3.0]
    assert [t["old"] for t in found] == [-0.5, -0.6, None, -0.7]
    assert [t["ref"] for t in found] == [-0.8, -0.9, None, -1.1]
    assert [t["value"] for t in found] == [0.1, 0.2, None, 0.3]
    assert [t["reward"] for t in found] == [-0.01, -0.02, None, 1.0]


@pytest.mark.parametrize("method", ["grpo", "ppo"])
@pytest.mark.wide
def test_a_run_shows_eight_completions_of_the_steps_that_are_evaluated(
    method: str, model: Path, tmp_path: Path
) -> None:
    """Evaluated after steps 2 and 3 of three. What is shown is in samples.jsonl too, where all are kept."""
    settings = running.config(method, model, critic={"warmup_steps": 0})
    _, run, _ = running.train(settings, tmp_path)
    found, samples = lines(run.tokens), lines(run.samples)
    assert [line["step"] for line in found] == [2] * 8 + [3] * 8
    names = ("step", "kind", "prompt_index", "sample", "prompt", "reward")
    kept = {tuple(s[n] for n in names): s for s in samples}
    for line in found:
        sample = kept[tuple(line[n] for n in names)]
        assert "".join(t["piece"] for t in line["tokens"]).startswith(sample["completion"])
        assert all(t["chosen"] and t["old"] < 0 for t in line["tokens"])
        if method == "grpo":
            assert sum(t["reward"] for t in line["tokens"]) == pytest.approx(sample["reward"], abs=1e-3)
            assert {t["advantage"] for t in line["tokens"]} == {round(sample["advantage"], 3)}
            assert {t["value"] for t in line["tokens"]} == {None}
        else:
            assert all(isinstance(t["value"], float) and isinstance(t["ref"], float) for t in line["tokens"])
    moved = [t["new"] - t["old"] for line in found for t in line["tokens"]]
    assert max(map(abs, moved)) > 0.002


def test_what_an_environment_said_is_shown_and_not_judged(tmp_path: Path) -> None:
    _, run, _ = running.train(lookup(), tmp_path)
    tokens = [token for line in lines(run.tokens) for token in line["tokens"]]
    read = [token for token in tokens if not token["chosen"]]
    assert read
    assert {token[name] for token in read for name in ("advantage", "old", "new", "reward")} == {None}
    assert any(token["piece"] for token in read)


def test_to_be_shown_changes_nothing_of_a_run(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = running.config("grpo", model)
    _, shown, _ = running.train(settings, tmp_path, name="shown")
    monkeypatch.setattr("tinyrl.training.on_policy.shown_samples", lambda samples, group_size: [])
    _, plain, _ = running.train(settings, tmp_path, name="plain")
    assert shown.tokens.exists()
    assert not plain.tokens.exists()
    assert running.lasting(shown) == running.lasting(plain)
    ours, theirs = running.weights(shown, 3), running.weights(plain, 3)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_every_step_says_which_prompts_it_tried(model: Path, tmp_path: Path) -> None:
    """Four prompts a step, four completions each; with rounds of fresh prompts, these too."""
    _, run, _ = running.train(running.config("grpo", model), tmp_path)
    found = lines(run.prompts)
    assert [line["step"] for line in found] == [1, 2, 3]
    assert all([entry[2] for entry in line["prompts"]] == [4] * 4 for line in found)
    rewarded = {(s["step"], s["prompt_index"]) for s in lines(run.samples) if s["kind"] == "train"}
    assert {(line["step"], entry[0]) for line in found for entry in line["prompts"]} == rewarded


def test_tokens_stay_within_their_room_and_are_cut_with_the_other_records(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    line = {"step": 1, "piece": "x" * 80}
    size = len(json.dumps(line)) + 1
    run.append_tokens([line] * 3, most_bytes=2 * size)
    assert run.tokens.stat().st_size == 2 * size
    run.append_tokens([line], most_bytes=2 * size)
    before = run.lengths()
    assert before["tokens.jsonl"] == 2 * size
    run.append_tokens([{"step": 2}, line], most_bytes=1000)
    run.append(run.prompts, [{"step": 2, "prompts": [[0, "key", 4, 1]]}])
    run.cut(before)
    assert run.tokens.stat().st_size == 2 * size
    assert run.prompts.read_bytes() == b""
