"""Messages between run and worker, in real processes: what a function does to them fails rows, and never the run."""

import math
import textwrap
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tinyrl.environments.worker_service import EnvironmentFacts
from tinyrl.rewards.functions import FunctionReward
from tinyrl.workers import protocol
from tinyrl.workers.loading import use_of
from tinyrl.workers.process import CallFailed
from tinyrl.workers.values import RowFailure, RowResults, is_score

REWARD = """
    import contextlib, json, os, time

    def into_every_descriptor(data):
        for descriptor in range(3, 64):
            with contextlib.suppress(OSError):
                os.write(descriptor, data)

    def score(prompts, completions, **columns):
        if "bad" in completions:
            {does}
        return [float(len(text)) for text in completions]
"""
FORGED = '{"id": %d, "values": [1.0, "y", 3.0], "failures": [], "comments": [], "slowest": null}'


@pytest.mark.parametrize(
    "does",
    [
        r'into_every_descriptor(FORGED % (2 if len(prompts) > 1 else 3) + b"\n")',
        r'[into_every_descriptor(FORGED % call + b"\n") for call in range(9)]',
        r'into_every_descriptor(b"junk")',
        r'into_every_descriptor(b"junk\n")',
        r'into_every_descriptor(b"{}\n")',
        r'into_every_descriptor(b"[1]\n")',
        r'into_every_descriptor(b"\xff\n")',
        r'into_every_descriptor(b"[" * 100_000 + b"\n")',
        "json.JSONEncoder.iterencode = lambda *_, **__: ['{}']",
        "os.closerange(3, 64)",
    ],
)
@pytest.mark.wide
def test_a_function_that_disturbs_its_replies_loses_the_row_alone(
    does: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    code = f"FORGED = {FORGED.encode()!r}\n" + textwrap.dedent(REWARD).replace("{does}", does)
    (tmp_path / "rewards.py").write_text(code)
    with FunctionReward("rewards.py:score", timeout_s=10) as reward:
        call = reward(["p"] * 3, ["a", "bad", "abc"], {})
        assert ([call.values[0], call.values[2]], math.isnan(call.values[1])) == ([1.0, 3.0], True)
        assert [failure.row for failure in call.failures] == [1]
        assert reward(["p"], ["ab"], {}).values == [2.0]


@pytest.mark.parametrize(
    "does",
    [
        "json.dumps = json.loads = lambda *_, **__: 1 / 0",
        "json.JSONEncoder.encode = json.JSONDecoder.decode = lambda *_, **__: 1 / 0",
    ],
)
def test_a_function_that_patches_json_loses_nothing(does: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rewards.py").write_text(textwrap.dedent(REWARD).replace("{does}", does))
    with FunctionReward("rewards.py:score") as reward:
        call = reward(["p"] * 2, ["a", "bad"], {})
        assert (call.values, call.failures, reward.retried) == ([1.0, 3.0], [], None)
        assert reward(["p"], ["ab"], {}).values == [2.0]


def test_a_fork_that_returns_too_is_not_read_as_the_next_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    code = textwrap.dedent(REWARD).replace("{does}", "forked = os.fork() == 0")
    code += "    return [9.0] if forked else scores\n"
    (tmp_path / "rewards.py").write_text(code.replace("return [float", "scores = [float"))
    with FunctionReward("rewards.py:score") as reward:
        for _ in range(3):
            call = reward(["p"], ["bad"], {})
            assert (call.values, call.failures, reward.retried) == ([3.0], [], None)


def test_results_arrive_as_they_were_and_others_are_malformed():
    results = RowResults([1.5, None], [RowFailure(1, "why")], ["good", ""], slowest=(0.25, 1))
    reply = protocol.decode(protocol.encode({"id": 7, **protocol.encode_results(results)}))
    assert protocol.results_in(reply, 2) == results
    assert protocol.reply_to(7, protocol.encode(reply)) == reply
    with pytest.raises(protocol.Malformed):
        protocol.reply_to(8, protocol.encode(reply))
    for name, wrong in (
        ("values", [1.0]),
        ("values", {"0": 1.0}),
        ("failures", [[2, "no such row"]]),
        ("failures", [[-1, "no such row"]]),
        ("failures", [["0", "why"]]),
        ("failures", None),
        ("comments", ["one"]),
        ("comments", [1, 2]),
        ("slowest", [0.25]),
        ("slowest", [0.25, 2]),
        ("slowest", [0.25, -1]),
    ):
        with pytest.raises(protocol.Malformed):
            protocol.results_in({**reply, name: wrong}, 2)


@pytest.mark.parametrize(("values", "is_reply"), [([1.0, None], True), ([1.0, "y"], False), ([1.0, math.inf], False)])
def test_a_reply_with_one_value_that_is_no_score_is_none(
    values: list[Any], is_reply: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    how: dict[str, Any] = {"call": "score", "is_valid": is_score, "shared": {}, "timeout_s": 1.0}
    with FunctionReward(use_of(partial(len)), setting="reward") as reward:
        monkeypatch.setattr(reward, "_reply", lambda *_: protocol.encode_results(RowResults(values)))
        with nullcontext() if is_reply else pytest.raises(CallFailed):
            assert reward._ask({"completions": ["a", "b"]}, 2, **how).values == values


def test_a_record_that_is_not_the_hosts_does_not_load() -> None:
    """Whoever holds the pipe may have written any fields."""
    with (
        FunctionReward(use_of(partial(len)), setting="reward") as reward,
        pytest.raises(ValueError, match="could not be loaded"),
    ):
        reward.host_facts(EnvironmentFacts)
