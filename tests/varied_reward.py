"""Rewards that vary even on a random model, as a user would write them."""


def variety(prompts, completions, **columns):
    """Number of distinct characters."""
    return [float(len(set(completion))) for completion in completions]


def partly_solved(prompts, completions, **columns):
    """1 for prompts whose first letter is an early one, else less than that, by distinct characters."""
    pairs = zip(prompts, completions, strict=True)
    return [1.0 if prompt[9] < "m" else len(set(completion)) / 100 for prompt, completion in pairs]
