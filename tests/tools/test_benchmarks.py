"""`tinyrl eval --benchmark`: lm-eval asks the policy as it is, and the result says what its numbers depend on."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests import running
from tinyrl.cli.commands import app
from tinyrl.config.recipe import load_config
from tinyrl.tasks import load_task

pytest.importorskip("lm_eval")

GENERATED = """
task: sorted_letters
dataset_path: json
dataset_kwargs: {{data_files: {{test: {rows}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{prompt}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["\\n"], max_gen_toks: 16, do_sample: false}}
filter_list:
  - name: stripped
    filter: [{{function: remove_whitespace}}, {{function: take_first}}]
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
"""
CHOSEN = """
task: chosen_letters
dataset_path: json
dataset_kwargs: {{data_files: {{test: {rows}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{prompt}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: 0
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two tasks of sorting prompts, and a run that was trained for some steps."""
    made, task = tmp_path_factory.mktemp("tasks"), load_task("sort")
    rows = []
    for row in task.rows("eval")[:48]:
        gold = str(task.gold(row)).strip()
        prompt, others = task.prompt(row), " ".join(reversed(gold.split()))
        rows.append({"prompt": prompt, "answer": gold, "choices": [f" {gold}", f" {others}"]})
    (made / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, text in (("sorted", GENERATED), ("chosen", CHOSEN)):
        (made / f"{name}.yaml").write_text(text.format(rows=made / "rows.jsonl"))
    config = load_config("grpo", "starter-grpo", overrides=["run.num_steps=14", "run.threads=1", "run.eval_prompts=0"])
    code, _, _ = running.train(config, made)
    assert code == 0
    return made


def scored(*words: str) -> dict:
    told = CliRunner().invoke(app, ["eval", *words, "--device", "cpu", "--json"])
    assert told.exit_code == 0, told.output
    return json.loads(told.stdout.splitlines()[-1])


def test_a_run_and_its_base_are_asked_as_they_are(folder: Path):
    how = ["--benchmark", "sorted_letters,chosen_letters", "--task-folder", str(folder)]
    base, run = scored("starter", *how), scored(str(folder / "run"), *how)
    before, after = (each["tasks"]["sorted_letters"]["scores"]["exact_match,stripped"] for each in (base, run))
    assert 0.2 < before < 0.7
    assert after > before + 0.1
    assert run["tasks"]["chosen_letters"]["scores"]["acc,none"] > 0.8
    assert base["checkpoint_sha256"] is None
    manifest = sorted((folder / "run" / "checkpoints").iterdir())[-1] / "MANIFEST.json"
    assert run["checkpoint_sha256"] == hashlib.sha256(manifest.read_bytes()).hexdigest()
    for each in (base, run):
        task = each["tasks"]["sorted_letters"]
        assert task["documents"] == 48
        assert task["generation_kwargs"]["max_gen_toks"] == 16
        assert each["harness"].startswith("lm-eval ")
    digests = {each["tasks"][name]["documents_sha256"] for each in (base, run) for name in each["tasks"]}
    assert len(digests) == 1  # the same documents


def test_other_documents_have_another_digest(folder: Path):
    how = ["--benchmark", "sorted_letters", "--task-folder", str(folder)]
    some, fewer = scored("starter", *how, "--limit", "8"), scored("starter", *how, "--limit", "4", "--few-shot", "0")
    assert some["tasks"]["sorted_letters"]["documents_sha256"] != fewer["tasks"]["sorted_letters"]["documents_sha256"]
    assert fewer["settings"]["few_shot"] == 0
    told = CliRunner().invoke(app, ["eval", "starter", *how, "--limit", "4", "--device", "cpu"])
    assert "the first 4 documents only: not a number to publish" in told.output
    assert "exact_match (stripped)" in told.output


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--benchmark", "gsm9k"], "lm-eval has no task 'gsm9k'. Did you mean `gsm8k`?"),
        (["--benchmark", "gsm8k", "--vs", "base"], "--benchmark has its own data and judge"),
        (["--limit", "4"], "are for --benchmark"),
    ],
)
def test_refusals(words: list[str], said: str):
    told = CliRunner().invoke(app, ["eval", "starter", *words])
    assert told.exit_code == 2
    assert said in told.output.replace("\n", " ")
