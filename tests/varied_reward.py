"""A reward that varies even on a random model, as a user would write one."""


def variety(prompts, completions, **columns):
    """Number of distinct characters."""
    return [float(len(set(completion))) for completion in completions]
