"""Published harnesses, each by the example that is its page: a taught model's episodes are trained on, none is refused.

Each is tested where it is installed (the examples have the lines that install it), with
`pytest -m "release or not release" tests/agents`; elsewhere it is skipped. Run so with anthropic 2.14.0,
pydantic-ai 2.62.0 and smolagents 1.26.0 (its ToolCallingAgent) on two busy CPU cores, in 1.5 to 7.5 minutes each; tests
of what the model writes also with mini-swe-agent 2.4.6 and bubblewrap 0.8.0. Runs with all are in docs/environments.md.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests import running
from tests.agents.teach import teach
from tests.test_examples import EXAMPLES, load
from tinyrl.config.recipe import load_config
from tinyrl.endpoint import agents
from tinyrl.environments.environment import Episode
from tinyrl.workers import sandbox

TASK = f"{EXAMPLES / 'boxes.py'}:TASK"
HARNESSES = {  # the module that is imported of each, by the example's file
    "anthropic_agent": "anthropic",
    "mini_swe_agent": "minisweagent",
    "openai_sdk_agent": "agents",
    "pydantic_ai_agent": "pydantic_ai",
    "smolagents_agent": "smolagents",
    "smolagents_code_agent": "smolagents",
}


@pytest.mark.release
@pytest.mark.parametrize("example", HARNESSES)
def test_episodes_of_two_calls_are_trained_on_and_none_is_dropped(
    example: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twenty of them at least: a policy that samples may also answer at once."""
    pytest.importorskip(HARNESSES[example])
    if example == "mini_swe_agent":
        pytest.importorskip("yaml")
        if not bubblewrap_works():
            pytest.skip("bubblewrap does not work here")
    agent = f"{EXAMPLES / example}.py:run"
    model = teach(agent, tmp_path / "taught", task=TASK, most=12, concurrency=2, num_steps=700)
    played = list[Episode]()
    record_of = agents.record_of

    def noted(*given: Any, **named: Any) -> Episode:
        played.append(record_of(*given, **named))
        return played[-1]

    monkeypatch.setattr(agents, "record_of", noted)
    settings = [f"task.name={TASK}", f"environment.agent={agent}", f"model.path={model}", "lora.enabled=false"]
    sizes = ["grpo.num_prompts=6", "grpo.group_size=4", "run.num_steps=1", "run.eval_prompts=0", "run.threads=1"]
    code, run, _ = running.train(load_config("grpo", None, overrides=[*settings, *sizes]), tmp_path)
    assert code == 0
    assert [one.failure for one in played] == [None] * 24
    assert sum(len(one.turn_ends) >= 2 for one in played) >= 20
    [line] = [line for line in running.metrics(run) if "policy/loss" in line]
    assert line["reward/dropped"] == 0
    assert line["reward/zero_spread_groups"] < 1
    assert line["optim/grad_norm"] > 0
    assert line["policy/sampling_gap"] < 1e-4


def bubblewrap_works() -> bool:
    container = load("mini_swe_agent").container_of({})
    return container.execute({"command": "true"})["returncode"] == 0


# ---- what the model writes runs in a sandbox, or not at all ----


def test_without_bubblewrap_no_command_of_a_model_is_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("minisweagent")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RuntimeError, match="bubblewrap"):
        load("mini_swe_agent").run({"prompt": "?", "boxes": {}}, "http://127.0.0.1:9/v1", "key", "policy")


def test_a_command_sees_its_episodes_folder_and_no_network_process_or_secret(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("minisweagent")
    if not bubblewrap_works():
        pytest.skip("bubblewrap does not work here")
    (tmp_path / "secret").write_text("x")
    monkeypatch.setenv("SECRET", "x")
    container = load("mini_swe_agent").container_of({"red": "key, below it coin"})

    def said(command: str) -> str:
        return container.execute({"command": command})["output"].strip()

    assert said("cat red") == "key, below it coin"
    assert said(f"cat {tmp_path}/secret 2>&1 | grep -c 'No such file'") == "1"
    assert said("ls / | grep -cE '^(home|root|work|etc|var)$'") == "0"
    assert said("env | grep -c SECRET") == "0"
    assert said("tail -n +3 /proc/net/dev | cut -d: -f1") == "lo"
    assert int(said("ls /proc | grep -cE '^[0-9]+$'")) < 8
    assert said("touch /usr/x 2>&1 | grep -c 'Read-only'") == "1"


def test_without_a_sandbox_no_code_of_a_model_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("smolagents")
    monkeypatch.setattr(sandbox.sys, "platform", "darwin")
    with pytest.raises(sandbox.CannotIsolate):
        load("smolagents_code_agent").Sandbox("")


@pytest.mark.sandbox
def test_code_of_a_model_has_its_tools_and_stays_in_the_sandbox() -> None:
    """Names stay from cell to cell, until one had to be stopped; the tools are there again."""
    pytest.importorskip("smolagents")
    example = load("smolagents_code_agent")
    box = example.Sandbox(example.tools_with({"red": "key, below it coin"}))
    try:
        assert box('print(look(colour="red"))').logs == "key, below it coin\n"
        assert box("x = 2\nx").output == "2"
        assert box("x + 1").output == "3"
        assert "PermissionError" in box("open('/etc/passwd')").output
        assert not box("1").is_final_answer
        with pytest.raises(RuntimeError, match="stopped"):
            box("while True: pass")
        assert "NameError" in box("x").output
        final = box('final_answer(look("red").split(",")[0])')
        assert (final.output, final.is_final_answer) == ("key", True)
    finally:
        box.cleanup()
