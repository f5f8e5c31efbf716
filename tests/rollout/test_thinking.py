"""A budget for thinking: closed after so many tokens by ones that are not trained, and otherwise nothing changes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import running
from tests.generation.sampling import PROMPTS, make_engine, requests
from tests.tiny_models import TinyModels, tiny_tokenizer
from tinyrl.config.schema import Config
from tinyrl.generation.engine import Completion, Request
from tinyrl.rollout.thinking import CLOSING, sample_within_budget, thinking_tokens, thinks
from tinyrl.tasks.prompts import token_ids

BUDGET, MOST, GROUP = 6, 40, 2
KEY: Any = {"seed": 3, "step": 5}


def sampled(tiny: TinyModels, engine_name: str, opened: str) -> tuple[Any, list[Completion]]:
    engine = make_engine(tiny("llama"), engine_name, max_new_tokens=MOST)
    found = sample_within_budget(
        requests(),
        GROUP,
        engine=engine,
        tokenizer=engine.tokenizer,
        opened=[opened] * len(PROMPTS),
        budget=BUDGET,
        max_new_tokens=MOST,
        **KEY,
    )
    return engine, found


@pytest.mark.parametrize("engine_name", ["hf", "fused"])
def test_thinking_that_does_not_end_is_closed_and_the_answer_is_sampled(tiny: TinyModels, engine_name: str) -> None:
    engine, found = sampled(tiny, engine_name, "<think>")
    closing = token_ids(engine.tokenizer, CLOSING)
    plain = [one for group in engine.sample(requests(), GROUP, **KEY) for one in group]
    closed = 0
    for row, (completion, free) in enumerate(zip(found, plain, strict=True)):
        assert completion.tokens[:BUDGET] == free.tokens[:BUDGET]
        if len(free.tokens) <= BUDGET and free.finish_reason != "length":
            assert completion.tokens == free.tokens
            continue
        closed += 1
        assert completion.tokens[BUDGET : BUDGET + len(closing)] == closing
        chosen = completion.action_mask or []
        assert [i for i, one in enumerate(chosen) if not one] == [*range(BUDGET, BUDGET + len(closing))]
        assert len(completion.tokens) == len(completion.logprobs) == len(chosen) <= MOST
        read = completion.tokens[: BUDGET + len(closing)]
        request = Request(
            PROMPTS[row // GROUP] + read, prompt_row=row // GROUP, first_sample=row % GROUP, first_token=len(read)
        )
        [[rest]] = engine.sample([request], 1, **KEY)
        answer = completion.tokens[len(read) :]
        assert answer == rest.tokens[: len(answer)]
        assert completion.logprobs[len(read) :] == pytest.approx(rest.logprobs[: len(answer)], abs=1e-5)
    assert closed > 0


@pytest.mark.parametrize("engine_name", ["hf", "fused"])
def test_without_thinking_a_budget_changes_nothing(tiny: TinyModels, engine_name: str) -> None:
    engine, found = sampled(tiny, engine_name, "")
    plain = [one for group in engine.sample(requests(), GROUP, **KEY) for one in group]
    assert [(one.tokens, one.finish_reason) for one in found] == [(one.tokens, one.finish_reason) for one in plain]
    for one, other in zip(found, plain, strict=True):
        assert all(one.action_mask or [])
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("<think>a", True), ("<think>a</think>b", False), ("a", False), ("<think>a</think><think>b", True)],
)
def test_who_thinks(text: str, expected: bool) -> None:
    assert thinks(text) is expected


@pytest.mark.parametrize(
    ("opened", "text", "count"),
    [
        ("", "<think>ab</think>c", len("<think>ab</think>")),
        ("<think>", "ab</think>c", len("ab</think>")),
        ("<think>", "abc", 3),
        ("", "abc", None),
        ("<think>", "</think>", len("</think>")),
    ],
)
def test_thinking_is_counted(opened: str, text: str, count: int | None) -> None:
    tokenizer = tiny_tokenizer()
    assert thinking_tokens(token_ids(tokenizer, text), opened=opened, tokenizer=tokenizer) == count


def test_closing_tokens_are_not_trained_and_are_told_apart(tiny: TinyModels, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"{i} <think>", "answer": "x"}) + "\n" for i in range(40)))
    settings = running.config(
        "grpo",
        tiny("llama"),
        task={"name": "rows", "data": str(rows)},
        generation={"max_new_tokens": 24, "max_thinking_tokens": 5},
        run={"num_steps": 2},
    )
    code, run, looks = running.train(settings, tmp_path, name="whole")
    assert code == 0
    last = json.loads(run.metrics.read_text().splitlines()[-1])
    assert last["completion/thinking_tokens"] > 5
    assert last["completion/thinking_closed"] > 0.5
    assert last["policy/sampling_gap"] < 1e-5
    tokens = [json.loads(line) for line in run.tokens.read_text().splitlines()]
    closed = ["".join(t["piece"] for t in line["tokens"] if not t["chosen"]) for line in tokens]
    assert CLOSING in closed
    code, stopped, _ = running.train(settings, tmp_path, name="stopped", stop_at=looks // 2)
    assert code == 75
    assert running.go_on(stopped) == 0
    ours, theirs = running.weights(stopped, 2), running.weights(run, 2)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize(
    "sections",
    [
        {"generation": {"max_new_tokens": 8, "max_thinking_tokens": 8}},
        {"generation": {"max_thinking_tokens": 8}, "environment": {"use": "python"}},
    ],
)
def test_a_budget_that_makes_no_sense_is_refused(sections: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="max_thinking_tokens"):
        Config.model_validate({"method": "grpo", "task": {"name": "sort"}, **sections})
