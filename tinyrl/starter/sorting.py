"""The sort-letters text: eight different letters and their alphabetical order, with the mistakes its writers make.

Two kinds of mistakes are put into the pre-training text on purpose, so that training has something to repair.
A *habit* hits greedy decoding too: when both letters of a confused pair occur (m and n, say) they mostly come out
in the wrong order. A *slip* only costs probability: two neighbours swapped, a letter left out or written twice,
anywhere. Neither kind can ever be the right answer, since the letters of a prompt are all different.
"""

import functools
import random
import string

from tinyrl.starter import check_split, split_of

NUM_LETTERS = 8
CONFUSED_PAIRS = ("bc", "gh", "ij", "kl", "mn", "pq", "uv", "xy")
HABIT_SHARE = 0.8  # how often a confused pair comes out in the wrong order
SLIP_SHARE = 0.15  # how often an answer also has a slip


def sort_prompt(letters: str) -> str:
    """The prompt for some letters: 'dba' -> 'letters: d b a sorted:'."""
    return f"letters: {' '.join(letters)} sorted:"


def sort_completion(letters: str) -> str:
    """How an answer is written after the prompt: 'abd' -> ' a b d'."""
    return "".join(f" {letter}" for letter in letters)


def sort_rows(split: str, *, num_rows: int, seed: int = 0) -> list[dict[str, str]]:
    """Different prompts of one split with their right answers: rows {"prompt", "answer"}."""
    return [{"prompt": prompt, "answer": answer} for prompt, answer in _drawn(split, num_rows, seed)]


@functools.cache
def _drawn(split: str, num_rows: int, seed: int) -> tuple[tuple[str, str], ...]:
    """Prompts and answers, drawn once in a process."""
    check_split(split)
    rng = random.Random(f"sort {split} {seed}")
    answers: dict[str, str] = {}
    while len(answers) < num_rows:
        letters = "".join(rng.sample(string.ascii_lowercase, NUM_LETTERS))
        prompt = sort_prompt(letters)
        if split_of(prompt) == split:
            answers[prompt] = "".join(sorted(letters))
    return tuple(answers.items())


def habitual_answer(answer: str, rng: random.Random) -> str:
    """The answer with each confused pair it holds swapped in HABIT_SHARE of the cases."""
    for pair in CONFUSED_PAIRS:
        if pair in answer and rng.random() < HABIT_SHARE:
            answer = answer.replace(pair, pair[::-1])
    return answer


def slip(answer: str, rng: random.Random) -> str:
    """The answer with one slip: two neighbours swapped, a letter left out, or a letter written twice."""
    kind = rng.randrange(3)
    if kind == 0:
        at = rng.randrange(len(answer) - 1)
        return answer[:at] + answer[at + 1] + answer[at] + answer[at + 2 :]
    at = rng.randrange(len(answer))
    return answer[:at] + answer[at + 1 :] if kind == 1 else answer[: at + 1] + answer[at:]


def written_answer(answer: str, rng: random.Random) -> str:
    """The answer as the pre-training text has it: habits always at work, and a slip in SLIP_SHARE of the rows."""
    if rng.random() < SLIP_SHARE:
        # The slip comes first: after a habit it could swap the letters back and undo it.
        return habitual_answer(slip(answer, rng), rng)
    return habitual_answer(answer, rng)
