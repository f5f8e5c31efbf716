"""The rows of the sentiment experiment (docs/chain.md): `python -m tinyrl.starter.sentiment OUT` writes them.

OUT holds, each with a held-out twin (`NAME.eval.jsonl`) of other openings, and where reviews are judged of other nouns
and templates too:

    reviews.jsonl    prompt, completion            what a policy imitates
    labelled.jsonl   prompt, completion, label     what a reward model learns from: 1 praises, 0 does not or is broken
    pairs.jsonl      prompt, chosen, rejected      what DPO learns from
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tinyrl.starter.text import label_pairs, labelled_reviews, review_rows

ROWS = {"train": 6400, "eval": 512}
KINDS = {"reviews": review_rows, "labelled": labelled_reviews, "pairs": label_pairs}


def write(out: Path) -> list[Path]:
    out.mkdir(parents=True, exist_ok=True)
    written = []
    for name, rows_of in KINDS.items():
        for split, count in ROWS.items():
            path = out / f"{name}{'' if split == 'train' else '.eval'}.jsonl"
            rows: Sequence[dict[str, Any]] = rows_of(split, num_rows=count)
            path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
            written.append(path)
    return written


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m tinyrl.starter.sentiment OUT")
    for path in write(Path(sys.argv[1])):
        print(path)
