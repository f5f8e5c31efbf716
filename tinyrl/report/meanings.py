"""What each chart means and what is healthy, in one line under it."""

_MEANINGS = {
    "reward/mean": "The mean score. Healthy: held-out rises with training; training up while held-out falls is "
    "memorising or a reward that is being gamed.",
    "objective/kl": "How far the policy has moved from its start. Healthy: a slow rise that buys reward; a jump is too "
    "large a step.",
    "policy/entropy": "How undecided the policy is. Healthy: a slow fall; near 0 all completions of a prompt are alike "
    "and nothing more is learnt.",
    "completion/mean_length": "Tokens that the policy wrote. Healthy: steady, or growing with the reward; growing "
    "alone is length creep.",
    "completion/truncated": "Completions cut at generation.max_new_tokens. Healthy: below 5 %; what is cut is scored "
    "unfinished.",
    "environment/turns": "How often the policy speaks in an episode. Healthy: as many as the task needs.",
    "environment/invalid_calls": "Turns that the environment could not read. Healthy: falls towards 0.",
    "environment/observation_tokens": "What the environment answered; read, not learnt. Healthy: steady.",
    "environment/out_of_turns": "Episodes that ended at environment.max_turns. Healthy: falls; else allow more turns.",
    "eval/pass@1": "Held-out prompts solved by one try. Healthy: rises with the reward; else the reward measures "
    "something else.",
    "preference/nll": "How well the chosen answers are predicted. Healthy: falls.",
    "preference/kl": "KTO's estimate of how far the policy has moved. Healthy: small, and no steady rise.",
    "preference/loss": "What is minimised. Healthy: training and held-out fall together.",
    "preference/accuracy": "Pairs whose chosen side is preferred. Healthy: rises above 50 %, held out too.",
    "rewards/accuracy": "Pairs whose chosen side is preferred. Healthy: rises above 50 %, held out too.",
    "rewards/margin": "Reward of the chosen side less that of the rejected one. Healthy: grows.",
    "rewards/sides": "Both sides of the pairs. Healthy: they part; both may fall.",
    "policy/sides_logprobs": "How likely both sides are. Healthy: they part; a steep fall of the chosen is forgetting.",
    "value/loss": "The critic's squared error. Healthy: falls at first, then steady.",
    "value/explained_variance": "What the critic knows of the returns. Healthy: rises towards 1; at 0 or below it is "
    "no better than their mean.",
    "reward/std": "How much rewards differ. Healthy: above 0; at 0 there is nothing to tell better from worse.",
    "reward/zero_spread_groups": "Groups whose completions all scored the same: advantage 0. Healthy: below half; else "
    "prompts are too easy or too hard.",
    "reward/dropped": "Completions without a valid reward. Healthy: 0; failed_rewards.jsonl says why.",
    "policy/clipfrac": "Tokens outside the clip range. Healthy: below 20 %; more means steps too large or too many for "
    "one rollout.",
    "optim/grad_norm": "Healthy: steady; single spikes are cut at optim.max_grad_norm, a rising trend is instability.",
    "value/grad_norm": "Healthy: falls as the critic learns, then steady.",
    "optim/learning_rate": "As the schedule has it. A reward that falls while this is highest asks for a lower one.",
    "eval/functions": "Healthy: all rise together; one up while another falls is the first sign that the reward is "
    "being gamed.",
    "reward/functions": "The same in training. Healthy: what rises here rises held out too.",
    "time": "Healthy: the same from step to step; sampling and update take most of it.",
}
_HELD_OUT = {  # where the held-out figure's name is not the training one's with eval/ before it
    "eval/reward_mean": "reward/mean",
    "eval/reward_std": "reward/std",
    "eval/kl": "objective/kl",
    "eval/entropy": "policy/entropy",
    "eval/mean_length": "completion/mean_length",
    "eval/truncated": "completion/truncated",
    "eval/accuracy": "rewards/accuracy",
    "eval/loss": "preference/loss",
}


def meaning_of(key: str) -> str:
    """The line for a panel's key, "" where its metric is not one of tinyrl's."""
    if key.startswith("loss/") or key == "loss":
        return _MEANINGS["preference/loss"]
    meaning = _MEANINGS.get(key) or _MEANINGS.get(_HELD_OUT.get(key, key.removeprefix("eval/")), "")
    return meaning.replace(" %", "\u00a0%")
