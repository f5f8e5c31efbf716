"""The table of metrics: what each means, when it is healthy, and where it is shown.

It is the only place that knows: a metric without a line here is recorded and not shown. docs/runs.md has every key of
metrics.jsonl with its formula.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Metric:
    """A key of metrics.jsonl and `held`, its held-out counterpart; or a chart of several keys, `series`.

    meaning, healthy, title (none: no chart), unit: the text of its chart in the report; share (a percentage),
    from_zero, floor, any_scale (may be logarithmic): its axis; greedy: greedy held-out values are drawn too; skip_zero:
    no chart where it is zero throughout; examples: measures learning from examples, and heads the report of a run
    without rewards; series: lines of the chart and their keys, "*" for each reward function, "*/*" for each criterion
    of a judge. label: in tables of results; column: in the progress display; row: in the summary of a run; score: what
    it is in the sentence about how a run went, which is of the first that the run has. Everything is shown in the order
    of the table.
    """

    key: str
    meaning: str = ""
    healthy: str = ""
    held: str = ""
    title: str = ""
    unit: str = ""
    share: bool = False
    from_zero: bool = False
    floor: float = -math.inf
    any_scale: bool = False
    greedy: bool = False
    skip_zero: bool = False
    examples: bool = False
    series: dict[str, str] = field(default_factory=dict)
    label: str = ""
    column: str = ""
    row: str = ""
    score: str = ""

    @property
    def keys(self) -> tuple[str, str]:
        """Return its keys in training and held out; "" where there is none."""
        return ("", self.key) if self.key.startswith("eval/") else (self.key, self.held)


TABLE = (
    Metric("reward/mean", "The mean score.",
        "held-out rises with training; training up while held-out falls is memorising or a reward that is being gamed.",
        held="eval/reward_mean", title="Reward", unit="higher is better", greedy=True, label="Reward", column="reward",
        score="reward"),
    Metric("eval/greedy/reward_mean", label="Reward, greedy"),
    Metric("rewards/accuracy", "Pairs whose chosen side is preferred.", "rises above 50 %, held out too.",
        held="eval/accuracy", title="Accuracy", unit="higher is better", share=True, examples=True, label="Accuracy",
        column="accuracy", score="preference accuracy"),
    Metric("loss", "What is minimised.", "training and held-out fall together.", held="eval/loss", title="Loss",
        unit="lower is better", any_scale=True, examples=True, label="Loss", column="loss", score="loss"),
    Metric("preference/loss", "What is minimised.", "training and held-out fall together.", held="eval/loss",
        title="Loss", unit="lower is better", any_scale=True, examples=True, score="loss"),
    Metric("rewards/margin", "Reward of the chosen side less that of the rejected one.", "grows.", held="eval/margin",
        title="Margin", examples=True, column="margin"),
    Metric("eval/reward_mean", column="held-out", row="held-out reward, mean"),
    Metric("eval/reward_median", row="held-out reward, median"),
    Metric("eval/pass@1", "Held-out prompts solved by one try.",
        "rises with the reward; else the reward measures something else.", title="pass@1",
        unit="held-out, full marks", share=True, from_zero=True, greedy=True, label="pass@1", column="pass@1",
        row="pass@1, sampled"),
    Metric("eval/greedy/pass@1", row="pass@1, greedy"),
    Metric("eval/functions", "",
        "all rise together; one up while another falls is the first sign that the reward is being gamed.",
        title="Held-out reward by function", unit="before weights",
        series={"*": "eval/reward/*", "verifier": "eval/verifier_mean"}),
    Metric("reward/functions", "The same in training.", "what rises here rises held out too.",
        title="Reward by function", unit="training, before weights", series={"*": "reward/*"}),
    Metric("eval/criteria", "What a judge gives for each criterion.",
        "all rise together; one that falls is paid for the others: give it a larger weight.",
        title="Held-out score by criterion", unit="0 to 1, before weights", series={"*/*": "eval/reward/*"}),
    Metric("reward/criteria", "The same in training.", "what rises here rises held out too.",
        title="Score by criterion", unit="training, before weights", series={"*/*": "reward/*"}),
    Metric("teacher/loss", "Distance to the teacher, which is minimised.", "falls towards 0.",
        title="Distance to the teacher", unit="nats per token", from_zero=True, column="distance"),
    Metric("teacher/quarters", "The same by where a token stands in its response.",
        "all fall; a last one that stays high is where responses leave what the teacher knows.",
        title="KL to the teacher by quarter", unit="nats per token",
        series={"first": "teacher/kl_1", "second": "teacher/kl_2", "third": "teacher/kl_3", "last": "teacher/kl_4"}),
    Metric("teacher/logprob", "How likely the policy's tokens are to the teacher.", "rises.",
        title="Teacher's log-probability", unit="nats per token"),
    Metric("objective/kl", "How far the policy has moved from its start.",
        "a slow rise that buys reward; a jump is too large a step.", held="eval/kl", title="KL from the reference",
        unit="nats per response", from_zero=True, label="KL", column="kl"),
    Metric("eval/kl", row="KL to the reference, nats"),
    Metric("eval/loss", column="held-out loss", row="loss, held-out"),
    Metric("eval/perplexity", row="perplexity, held-out"),
    Metric("eval/accuracy", row="accuracy, held-out"),
    Metric("rewards/sides", "Both sides of the pairs.", "they part; both may fall.", title="Rewards of both sides",
        unit="training", series={"chosen": "rewards/chosen", "rejected": "rewards/rejected"}),
    Metric("policy/sides_logprobs", "How likely both sides are.",
        "they part; a steep fall of the chosen is forgetting.", title="Log-probabilities",
        unit="training, nats per answer",
        series={"chosen": "policy/chosen_logprobs", "rejected": "policy/rejected_logprobs"}),
    Metric("policy/entropy", "How undecided the policy is.",
        "a slow fall; near 0 all completions of a prompt are alike and nothing more is learnt.", held="eval/entropy",
        title="Entropy", unit="nats per token", from_zero=True, label="Entropy", column="entropy"),
    Metric("completion/mean_length", "Tokens that the policy wrote.",
        "steady, or growing with the reward; growing alone is length creep.", held="eval/mean_length",
        title="Completion length", unit="tokens", from_zero=True, label="Length", column="length"),
    Metric("completion/truncated", "Completions cut at generation.max_new_tokens.",
        "below 5 %; what is cut is scored unfinished.", held="eval/truncated", title="Cut at the length limit",
        unit="share of completions", share=True, from_zero=True, skip_zero=True, label="Cut at the limit"),
    Metric("completion/stopped_in_thought", "Completions that a stop string ended inside a thought.",
        "0; they have no answer. Choose stop strings that no thought holds.", held="eval/stopped_in_thought",
        title="Stopped in a thought", unit="share of completions", share=True, from_zero=True, skip_zero=True),
    Metric("environment/turns", "How many turns the policy takes in an episode.", "as many as the task needs.",
        held="eval/environment/turns", title="Turns", unit="the policy's, per episode", from_zero=True, greedy=True,
        label="Turns"),
    Metric("environment/invalid_calls", "Turns with a call that could not be executed, or that the tool refused.",
        "falls towards 0.",
        held="eval/environment/invalid_calls", title="Invalid calls", unit="turns per episode", from_zero=True,
        skip_zero=True, label="Invalid calls"),
    Metric("environment/tool_errors", "Turns in which a tool raised an exception other than ValueError.",
        "0; else the tool, or what it asks, is broken or down.", held="eval/environment/tool_errors",
        title="Errors of tools", unit="turns per episode", from_zero=True, skip_zero=True),
    Metric("environment/cut_observations", "Replies cut at environment.max_observation_tokens.", "near 0.",
        held="eval/environment/cut_observations", title="Cut replies", unit="replies per episode", from_zero=True,
        skip_zero=True),
    Metric("environment/observation_tokens", "What the environment answered; read, not learnt.", "steady.",
        held="eval/environment/observation_tokens", title="Tokens read", unit="the environment's, per episode",
        from_zero=True),
    Metric("environment/out_of_turns", "Episodes that ended at environment.max_turns.",
        "falls; else allow more turns.", held="eval/environment/out_of_turns", title="Out of turns",
        unit="share of episodes", share=True, from_zero=True, skip_zero=True),
    Metric("preference/nll", "How well the chosen answers are predicted.", "falls.", title="Likelihood loss",
        unit="ORPO's, nats per token", from_zero=True),
    Metric("preference/kl", "KTO's estimate of how far the policy has moved.", "small, and not steadily rising.",
        title="KL estimate", unit="KTO's, nats per answer", from_zero=True, skip_zero=True),
    Metric("value/loss", "The critic's squared error.", "falls at first, then steady.", title="Value loss",
        unit="lower is better", from_zero=True, any_scale=True),
    Metric("value/explained_variance", "What the critic knows of the returns.",
        "rises towards 1; at 0 or below it is not better than their mean.", title="Explained variance",
        unit="1 is best", floor=-1),
    Metric("reward/std", "How much rewards differ.", "above 0; at 0 there is nothing to tell better from worse.",
        held="eval/reward_std", title="Reward standard deviation", unit="completions",
        from_zero=True),
    Metric("reward/zero_spread_groups", "Groups whose completions all scored the same: advantage 0.",
        "below half; else prompts are too easy or too hard.", title="Groups with equal rewards",
        unit="no gradient", share=True, from_zero=True, skip_zero=True),
    Metric("reward/zero_spread_kept"),
    Metric("turn/zero_spread", "Turns whose return is that of all others in the group, or that no other reached.",
        "below half; else a turn seldom decides anything, or groups are too small to share its number.",
        title="Turns with equal returns", unit="share of turns, advantage 0", share=True, from_zero=True),
    Metric("turn/rewards", "What the first turns earn; the outcome is a reward of the last.", "all rise.",
        title="Reward by turn", unit="training, of those that reached it",
        series={f"turn {turn}": f"turn/reward_{turn}" for turn in range(1, 6)}),
    Metric("reward/known_prompts"),
    Metric("reward/slowest_seconds"),
    Metric("reward/dropped", "Completions without a valid reward.", "0; failed_rewards.jsonl says why.",
        title="Rewards dropped", unit="completions without a valid one", from_zero=True, skip_zero=True),
    Metric("policy/clipfrac", "Tokens outside the clip range.",
        "below 20 %; more means steps too large or too many for one rollout.", title="Clip fraction",
        unit="share of tokens", share=True, from_zero=True, skip_zero=True),
    Metric("optim/grad_norm", "",
        "steady; single spikes are cut at optim.max_grad_norm, a rising trend is instability.", title="Gradient norm",
        unit="policy, before clipping", from_zero=True, any_scale=True),
    Metric("value/grad_norm", "", "falls as the critic learns, then steady.", title="Critic's gradient norm",
        unit="before clipping", from_zero=True, any_scale=True),
    Metric("optim/learning_rate",
        "As the schedule has it. A reward that falls while this is highest asks for a lower one.",
        title="Learning rate", unit="policy", from_zero=True),
    Metric("tokens_per_second", column="tokens/s"),
    Metric("time", "", "the same from step to step; sampling and update take most of it.", title="Time by phase",
        unit="seconds per step, without evaluation"),
)  # fmt: skip

# Beside these, reward/NAME is the mean of a reward function.
REWARD_STATISTICS = {metric.key for metric in TABLE if metric.key.startswith("reward/") and not metric.series}


def metric_of(key: str) -> Metric:
    """Return the line of the table with this key."""
    return next(metric for metric in TABLE if metric.key == key)


def meaning_of(key: str) -> str:
    """Return what a chart's metric means and what is healthy; "" for a metric that is not in the table."""
    explained = [metric for metric in TABLE if metric.meaning or metric.healthy]
    found = (metric for metric in explained if key in (metric.key, metric.held, f"eval/{metric.key}"))
    metric = next(found, Metric(key))
    text = f"{metric.meaning} Healthy: {metric.healthy}" if metric.healthy else metric.meaning
    return text.strip().replace(" %", "\u00a0%")
