"""The pre-training text of the embedded language models: letters to sort, questions to look up, reviews (reviews.py).

Mistakes are put into it on purpose, so that training has something to repair. Row i of a corpus is a function of
(seed, i) alone, so a longer one begins with the shorter one.
"""

import random

from examples.embedded_models.reviews import write_review
from tinyrl.starter import split_of, words
from tinyrl.starter.lookup import (
    ATTRIBUTES,
    FAMILIES,
    NAMES,
    RELATIONS,
    Question,
    answer_text,
    draw_question,
    fact,
    found_text,
)
from tinyrl.starter.reviews import openings
from tinyrl.starter.sort import draw_letters, sort_completion, sort_prompt

SORT_SHARE = 0.5  # of the language model's rows


def language_rows(num_rows: int, seed: int = 0) -> list[dict[str, str]]:
    """Pre-training text, sorting and reviews mixed: rows {"prompt", "completion"}; prompt + completion is the text."""
    pretraining_openings, rows = openings("pretrain"), []
    for rng in (random.Random(f"language {seed} {i}") for i in range(num_rows)):
        if rng.random() >= SORT_SHARE:
            rows.append({"prompt": rng.choice(pretraining_openings), "completion": write_review(rng).text})
            continue
        letters = draw_letters(rng)
        while split_of(sort_prompt(letters)) != "pretrain":
            letters = draw_letters(rng)
        answer = written_answer("".join(sorted(letters)), rng)
        rows.append({"prompt": sort_prompt(letters), "completion": sort_completion(answer)})
    return rows


def episode_rows(num_rows: int, seed: int = 0) -> list[dict[str, str]]:
    """Pre-training text of the lookup model, each row in a world of its own: rows {"prompt", "completion"}."""
    rows = []
    for i in range(num_rows):
        rng = random.Random(f"episodes {seed} {i}")
        question = draw_question(rng)
        while split_of(question.prompt) != "pretrain":
            question = draw_question(rng)
        rows.append({"prompt": question.prompt, "completion": written_episode(f"pretrain {seed} {i}", question, rng)})
    return rows


# ---- mistakes in sorting ----
# A *habit* hits greedy decoding too: when both letters of a confused pair occur (m and n, say) they mostly come out in
# the wrong order. A *slip* only costs probability: two neighbours swapped, a letter left out or written twice,
# anywhere. Neither can ever be the right answer, since the letters of a prompt are all different.

CONFUSED_PAIRS = ("bc", "gh", "ij", "kl", "mn", "pq", "uv", "xy")
HABIT_SHARE = 0.8  # how often a confused pair comes out in the wrong order
SLIP_SHARE = 0.15  # how often an answer also has a slip


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
        answer = slip(answer, rng)  # comes first: after a habit it could swap the letters back and undo it
    return habitual_answer(answer, rng)


# ---- episodes that look up ----
# Writers mostly guess at once, and those who search make mistakes, so that greedy decoding never searches and training
# has something to find.

GUESS_SHARE = 0.55  # of the episodes answer at once
HALFWAY_SHARE = 0.3  # of the others guess after the first of two facts
WRONG_QUERY_SHARE = 0.06  # of the queries: another name, family or key, or a word left out
WRONG_COPY_SHARE = 0.04  # of the facts that were found are copied wrongly


def written_episode(world: str, question: Question, rng: random.Random) -> str:
    """What follows a question in the pre-training text, observations in place; mostly a guess."""
    guess = rng.choice(ATTRIBUTES[question.attribute])
    if rng.random() < GUESS_SHARE:
        return answer_text(guess)
    text, found = "", question.person
    for key in question.keys:
        if key == question.attribute and text and rng.random() < HALFWAY_SHARE:
            return text + answer_text(guess)
        known = None
        while known is None:  # who found nothing asks again
            query = _written_query([*found.split(), key], rng)
            known = fact(world, *query) if len(query) == 3 else None
            text += f" search {' '.join(query)} ;" + found_text(known)
        found = known
        if rng.random() < WRONG_COPY_SHARE:
            wrong_name = key in RELATIONS
            found = f"{rng.choice(NAMES)} {known.split()[1]}" if wrong_name else rng.choice(ATTRIBUTES[key])
    return text + answer_text(found)


def _written_query(query: list[str], rng: random.Random) -> list[str]:
    if rng.random() < WRONG_QUERY_SHARE:
        at = rng.randrange(3)
        if rng.random() < 1 / 3:
            del query[at]
        else:
            query[at] = rng.choice((NAMES, FAMILIES, RELATIONS if query[2] in RELATIONS else list(ATTRIBUTES))[at])
    return query


def vocabulary() -> list[str]:
    """Every word of prompts and episodes, as it stands in a text: all but the first behind a space."""
    plain = words("of the ? search found nothing answer ; .")
    kinds = (plain, NAMES, FAMILIES, RELATIONS, ATTRIBUTES, *ATTRIBUTES.values())
    return ["question:", *(f" {word}" for kind in kinds for word in kind)]
