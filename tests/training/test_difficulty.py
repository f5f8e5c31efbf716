"""task.sampler=difficulty: prompts near a pass rate of a half come more often, all of them now and then."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests import running
from tests.tiny_models import TinyModels
from tinyrl.config.sections import TaskConfig
from tinyrl.tasks.prompts import PreparedPrompt
from tinyrl.training.prompt_sampler import PassRates, PromptStats

PROMPTS = [PreparedPrompt(i, {"prompt": f"p{i}"}, f"p{i}", f"p{i}", [1], "") for i in range(60)]
RATES = [0.0] * 30 + [1.0] * 20 + [0.5] * 10  # half impossible, a third trivial


def of(record: dict[str, list[float]] | None = None, prompts: list[PreparedPrompt] = PROMPTS, **task: Any) -> PassRates:
    settings = TaskConfig.model_validate({"sampler": "difficulty", **task})
    return PassRates(settings, prompts, num_prompts=10, seed=0, record={} if record is None else record)


def see(rates: PassRates, step: int, prompts: list[PreparedPrompt], rewards: torch.Tensor) -> None:
    """A step in which these prompts had such rewards; 1 is right."""
    tried = PromptStats(1.0)
    tried.look(prompts, rewards)
    rates.keep(step, tried)


def lived(rates: PassRates, *, steps: int, group_size: int = 8) -> Counter[int]:
    """How often each prompt was drawn in steps whose completions are right by RATES."""
    rng, drawn = np.random.default_rng(1), Counter[int]()
    for step in range(steps):
        places = rates.draw(step)
        drawn.update(places)
        won = rng.random((len(places), group_size)) < np.array([[RATES[i]] for i in places])
        see(rates, step, [rates.prompts[i] for i in places], torch.tensor(won, dtype=torch.float32).flatten())
    return drawn


def test_those_near_a_half_come_more_often_and_none_is_forgotten() -> None:
    drawn = lived(of(), steps=100)
    share = sum(drawn[i] for i in range(50, 60)) / drawn.total()
    assert share > 3.5 / 6  # uniformly it is a sixth
    assert min(drawn[i] for i in range(60)) >= 100 * 2 // 60


def test_what_it_is_worth_is_the_expectation_under_the_posterior() -> None:
    rates = of({}, PROMPTS[:3])
    assert [*rates.worth(5)] == [1.0] * 3
    see(rates, 5, PROMPTS[:2], torch.tensor([1.0, 0.0, 0.5, float("nan"), 1.0, 1.0, 1.0, 1.0]))
    assert [*rates.record.values()] == [[1.0, 2.0, 5.0], [4.0, 0.0, 5.0]]
    samples = np.random.default_rng(0).beta([1.1, 4.1], [2.1, 0.1], size=(400_000, 2))
    expected = (samples * (1 - samples)).mean(0)
    assert rates.worth(5) == pytest.approx([*expected, expected.mean()], abs=1e-3)


def test_what_was_seen_fades() -> None:
    rates = of({}, PROMPTS[:1])
    see(rates, 0, PROMPTS[:1], torch.zeros(8))
    worths = [rates.worth(step)[0] for step in (0, 200, 400, 20_000)]
    assert worths == sorted(worths)
    assert worths[0] < 0.3 * worths[-1]
    assert worths[-1] == pytest.approx(0.1 * 0.1 / (0.2 * 1.2), rel=0.01)  # nothing is known but that it was seen
    see(rates, 200, PROMPTS[:1], torch.ones(8))
    assert [*rates.record.values()] == [[8.0, 4.0, 200]]


def test_a_probed_rate_is_where_it_begins() -> None:
    rows = [{"prompt": "a", "pass_rate": rate} for rate in (0.0, 0.5, 1.0, None, "x", 7)]
    prompts = [PreparedPrompt(i, row, "a", "a", [1], "") for i, row in enumerate(rows)]
    zero, half, one, *unknown = of({}, prompts).worth(0)
    assert zero == one < half
    assert len({*unknown}) == 1
    assert half > 5 * zero
    assert unknown[0] == pytest.approx((zero + half + one) / 3)


def test_a_draw_follows_from_seed_step_and_record() -> None:
    rates = of()
    lived(rates, steps=7)
    again = of(json.loads(json.dumps(rates.record)))
    assert again.draw(7) == rates.draw(7) == rates.draw(7)
    assert rates.draw(8) != rates.draw(7)
    assert len({*rates.draw(7)}) == 10
    few = of({}, PROMPTS[:4])
    assert Counter(few.draw(0) + few.draw(1)) == dict.fromkeys(range(4), 5)


def test_a_run_that_is_stopped_goes_on_bit_equal(tiny: TinyModels, tmp_path: Path) -> None:
    rows = [{"prompt": f"letters: {a} b sorted:", "answer": a} for a in "abcdefghijklmnop"]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = str(tmp_path / "rows.jsonl")
    task = {"name": "rows", "data": data, "eval_data": data, "max_samples": None, "sampler": "difficulty",
            "solved_reward": 0.5}  # fmt: skip
    settings = running.config("grpo", tiny("llama"), task=task, run={"num_steps": 4})
    code, whole, _ = running.train(settings, tmp_path, name="whole")
    assert code == 0
    code, stopped, _ = running.train(settings, tmp_path, name="stopped", stop_at=25)
    assert code == 75
    assert running.go_on(stopped) == 0
    assert running.lasting(stopped) == running.lasting(whole)
    assert running.lasting(whole)[-1]["reward/known_prompts"] >= 4
    now, then = running.weights(stopped, 4), running.weights(whole, 4)
    assert all(torch.equal(now[name], then[name]) for name in then)
