"""The examples: short, and what they say of themselves is so."""

import copy
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests import running
from tinyrl.config.recipe import load_config

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
SKLEARN = pytest.mark.skipif(importlib.util.find_spec("sklearn") is None, reason="examples need scikit-learn")


def load(name: str) -> ModuleType:
    sys.path.insert(0, str(EXAMPLES))  # as where it is run as a script
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(EXAMPLES))


@pytest.fixture(autouse=True)
def one_thread():
    """Small matrices, in the order in which one thread adds them up; the generator is left as it was."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.random.fork_rng(devices=[]):
        yield
    torch.set_num_threads(threads)


@SKLEARN
@pytest.mark.slow
def test_a_drawing_is_scored_as_it_was_drawn() -> None:
    """At the first update the ratio is 1, and the model is its own reference."""
    flow = load("flow_digits")
    torch.manual_seed(0)
    model, digits = flow.Velocity(), torch.arange(10)
    path, sampled = flow.draw(model, digits, noise_level=flow.NOISE_LEVEL)
    logprobs, mean, std = flow.score(model, path, digits)
    assert logprobs.shape == sampled.shape == (10, flow.NUM_STEPS)
    assert torch.allclose(logprobs, sampled, atol=1e-3)  # a sum of 64 densities
    assert float(flow.flow_step_kl(mean, flow.score(copy.deepcopy(model), path, digits)[1], std).detach().max()) == 0.0


def test_a_list_in_order_is_a_point_of_its_turn_or_of_the_last() -> None:
    game = load("five_lists")
    lists = ["dbca", "xyzw", "ghef", "lkji", "mnpo"]
    transcript = list[dict[str, str]]()
    replies = list[Any]()
    late = list[Any]()
    for answer in (" a b c d", " x y z w", " e f g h", " i j k l", " m n p o"):
        transcript.append({"role": "assistant", "content": f"{answer}\n"})
        replies += game.respond(["letters"], [transcript], lists=[lists])
        late += game.respond_at_the_end(["letters"], [transcript], lists=[lists])
        transcript.append({"role": "tool", "content": replies[-1].text})
    assert [reply.reward for reply in replies] == [1.0, 0.0, 1.0, 1.0, 0.0]
    assert [reply.reward for reply in late] == [None, None, None, None, 3.0]
    assert [reply.text for reply in late] == [game.question(letters) for letters in lists[1:]] + [""]
    assert [reply.done for reply in late] == [False] * 4 + [True]


@pytest.mark.slow
def test_the_lookup_agent_plays_the_lookup_task_by_url(tmp_path: Path) -> None:
    """Its episodes are those of `respond`: several calls each, and right answers where it searches."""
    small = [
        "environment.max_concurrency=2",
        "environment.max_call_tokens=24",
        "grpo.num_prompts=8",
        "run.num_steps=1",
        "run.eval_prompts=32",
    ]
    agent = f"environment.agent={EXAMPLES / 'lookup_agent.py'}:run"
    code, run, _ = running.train(load_config("grpo", "lookup", overrides=[agent, *small]), tmp_path)
    assert code == 0
    lines = running.metrics(run)
    assert lines[-1]["environment/turns"] > 1.2
    assert lines[-1]["policy/sampling_gap"] < 1e-5
    assert lines[0]["eval/reward_mean"] > 0.1


@pytest.mark.slow
def test_the_lesson_learns_to_sort() -> None:
    """Fifteen steps of 60: over three quarters right, from two fifths. Its advantages and loss, by hand."""
    lesson = load("grpo_in_one_file")
    rewards = torch.tensor([1.0] * 4 + [0.0] * 12)
    std = (8 * 0.25 / 7) ** 0.5
    wanted = [0.5 / (std + 1e-4)] * 4 + [-0.5 / (std + 1e-4)] * 4 + [0.0] * 8
    assert lesson.group_advantages(rewards).tolist() == pytest.approx(wanted)
    mask, none = torch.tensor([[True, True], [True, False]]), torch.zeros(2, 2)
    one = lesson.Samples(torch.zeros(2, 1), none, mask, none, torch.zeros(2), torch.tensor([1.0, -1.0]))
    new = torch.tensor([[1.5, 1.0], [0.5, 9.0]]).log()
    assert float(lesson.clipped_loss(new, one)) == pytest.approx(-(1.28 + 1.0 - 0.8) / 3)
    path = lesson.embedded_model()
    model, tokenizer = (kind.from_pretrained(path) for kind in (lesson.AutoModelForCausalLM, lesson.AutoTokenizer))
    before, after = lesson.train(model, tokenizer, seed=0, num_steps=15)
    assert before < 0.5
    assert after > 0.75
