"""Answers of a policy: what was planted in them is found with the setting to change, and nothing where a run learns."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from tinyrl.config.recipe import load_config
from tinyrl.rewards.holes import RightAnswers
from tinyrl.tools.check import policy, sampled
from tinyrl.tools.check.early_end import an_early_end
from tinyrl.tools.check.loaded import Answer
from tinyrl.tools.check.policy import section
from tinyrl.tools.check.rates import rates_by_row
from tinyrl.tools.check.right_answers import PaidForm
from tinyrl.tools.check.sampled import Pace, look, with_gold
from tinyrl.tools.check.trial import Trial, with_spread


def groups_of(
    rewards: list[list[float]], texts: list[str] | None = None, *, penalty: float = 0.0, **fields: Any
) -> list[list[Answer]]:
    fields = {"tokens": 4, "cut": False, "gold": None, "failed": None, **fields}

    def answer(row: int, i: int) -> Answer:
        text = texts[i] if texts else f"text {row} {i}"
        reward = rewards[row][i]
        return Answer(text, reward, score=reward + penalty, row=str(row), **fields)

    return [[answer(row, i) for i in range(len(group))] for row, group in enumerate(rewards)]


def planted(groups: list[list[Answer]], *settings: str, **changes: Any) -> Trial:
    config = load_config("grpo", "starter-grpo", overrides=list(settings))
    return Trial(config, groups, changes.pop("greedy", [group[0] for group in groups]), **changes)


def test_a_long_answer_that_is_right_counts_as_right() -> None:
    """Length took 0.5 of every reward; those of the second prompt were 0."""
    groups = groups_of([[0.5, 0.5], [-0.5, 0.5]], penalty=0.5)
    assert rates_by_row(planted(groups)) == {"0": 1.0, "1": 0.5}
    assert rates_by_row(planted(groups_of([[0.5, 0.5], [-0.5, 0.5]]))) == {"0": 0.0, "1": 0.0}


@pytest.mark.parametrize(
    ("settings", "of_shares", "is_found"),
    [
        (["run.patience=3", "run.eval_prompts=4"], False, True),
        (["run.patience=3", "run.eval_prompts=5"], False, False),
        (["run.patience=3", "run.eval_prompts=4"], True, False),
        (["run.eval_prompts=4"], False, False),
    ],
)
def test_patience_that_no_held_out_reward_can_meet_is_found(
    settings: list[str], *, of_shares: bool, is_found: bool
) -> None:
    collector: Any = SimpleNamespace(
        config=load_config("grpo", "starter-grpo", overrides=settings),
        scorer=SimpleNamespace(right_or_wrong=of_shares),
        eval_prompts=[None] * 64,
    )
    ends = an_early_end(collector, [0.0, 1.0, 0.0, 1.0])
    assert (ends is not None) is is_found
    assert ends is None or ends.figures == {"held_out": 4, "needed": 5}


def found(trial: Trial) -> dict[str, str]:
    return {one.name: one.change for one in section(trial).findings}


@pytest.mark.parametrize("in_thought", [True, False])
def test_a_line_says_how_many_completions_a_stop_string_ended_in_a_thought(*, in_thought: bool) -> None:
    shown = section(planted(groups_of([[0.5, 0.5]], stopped_in_thought=in_thought)))
    assert len([line for line in shown.lines if "100%" in line and "thought" in line]) == in_thought
    assert shown.facts["stopped_in_thought"] == in_thought


MIXED = [[1.0, 0.0] * 4] * 16
SAME = [[0.5] * 8] * 16


@pytest.mark.parametrize(
    ("seen", "name", "change"),
    [
        ({"rewards": [[1.0, math.nan] * 4] * 16, "failed": "no table"}, "rewards dropped", "reward"),
        ({"rewards": [[math.nan] * 8] * 16}, "no reward yet", "tinyrl train sft"),
        ({"rewards": SAME}, "one reward for everything", "reward"),
        ({"rewards": MIXED, "cut": True}, "nothing ends", "generation.stop"),
        ({"rewards": MIXED, "texts": ["", "3 4"] * 4}, "empty completions", "task.chat"),
        ({"rewards": [[0.0] * 8] * 16, "knows_gold": True}, "too hard", "tinyrl train sft"),
        ({"rewards": [[1.0] * 8] * 16, "knows_gold": True}, "too easy", "task.sampler=difficulty"),
        ({"rewards": [[1.0] * 8, [0.0] * 8] * 8}, "prompts that are decided", "task.sampler=difficulty"),
        ({"rewards": [[0.0] * 8] * 16, "texts": ["so 7"] * 8, "knows_gold": True, "gold": "#### 7"},
         "right answers in another form", "task.system_prompt"),
        ({"rewards": [[0.0, 1.0] * 4] * 16, "texts": ["a"] * 8}, "all completions alike", "generation.temperature"),
        ({"rewards": MIXED, "rollout_seconds": 1e6}, "a long run", "run.num_steps"),
    ],
)  # fmt: skip
def test_what_is_planted_is_found(seen: dict[str, Any], name: str, change: str) -> None:
    fields = {key: seen.pop(key) for key in [*seen] if key not in ("knows_gold", "rollout_seconds")}
    assert change in found(planted(groups_of(**fields), **seen))[name]


@pytest.mark.parametrize(("reward", "name"), [(math.nan, "no reward yet"), (0.0, "too hard")])
def test_a_format_that_is_never_written_is_shown_beside_what_is(reward: float, name: str) -> None:
    groups = groups_of([[reward] * 8] * 16, texts=[f"It is {i}" for i in range(8)])
    seen = planted(groups, knows_gold=True, paid_example="<answer>7</answer>")
    [finding] = section(seen).findings
    assert finding.name == name
    assert "<answer>7</answer>" in finding.what
    assert "It is 0" in finding.what


def test_episodes_without_a_reward_name_the_environment_that_gave_none() -> None:
    for rewards, name in ([math.nan] * 8, "no reward yet"), ([1.0] + [math.nan] * 7, "rewards dropped"):
        alone = found(planted(groups_of([rewards] * 16), is_environment_alone=True, player="environment `maze`"))
        assert "Reply(" in alone[name]
        assert "Reply(" not in found(planted(groups_of([rewards] * 16)))[name]


@pytest.mark.parametrize(
    ("highest", "given", "is_said"),
    [
        (1.5, [], True),
        (1.0, [], False),
        (1.5, ["task.solved_reward=1.5"], False),
        (1.5, ["task.solved_reward=1"], False),
    ],
)
def test_rewards_above_those_that_count_as_solved_are_shown_where_nobody_has_said_which(
    highest: float, given: list[str], is_said: bool
) -> None:
    groups = groups_of([[highest, 0.5] * 4] * 16, rewarded_turns=3)
    text = "\n".join(section(planted(groups, *given)).lines)
    assert ("task.solved_reward" in text) == is_said
    assert ("turns are added up" in text) == is_said


def test_hardly_any_group_with_spread_is_found_without_a_known_right_answer() -> None:
    rewards = [[0.0] * 8] * 63 + [[0.0] * 7 + [0.5]]
    assert "too hard" in found(planted(groups_of(rewards)))
    assert "too hard" not in found(planted(groups_of([[0.0] * 7 + [0.5]] * 64)))


@pytest.mark.parametrize("rewards", [[0.0] * 8, [0.5] * 8, [1.0] * 8])
def test_a_distillation_has_no_finding_about_rewards(rewards: list[float]) -> None:
    seen = planted(groups_of([rewards] * 16, texts=[f"so 7 {i}" for i in range(8)], gold="#### 7"), knows_gold=True)
    distillation = load_config("distill", "starter-distill", overrides=["distill.group_size=8"])
    assert found(seen)
    assert found(replace(seen, config=distillation)) == {}


def test_a_run_without_groups_is_told_of_prompts() -> None:
    alone = load_config("ppo", "starter-ppo", overrides=["ppo.group_size=1"])
    seen = replace(planted(groups_of([[0.0] * 8] * 16), knows_gold=True), config=alone)
    page = section(seen)
    assert [one.name for one in page.findings] == ["too hard"]
    assert "group" not in page.render() + page.findings[0].what


@pytest.mark.parametrize(("right", "is_finding"), [(0, True), (7, False)])
def test_a_completion_that_holds_the_gold_answer_and_scores_nothing_is_shown(right: int, is_finding: bool) -> None:
    """Eight of eight of them are a finding, one of eight is a line."""
    said = "The capital of France is Paris, I think."
    groups = groups_of(
        [[1.0] * right + [0.0] * (8 - right)] * 16, texts=["Paris"] * right + [said] * (8 - right), gold="Paris"
    )
    seen = planted(groups, knows_gold=True)
    name = "right answers in another form"
    whats = {one.name: one.what for one in section(seen).findings}
    assert (name in whats) == is_finding
    assert said in (whats[name] if is_finding else section(seen).render())
    assert said not in section(planted(groups_of([[0.0] * 8] * 16, texts=["no"] * 8, gold="Paris"))).render()


@pytest.mark.parametrize(("reward", "missed"), [(math.nan, 8), (0.5, 8), (1.0, 0)])
def test_a_completion_with_the_gold_answer_is_missed_without_full_marks(reward: float, missed: int) -> None:
    """Without a score, too."""
    seen = planted(groups_of([[reward] * 8], texts=["so 7"] * 8, gold="#### 7"), knows_gold=True)
    assert len(seen.missed) == missed


def test_cut_off_answers_get_a_longer_limit_within_the_positions() -> None:
    groups = groups_of(MIXED[:5], cut=True) + groups_of(MIXED[5:])
    seen = planted(groups, "generation.max_new_tokens=16", positions=88.0)
    assert "generation.max_new_tokens=32" in found(seen)["cut off"]
    short = planted(groups, "generation.max_new_tokens=16", positions=8.0)
    assert "generation.max_new_tokens" not in found(short)["cut off"]


def test_a_group_that_is_too_small_is_found() -> None:
    """Prompts that are mostly wrong: groups of two hardly ever hold a right answer, of eight they do."""
    groups = groups_of([[1.0] + [0.0] * 15] * 16)
    changes = found(planted(groups, "grpo.group_size=2"))
    assert {name: change.split(",")[0] for name, change in changes.items()} == {"group too small": "grpo.group_size=8"}
    assert [with_spread(groups, size) for size in (2, 4, 8, 16)] == pytest.approx([0.125, 0.25, 0.5, 1.0])
    assert math.isnan(with_spread(groups, 32))


def test_a_reward_that_follows_length_is_found() -> None:
    groups = groups_of([[float(i) for i in range(8)]] * 16)
    longer = [[a._replace(tokens=3 + int(a.reward)) for a in group] for group in groups]
    assert "reward follows length" in found(planted(longer))


def test_a_temperature_that_is_too_high_is_found() -> None:
    groups = groups_of(MIXED)
    for reward, expected in ((1.0, {"temperature too high": "generation.temperature=1.0."}), (0.5, {})):
        greedy = [group[0]._replace(reward=reward) for group in groups]
        assert found(planted(groups, "generation.temperature=1.5", greedy=greedy)) == expected


def test_spread_is_that_of_groups_drawn_from_what_was_sampled() -> None:
    groups = groups_of([[1.0, 1.0, 0.0, 0.0], [0.25, 0.5, 0.75, 1.0], [0.0] * 4, [math.nan] * 3 + [1.0]])
    pairs = 1 - 2 / 6  # of two zeros and two ones
    assert with_spread(groups, 2) == pytest.approx((pairs + 1 + 0 + 0) / 4)
    assert planted(groups).pass_rates == [0.5, 0.25, 0.0, 1.0]


def test_groups_whose_rewards_differ_raise_no_alarm_and_facts_hold_what_is_shown() -> None:
    shown = section(planted(groups_of(MIXED)))
    assert shown.findings == []
    assert [*shown.facts["pass_rates"].values()] == [0, 0, 16, 0, 0, 0]
    assert shown.facts["groups_with_spread"] == 1.0
    unknown = section(planted(groups_of([[math.nan] * 4] * 4)))
    assert unknown.facts["pass_rates"] is None
    assert math.isnan(unknown.facts["reward_mean"])


class Clock:
    """A clock that only sampling moves on: ten seconds a prompt."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def sampled(self, collector: Any, prompts: list[Any], samples: int, *, greedy: bool) -> list[Answer]:
        self.now += 0.0 if greedy else 10.0 * len(prompts)
        answer = Answer("a", 1.0, score=1.0, tokens=1, cut=False, gold=None, row="", failed=None)
        return [answer] * (samples * len(prompts))


def collector_of(prompts: int, *, longest_response: int = 8) -> Any:
    """A collector of a step of 32 prompts, 8 completions each, of which one token takes 10 / 8 seconds."""
    return SimpleNamespace(
        config=load_config("grpo", "starter-grpo", overrides=[]),
        train_prompts=[SimpleNamespace(tokens=[0], row={}) for _ in range(prompts)],
        eval_prompts=[],
        policy=SimpleNamespace(positions=64),
        runner=None,
        longest_response=longest_response,
    )


@pytest.mark.parametrize(
    ("minutes", "tried"),
    [
        (0.1, 1),  # there is one at least
        (0.5, 3),  # the first takes 10 of 30 seconds, so two more fit
        (2.0, 12),
        (60.0, 20),
    ],
)
def test_sampling_ends_within_the_minutes(minutes: float, tried: int, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(sampled, "time", clock)
    monkeypatch.setattr(sampled, "answers", clock.sampled)
    trial = look(collector_of(20), knows_gold=False, minutes=minutes)
    assert (trial.prompts, trial.prompts_wanted) == (tried, 20)
    assert trial.seconds == 10.0 * tried


@pytest.mark.parametrize(("column", "gold"), [("solution", "7"), (None, None)])
def test_answers_have_the_right_one_of_a_column_that_only_the_reward_knows(
    column: str | None, gold: str | None
) -> None:
    answers = RightAnswers({0: "7"}, {0: "#### 7"}, column)
    paid = PaidForm(answers, "<answer>", {0: "<answer>7</answer>"}, score=1.0, example="<answer>7</answer>")
    prompt: Any = SimpleNamespace(row={"solution": "So.\n#### 7"})
    assert {answer.gold for answer in with_gold(groups_of([[0.0] * 2])[0], prompt, paid)} == {gold}


def test_the_largest_step_comes_before_more_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 20 minutes it is to have 16, three times a rollout of 32 prompts; 5 are too few for it."""
    clock = Clock()
    monkeypatch.setattr(sampled, "time", clock)
    monkeypatch.setattr(sampled, "answers", clock.sampled)
    trials = [look(collector_of(64, longest_response=1), knows_gold=False, minutes=minutes) for minutes in (20, 5)]
    assert [trial.step_seconds for trial in trials] == [960.0, 960.0]
    assert [trial.prompts for trial in trials] == [24, 30]


def test_prompts_that_are_sampled_together_are_counted_on_by_what_they_took() -> None:
    """Eight at a time take hardly longer than one."""
    pace = Pace(collector_of(64, longest_response=1), samples=8)
    answer = groups_of([[1.0] * 8])[0]
    for prompts, seconds in ((1, 10.0), (2, 11.0)):
        pace.add(answer, prompts=prompts, sampling=0.0, seconds=seconds)
    assert [pace.predicted(prompts) for prompts in (1, 2, 8)] == [10.0, 11.0, 17.0]
    assert [pace.fitting(left) for left in (9.0, 12.5, 60.0)] == [0, 3, 4]  # at most twice as many as before


@pytest.mark.parametrize(("samples", "known"), [(2, 0), (8, 1)])
def test_the_share_of_groups_with_spread_takes_a_group_of_samples(samples: int, known: int) -> None:
    """Groups of 8; of two samples a prompt there is none to tell by."""
    shown = section(planted(groups_of([[1.0, 0.0] * (samples // 2)] * 4), "grpo.group_size=8"))
    assert len([line for line in shown.lines if "of groups of 8" in line]) == known


def failed_episodes(share: float, **changes: Any) -> Trial:
    """Sixteen groups of eight of which so many episodes failed: no text, cut off, no reward."""
    failed = groups_of([[math.nan] * 8] * 16, [""] * 8, cut=True, failed="lost its socket", play_failed=True)
    well = groups_of(MIXED)
    count = round(8 * share)
    groups = [bad[:count] + good[count:] for bad, good in zip(failed, well, strict=True)]
    return planted(groups, player="agent `agent.py:play`", knows_gold=True, **changes)


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_failed_episodes_name_who_failed_and_not_the_reward(share: float) -> None:
    dropped = next(one for one in section(failed_episodes(share)).findings if one.name == "rewards dropped")
    assert "agent `agent.py:play`" in dropped.what
    assert "lost its socket" in dropped.what
    assert dropped.change != policy.LOOK


def test_what_only_follows_from_failed_episodes_is_left_out() -> None:
    assert [*found(failed_episodes(1.0))] == ["rewards dropped"]
    assert [*found(failed_episodes(0.75, rollout_seconds=1e6))] == ["rewards dropped", "a long run"]


def test_findings_of_texts_stay_where_a_reward_failed() -> None:
    trial = planted(groups_of([[math.nan] * 8] * 16, cut=True, failed="no table"), knows_gold=True)
    names = found(trial)
    assert names["rewards dropped"] == policy.LOOK
    assert [*names] == ["rewards dropped", "nothing ends"]  # and not a pass rate of nothing
