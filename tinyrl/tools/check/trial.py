"""What a policy answered to some of its training prompts before a run, and the figures of that."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property

from tinyrl.config.schema import Config
from tinyrl.data.rows import solved_from
from tinyrl.nan import mean, numbers
from tinyrl.tasks.grading import last_number, marked_answer, normalised_text, parse_number
from tinyrl.tools.check.images import Look
from tinyrl.tools.check.loaded import Answer


@dataclass(frozen=True)
class Trial:
    """What a policy answered before its first step. A figure that is not known is NaN, for which no condition holds.

    groups: the answers to each prompt; greedy: one more of each; knows_gold: the reward gives full marks to gold
    answers, alone or in a form; paid_example: an answer in the form that it pays for; rollout_seconds: to sample a
    step; step_seconds: estimated for the largest one; positions: tokens that an answer behind the longest prompt may
    have, without what is read between its turns; prompts_there: prompts to train on; prompts_wanted: of them to be
    tried; seconds: that the trial took; player: the environment or agent that plays the episodes, as messages name
    it; is_environment_alone: nothing but the replies of the environment rewards an episode; looks: prompts with images
    that were asked without them too.
    """

    config: Config
    groups: list[list[Answer]]
    greedy: list[Answer]
    knows_gold: bool = False
    paid_example: str | None = None
    rollout_seconds: float = 0.0
    step_seconds: float = 0.0
    positions: float = math.inf
    prompts_there: int = 0
    prompts_wanted: int = 0
    seconds: float = 0.0
    player: str = "the environment"
    is_environment_alone: bool = False
    looks: list[Look] = field(default_factory=list)

    # ---- rewards ----

    @property
    def prompts(self) -> int:
        return len(self.groups)

    @property
    def samples(self) -> int:
        return len(self.groups[0])

    @cached_property
    def answers(self) -> list[Answer]:
        return [answer for group in self.groups for answer in group]

    @cached_property
    def rewards(self) -> list[float]:
        return numbers([answer.reward for answer in self.answers])

    @property
    def dropped(self) -> float:
        """Return the share of completions without a reward."""
        return 1 - len(self.rewards) / len(self.answers)

    @property
    def play_failed(self) -> float:
        """Return the share of episodes in which the environment or the agent failed."""
        return mean([answer.play_failed for answer in self.answers])

    @property
    def reward_mean(self) -> float:
        return mean(self.rewards)

    @property
    def reward_greedy(self) -> float:
        return mean([answer.reward for answer in self.greedy])

    @cached_property
    def pass_rates(self) -> list[float]:
        solved = solved_from(self.config.task.solved_reward)
        return [mean([answer.score >= solved for answer in rewarded(group)]) for group in self.groups]

    @property
    def pass_rate(self) -> float:
        return mean(self.pass_rates)

    @property
    def knows_right(self) -> bool:
        """Return whether a right answer is known to score as one."""
        return self.knows_gold or any(rate > 0 for rate in self.pass_rates)

    @property
    def most_rewarded_turns(self) -> int:
        return max(answer.rewarded_turns for answer in self.answers)

    @property
    def best_beyond_solved(self) -> float | None:
        """Return the highest reward where it is above that from which a completion counts as solved, and nobody has
        given the latter.
        """
        task = self.config.task
        best = max((answer.score for answer in rewarded(self.answers)), default=-math.inf)
        is_beyond = best > task.solved_reward + 1e-6 and not self.config.given.has("task.solved_reward")
        return best if is_beyond else None

    @property
    def has_groups(self) -> bool:
        """Return whether the run compares completions of one prompt."""
        return self.config.on_policy.group_size > 1

    @property
    def group_size(self) -> int:
        """Return the completions of a prompt that are compared: of the run's groups, else those of this trial."""
        size = self.config.on_policy.group_size
        return size if size > 1 else self.samples

    @cached_property
    def spread(self) -> float:
        """Return the share of groups of the run's size whose rewards differ."""
        return with_spread(self.groups, self.group_size)

    @cached_property
    def missed(self) -> list[Answer]:
        """Return the completions that hold the reference answer and are not scored as right, though it is, alone."""
        solved = solved_from(self.config.task.solved_reward)
        unsolved = [answer for answer in self.answers if answer.gold and not answer.score >= solved]
        return [one for one in unsolved if holds_answer(one.text, str(one.gold))] if self.knows_gold else []

    # ---- lengths and texts ----

    @property
    def limit(self) -> int:
        return self.config.generation.max_new_tokens

    @property
    def mean_length(self) -> float:
        return mean([answer.tokens for answer in self.answers])

    @property
    def longest(self) -> int:
        return max(answer.tokens for answer in self.answers)

    @property
    def truncated(self) -> float:
        return mean([answer.cut for answer in self.answers])

    @property
    def stopped_in_thought(self) -> float:
        return mean([answer.stopped_in_thought for answer in self.answers])

    @property
    def entropy(self) -> float:
        """Return nats per token, estimated by the sampled tokens."""
        tokens = sum(answer.tokens for answer in self.answers)
        return -sum(answer.logprob for answer in self.answers) / max(1, tokens)

    @property
    def distinct(self) -> float:
        """Return the share of a prompt's completions that are different texts."""
        return mean(self.texts_by_prompt) / self.samples

    @property
    def texts_by_prompt(self) -> list[int]:
        return [len({answer.text for answer in group}) for group in self.groups]

    @property
    def texts(self) -> int:
        return len({answer.text for answer in self.answers})


def rewarded(answers: list[Answer]) -> list[Answer]:
    return [answer for answer in answers if not math.isnan(answer.reward)]


def with_spread(groups: list[list[Answer]], size: int) -> float:
    """Return the expected share of groups of this size whose rewards differ, drawn from the answers there are without
    putting back; NaN where there are fewer.
    """
    shares = []
    for group in groups if size <= len(groups[0]) else []:
        known = numbers([answer.reward for answer in group])
        drawn = min(size, len(known))
        alike = sum(math.comb(count, drawn) for count in Counter(known).values())
        shares.append(0.0 if drawn < 2 else 1 - alike / math.comb(len(known), drawn))
    return mean(shares)


def holds_answer(text: str, gold: str) -> bool:
    """Return whether a text holds the reference answer, as its last number or anywhere in its words."""
    answer = marked_answer(gold) or gold
    if (wanted := parse_number(answer)) is not None:
        return parse_number(last_number(text)) == wanted
    words = normalised_text(answer)
    return len(words) > 2 and words in normalised_text(text)
