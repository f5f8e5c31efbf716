"""A game of five turns for credit by turn: each turn sorts a list of four letters, and a right one is a point.

python examples/five_lists.py FOLDER writes rows, and the text from which a base learns to play, half of it wrong.
examples/five_lists.sh trains on it; benchmarks/RESULTS.md has the curves.
"""

import json
import random
import string
import sys
from pathlib import Path
from typing import Any

from tinyrl.data.readers import Row
from tinyrl.environments import Reply, Transcript

NUM_TURNS = 5
NUM_LETTERS = 4
NUM_ROWS = {"train": 2000, "eval": 200}
NUM_TEXTS = 8000


def question(letters: str) -> str:
    return f"letters: {' '.join(letters)} sorted:"


def draw_lists(rng: random.Random) -> list[str]:
    return ["".join(rng.sample(string.ascii_lowercase, NUM_LETTERS)) for _ in range(NUM_TURNS)]


def points(transcript: Transcript, lists: list[str]) -> list[float]:
    """Score the turns so far."""
    answers = [message["content"].split() for message in transcript if message["role"] == "assistant"]
    return [float(answer == sorted(letters)) for answer, letters in zip(answers, lists, strict=False)]


def respond(
    prompts: list[str], transcripts: list[Transcript], *, lists: list[list[str]], **columns: Any
) -> list[Reply]:
    """Reward each turn, and ask for the next list."""
    replies = list[Reply]()
    for transcript, asked in zip(transcripts, lists, strict=True):
        scores = points(transcript, asked)
        done = len(scores) == NUM_TURNS
        replies.append(Reply("" if done else question(asked[len(scores)]), done=done, reward=scores[-1]))
    return replies


def respond_at_the_end(prompts: list[str], transcripts: list[Transcript], **columns: Any) -> list[Reply]:
    """Play the same game, with all points as the reward of the last turn."""
    replies = list[Reply]()
    for reply, transcript, asked in zip(
        respond(prompts, transcripts, **columns), transcripts, columns["lists"], strict=True
    ):
        reward = sum(points(transcript, asked)) if reply.done else None
        replies.append(Reply(reply.text, done=reply.done, reward=reward))
    return replies


def played_text(lists: list[str], rng: random.Random) -> str:
    """Write all turns of a game; in half of them two letters have changed places."""
    turns = list[str]()
    for letters in lists:
        answer = sorted(letters)
        if rng.random() < 0.5:
            first, second = rng.sample(range(NUM_LETTERS), 2)
            answer[first], answer[second] = answer[second], answer[first]
        turns.append(f" {' '.join(answer)}\n")
    return "".join([turns[0], *(question(letters) + turn for letters, turn in zip(lists[1:], turns[1:], strict=True))])


def write_rows(file: Path, rows: list[Row]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for split, count in NUM_ROWS.items():
        rng = random.Random(split)
        games = [draw_lists(rng) for _ in range(count)]
        write_rows(folder / f"{split}.jsonl", [{"prompt": question(lists[0]), "lists": lists} for lists in games])
    rng = random.Random("sft")
    texts = list[Row]()
    for _ in range(NUM_TEXTS):
        lists = draw_lists(rng)
        texts.append({"prompt": question(lists[0]), "completion": played_text(lists, rng)})
    write_rows(folder / "sft.jsonl", texts)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
