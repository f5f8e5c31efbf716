"""docs/glossary.md: every key that metrics.jsonl can hold is there, and no other."""

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests import running
from tests.tiny_models import TinyModels
from tinyrl.evaluation.statistics import label_metrics, pair_metrics, verdict_metrics
from tinyrl.runs.metrics import METRICS

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in PAGE.splitlines() if line.startswith("| `")]
KEYS = [re.findall(r"`([^`]+)`", row[0])[0] for row in ROWS]
GROUPS = "judge|teacher|reward|rewards|objective|policy|value|completion|environment|optim|time|memory|preference|eval"
NO_METRIC = {
    "teacher/quarters",
    "reward/functions",
    "eval/functions",
    "rewards/sides",
    "policy/sides_logprobs",
}  # charts of several
SOURCES = [
    path
    for path in sorted((ROOT / "tinyrl").rglob("*.py"))
    if path.parts[-2] not in ("starter", "config", "report") and path.name not in ("metrics.py", "findings.py")
]


def named(key: str) -> str:
    """The glossary's name of a key: rewards and k by their kind, greedy values by what they are of."""
    key = key.replace("eval/greedy/", "eval/")
    key = re.sub(r"@(?!1$)\d+$", "@k", key)
    fixed = set(KEYS)
    return key if key in fixed or "reward/" not in key else re.sub(r"(reward)/.*", r"\1/NAME", key)


def strings_of(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "timed":
            for argument in node.args:
                if isinstance(argument, ast.Constant):
                    yield f"time/{argument.value}"


def keys_of_functions(file: str, *functions: str) -> set[str]:
    """The constant keys of dictionaries written in some functions of a file, as held-out ones."""
    tree = ast.parse((ROOT / "tinyrl" / file).read_text(encoding="utf-8"))
    found = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name in functions]
    assert {node.name for node in found} == set(functions)
    inner = [node for function in found for node in ast.walk(function)]
    keys = [key for node in inner if isinstance(node, ast.Dict) for key in node.keys]
    keys += [node.slice for node in inner if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store)]
    names = {key.value for key in keys if isinstance(key, ast.Constant)} - {"greedy"}
    return {f"eval/{name}" for name in names}


def held_out_keys() -> set[str]:
    scores, flags = torch.tensor([0.5, -1.0, 2.0]), torch.tensor([1.0, 0.0, 1.0])
    shown = [
        pair_metrics(scores, flags, torch.zeros(3)),
        label_metrics(scores, flags),
        verdict_metrics([1.0, 0.0], ["a", "b"], 2, is_pass=bool),
    ]
    keys = {f"eval/{key}" for metrics in shown for key in metrics}
    keys |= keys_of_functions("evaluation/evaluate.py", "_metrics", "_divergence")
    return keys | keys_of_functions("trainers/sft.py", "evaluate") | keys_of_functions("trainers/dpo.py", "evaluate")


def written_keys() -> set[str]:
    """What the code writes under a group's name, wherever it stands."""
    found = {text for path in SOURCES for text in strings_of(path)}
    keys = {text for text in found if re.fullmatch(rf"(?:{GROUPS})/[a-z][\w@/]*", text)}
    return {key for key in keys if not key.endswith("/")} | {"loss", "tokens_per_second"}


def test_every_key_of_the_code_is_in_the_glossary():
    keys = (written_keys() | held_out_keys()) - NO_METRIC
    assert len(keys) > 60
    assert {named(key) for key in keys} - set(KEYS) - known_shapes() == set()


def known_shapes() -> set[str]:
    """Held-out figures of training ones, which stand in one line with the first."""
    return set(re.findall(r"`(eval/environment/\w+)`", PAGE))


def test_the_glossary_has_no_key_that_nothing_writes():
    keys = {named(key) for key in written_keys() | held_out_keys()}
    made = {"reward/NAME", "eval/reward/NAME", "eval/rewards/chosen", "eval/rewards/rejected"}
    assert set(KEYS) - keys - made - {f"eval/{key}" for key in KEYS} == set()
    assert len(KEYS) == len(set(KEYS))


def test_every_metric_of_the_table_is_in_the_glossary():
    keys = {key for metric in METRICS.values() for key in metric.keys if key} - NO_METRIC - {"time"}
    assert {named(key) for key in keys} - set(KEYS) - known_shapes() == set()


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_a_key_has_a_meaning(row: list[str]):
    assert len(row) == 3
    assert row[1]


@pytest.mark.parametrize("method", ["grpo", "ppo"])
@pytest.mark.wide
def test_every_key_of_a_run_is_in_the_glossary(method: str, tiny: TinyModels, tmp_path: Path):
    config = running.config(method, tiny("qwen2"), run={"num_steps": 1})
    code, run, _ = running.train(config, tmp_path)
    assert code == 0
    keys = {key for line in run.metrics.read_text().splitlines() for key in json.loads(line)} - {"step"}
    assert len(keys) > 30
    assert {named(key) for key in keys} - set(KEYS) == set()
