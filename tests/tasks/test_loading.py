"""Tasks by name or file, and their rows: own or the user's, checked, split, cut to size."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.running import rows_for, rows_of
from tinyrl.api import alone
from tinyrl.config.schema import Config
from tinyrl.data import readers
from tinyrl.rewards.functions import verifier_of
from tinyrl.rollout.preflight import check_before_loading
from tinyrl.rollout.prepared import prepare
from tinyrl.runs.resolve import config_of
from tinyrl.runs.run_dir import create_run
from tinyrl.tasks import Task, load_task
from tinyrl.tasks.own import OwnCode, OwnTask
from tinyrl.tasks.run_rows import shared_by_splits

TOY = f"{Path(__file__).with_name('toy_task.py')}:TASK"


def jsonl(path: Path, rows: Any) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


# ---- tasks ----


def test_a_persons_own_task_is_loaded_from_a_file(tmp_path: Path):
    (tmp_path / "beside.py").write_text("WORDS = {'train': ['ab'], 'eval': ['cd']}\n")
    (tmp_path / "mine.py").write_text(
        "from beside import WORDS\n"
        "from tinyrl.tasks import Task\n"
        "from tinyrl.tasks.grading import by_row\n"
        "def rows(split):\n"
        "    return [{'prompt': f'{word}:', 'answer': word[::-1]} for word in WORDS[split]]\n"
        "TASK = Task(name='reverse', rows=rows,\n"
        "            verify=by_row(lambda text, row: float(text == row['answer'])), gold=lambda row: row['answer'])\n"
    )
    name = f"{tmp_path / 'mine.py'}:TASK"
    config = config_of({"method": "grpo", "task": {"name": name}})
    check_before_loading(config)
    rows = rows_for(config)
    assert rows.train == [{"prompt": "ab:", "answer": "ba"}]
    assert rows.held_out == [{"prompt": "cd:", "answer": "dc"}]
    with verifier_of(load_task(name), timeout_s=10) as verifier:
        assert verifier(["ab:"] * 2, ["ba", "ab"], {"answer": ["ba", "ba"]}).values == [1.0, 0.0]
    assert create_run(str(tmp_path / "runs"), name=None, config=config, overwrite=False).path.name == "grpo-mine-1"
    (tmp_path / "other.py").write_text("1 / 0\n")
    for wrong in ("other.py:TASK", "none.py:TASK", "mine.py:X"):
        with pytest.raises(ValueError, match=r"^task\.name"):
            load_task(f"{tmp_path / wrong}")
    with pytest.raises(ValueError, match=r"^task\.name: .*countdown"):
        load_task("countdwon")


def test_the_workers_of_an_own_task_have_the_seconds_of_the_settings(tmp_path: Path):
    (tmp_path / "mine.py").write_text("TASK = None\n")
    code = OwnCode(f"{tmp_path}/mine.py:TASK")
    vars(code)["facts"] = SimpleNamespace(name="mine")  # of its worker, which is not started
    with verifier_of(OwnTask(name="mine", code=code), timeout_s=7.0) as verifier:
        assert (verifier.name, verifier._timeout_s) == ("mine", 7.0)
    assert code.replies(timeout_s=9.0)._timeout_s == 9.0


def own_task_with_template(folder: Path) -> str:
    """Write a task whose prompts read template.txt; return its name."""
    (folder / "mine.py").write_text(
        "from pathlib import Path\n"
        "from tinyrl.tasks import Task\n"
        "def prompt(row):\n"
        "    return Path(__file__).with_name('template.txt').read_text() + row['q']\n"
        "TASK = Task(name='mine', rows=lambda split: [{'q': 'ab'}], prompt=prompt, columns=('q',))\n"
    )
    return f"{folder / 'mine.py'}:TASK"


def test_the_prompts_of_an_own_task_are_made_anew_for_each_run_of_a_process(tmp_path: Path):
    """And stay within a run, which loads its task several times."""
    name = own_task_with_template(tmp_path)
    (tmp_path / "template.txt").write_text("say ")
    with alone():
        assert load_task(name).prompt({"q": "ab"}) == "say ab"
        (tmp_path / "template.txt").write_text("write ")
        assert load_task(name).prompt({"q": "ab"}) == "say ab"
    with alone():
        assert load_task(name).prompt({"q": "ab"}) == "write ab"


def test_a_failure_of_an_own_tasks_prompt_is_not_the_next_runs(tmp_path: Path):
    name = own_task_with_template(tmp_path)
    with alone(), pytest.raises(ValueError, match="FileNotFoundError"):
        load_task(name).prompt({"q": "ab"})
    (tmp_path / "template.txt").write_text("say ")
    with alone():
        assert load_task(name).prompt({"q": "ab"}) == "say ab"


def test_full_marks_are_a_pass():
    given = {1.0: True, 1.0 - 1e-12: True, 1.5: True, 0.999: False, -1.0: False, None: False, float("nan"): False}
    assert {score: Task.is_pass(score) for score in given} == given


def test_tasks_rows_help_and_an_error_of_settings_need_no_torch():
    code = (
        "import sys; from typer.testing import CliRunner; from tinyrl.cli.commands import app\n"
        "from tinyrl.tasks import TASKS, load_task; assert [load_task(name).name for name in TASKS] == [*TASKS]\n"
        "codes = [CliRunner().invoke(app, words.split()).exit_code for words in ('--help', 'train grpo grpo.x=1')]\n"
        "print(codes, sorted({'torch', 'transformers', 'datasets', 'pyarrow'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[0, 2] []"


# ---- where rows come from ----


def test_data_and_eval_data_override_a_tasks_own_rows(tmp_path: Path):
    a, b = jsonl(tmp_path / "a.jsonl", [{"x": "a"}]), jsonl(tmp_path / "b.jsonl", [{"x": "b"}])
    both, one = {"data": a, "eval_data": b, "columns": {"q": "x"}}, {"eval_data": b, "columns": {"q": "x"}}
    assert rows_of(TOY, "eval", max_samples=2) == [{"q": "eval 0"}, {"q": "eval 1"}]
    assert [rows_of(TOY, split, **both) for split in ("train", "eval")] == [[{"q": "a"}], [{"q": "b"}]]
    assert [len(rows_of(TOY, split, **one)) for split in ("train", "eval")] == [3, 1]


def test_data_alone_is_split_by_prompt(tmp_path: Path):
    source = jsonl(tmp_path / "a.jsonl", [{"q": f"{i % 30}", "n": i} for i in range(60)])
    train, held = (rows_of(TOY, split, data=source) for split in ("train", "eval"))
    assert (len(train), len(held)) == (54, 3)
    assert rows_of(TOY, "train", data=source, max_samples=6) == train[:6]
    more = jsonl(tmp_path / "c.jsonl", [{"q": "a", "x": 1}, {"q": "b", "y": 2}])  # all rows get the same columns
    columns = [{"q": "a", "x": 1, "y": None}, {"q": "b", "x": None, "y": 2}]
    assert rows_of(TOY, "train", data=more, eval_data=more) == columns


def test_the_held_out_rows_are_the_same_whatever_the_run_seed(tmp_path: Path):
    source = jsonl(tmp_path / "a.jsonl", [{"prompt": f"{i}", "completion": "x"} for i in range(60)])
    for method, seed in (("grpo", 0), ("grpo", 31), ("sft", 0), ("sft", 31)):
        config = config_of({"method": method, "task": {"data": source}, "run": {"seed": seed}})
        rows = rows_for(config).held_out
        # by hand: prompts sorted by the sha256 of {"prompt":"..."}, the first 6 places by that of "hold out 0:place"
        assert [row["prompt"] for row in rows] == ["4", "8", "10", "32", "43", "50"]


def test_no_more_rows_are_read_than_max_samples_takes(tmp_path: Path):
    """Four to train on and four of a tenth of what is read, so 40; with a file for each split four."""
    rows = [{"q": f"{n}"} for n in range(40)]
    source, whole = jsonl(tmp_path / "a.jsonl", [*rows, {"q": 7}]), jsonl(tmp_path / "b.jsonl", rows)
    for split in ("train", "eval"):
        cut = rows_of(TOY, split, data=source, max_samples=4)
        assert cut == rows_of(TOY, split, data=whole)[:4]
        assert len(cut) == 4
        with pytest.raises(ValueError, match=r"a\.jsonl:41"):
            rows_of(TOY, split, data=source, max_samples=5)
        assert rows_of(TOY, split, data=source, eval_data=source, max_samples=4) == rows[:4]


def test_a_revision_reaches_the_hub_with_every_source(monkeypatch: pytest.MonkeyPatch):
    asked: list[tuple[str, str | None]] = []

    def read(source: str, revision: str | None) -> list[tuple[str, dict[str, str]]]:
        asked.append((source, revision))
        return [(source, {"q": f"{n}", "text": f"{n}"}) for n in range(20)]

    monkeypatch.setattr(readers, "_read_dataset", read)
    task: dict[str, Any] = {"data": "a/b", "eval_data": "a/b@test", "revision": "1f0c"}
    rows_of(TOY, "train", **task)
    rows_for(config_of({"method": "sft", "task": task}))
    assert asked == [(name, "1f0c") for name in ("a/b", "a/b@test", "a/b", "a/b@test")]


# ---- what becomes of a row ----

ASKED, SAID = {"role": "user", "content": "how many?"}, {"role": "assistant", "content": "two"}


def test_prompt_and_answer_of_own_rows(tmp_path: Path):
    for row, prompt, answer in (
        ({"messages": [ASKED, SAID, ASKED]}, [ASKED], None),
        ({"chosen": "so many are two", "rejected": "so many are three"}, "so many are", None),
        ({"prompt": "p", "answer": 0}, "p", 0),
    ):
        [read] = rows_of("rows", "train", data=jsonl(tmp_path / "a.jsonl", [row]))
        assert (load_task("rows").prompt(read), read.get("answer")) == (prompt, answer)


def test_rows_a_task_cannot_use_are_answered_with_their_line(tmp_path: Path):
    for row, wanted in (
        ({"Q": "b", "n": 1}, "no column 'q'.*task.columns.q"),
        ({"q": 7}, "'q' must be text"),
        ({"q": "a", "completions": 1}, "'completions'.*task.columns.NEW=completions"),
    ):
        with pytest.raises(ValueError, match=f"a.jsonl:2: .*{wanted}"):
            rows_of(TOY, "train", data=jsonl(tmp_path / "a.jsonl", [{"q": "a"}, row]))
    answers = ["a", ["a", "b"]]  # one that only the own reward reads may be anything
    values = {
        "method": "grpo",
        "task": {"data": jsonl(tmp_path / "b.jsonl", [{"prompt": "p", "answer": a} for a in answers])},
    }
    own = config_of({**values, "reward": {"functions": [{"use": "rewards.py:score"}]}})
    assert [row["answer"] for row in rows_for(own).train] == answers
    with pytest.raises(ValueError, match=r"b\.jsonl:2: 'answer'"):
        rows_for(config_of(values))


def chat(*contents: str) -> list[dict[str, str]]:
    return [{"role": role, "content": text} for role, text in zip(("user", "assistant"), contents, strict=False)]


@pytest.mark.parametrize(
    ("method", "first", "second"),
    [
        ("sft", lambda q: {"prompt": q, "completion": "a"}, lambda q: {"messages": chat(q, "b")}),
        ("grpo", lambda q: {"prompt": q}, lambda q: {"prompt": chat(q)}),
    ],
)
def test_held_out_prompts_in_another_form_are_counted(tmp_path: Path, method: str, first: Any, second: Any) -> None:
    train = jsonl(tmp_path / "a.jsonl", [first(f"{i}") for i in range(20)])
    for others, count in ((range(15, 25), 1), (range(20, 30), 0)):
        held = jsonl(tmp_path / "b.jsonl", [second(f"{i}") for i in others])
        config = config_of({"method": method, "task": {"data": train, "eval_data": held}})
        rows = rows_for(config)
        assert len(shared_by_splits(rows.train, rows.held_out, rows.kind, system_prompt=None)) == count


def test_a_system_prompt_of_all_rows_tells_no_prompts_apart(tmp_path: Path) -> None:
    rows = [{"prompt": [{"role": "system", "content": f"{j}"}, *chat(f"{i}")]} for i in range(20) for j in range(3)]
    values = {"method": "grpo", "task": {"data": jsonl(tmp_path / "a.jsonl", rows), "system_prompt": "short"}}
    found = rows_for(config_of(values))
    sides = [{row["prompt"][1]["content"] for row in side} for side in (found.train, found.held_out)]
    assert [len(side) for side in sides] == [18, 2]


@pytest.mark.parametrize(
    ("method", "prompts", "rows", "left_out"),
    [
        ("sft", 20, 200, "18"),  # 2 of 20 prompts are held out, of 10 rows each, and one row of each is kept
        ("grpo", 20, 200, "18"),
        ("sft", 20, 20, None),
        ("sft", 5, 200, None),  # rows are held out, and all are different
        ("grpo", 5, 200, None),  # none is held out
        ("reward", 20, 200, None),  # labels: all rows of a held-out prompt are kept
    ],
)
def test_rows_that_repeat_a_held_out_prompt_are_counted(
    tmp_path: Path, method: str, prompts: int, rows: int, left_out: str | None
) -> None:
    given = [{"prompt": f"q{i % prompts}", "completion": f"{i}", "label": i % 2} for i in range(rows)]
    values = {"method": method, "task": {"data": jsonl(tmp_path / "a.jsonl", given), "max_samples": None}}
    found = rows_for(config_of(values))
    assert [note.split()[0] for note in found.notes] == ([] if left_out is None else [left_out])


TOOLS = [{"type": "function", "function": {"name": "add"}}]
LED = [{"role": "system", "content": "short"}, *chat("a", "b")]
SHAREGPT = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]


@pytest.mark.parametrize(
    ("method", "row", "named"),
    [
        ("grpo", {"prompt": "a", "system": "short", "tools": TOOLS}, ["`system`", "`tools`"]),
        ("grpo", {"prompt": LED[:2], "system": "short"}, []),
        ("grpo", {"conversations": SHAREGPT, "system": "short"}, []),
        ("grpo", {"prompt": "a", "system": " ", "tools": "[]"}, []),
        ("sft", {"messages": chat("a", "b"), "system": "short"}, ["`system`"]),
        ("sft", {"messages": LED, "system": "short"}, []),
        ("sft", {"conversations": SHAREGPT, "system": "short", "tools": TOOLS}, []),
        ("sft", {"messages": chat("a", "b"), "tools": TOOLS}, []),
        ("sft", {"prompt": "a", "completion": "b", "tools": TOOLS}, ["`tools`"]),
        ("sft", {"text": "a", "system": None, "tools": []}, []),
        ("dpo", {"prompt": "a", "chosen": "b", "rejected": "c", "system": "short", "tools": TOOLS},
         ["`system`", "`tools`"]),
        ("reward", {"conversations": SHAREGPT, "label": 1, "system": "short"}, []),
        ("reward", {"messages": chat("a", "b"), "label": 1, "system": "short"}, ["`system`"]),
    ],
)  # fmt: skip
def test_columns_beside_messages_that_nothing_reads_are_named(
    tmp_path: Path, method: str, row: dict[str, Any], named: list[str]
) -> None:
    notes = rows_for(settings(tmp_path, method, row)).notes
    assert [[name for name in ("`system`", "`tools`") if name in note] for note in notes] == [[name] for name in named]


def test_completions_without_a_prompt_beside_another_text_are_counted(tmp_path: Path) -> None:
    """As OpenRLHF's rows once `output` is renamed. A text beside a prompt is no prompt, nor is a number."""
    bare = {"input": "x", "output": "a"}
    rows = [bare] * 3 + [{"prompt": "p", "input": "x", "output": "b"}]
    task = {"data": jsonl(tmp_path / "rows.jsonl", rows), "columns": {"completion": "output"}}
    notes = rows_for(config_of({"method": "sft", "task": task})).notes
    assert any("3 of 4 rows" in note and "input" in note for note in notes)
    task["data"] = jsonl(tmp_path / "numbers.jsonl", [{"number": 3, "output": "a"}, rows[-1]])
    assert rows_for(config_of({"method": "sft", "task": task})).notes == []


def test_columns_that_something_else_reads_are_not_named(tmp_path: Path) -> None:
    """An agent and a task of one's own have the row; task.system_prompt replaces a system message anyway."""
    row = {"prompt": "a", "q": "b", "system": "short", "tools": TOOLS}
    data = jsonl(tmp_path / "a.jsonl", [row])
    agent = settings(tmp_path, "grpo", row, environment={"agent": f"{__file__}:agent"})
    assert rows_for(agent).notes == []
    values = {"method": "grpo", "task": {"name": TOY, "data": data, "eval_data": data}}
    assert rows_for(config_of(values)).notes == []
    values = {"method": "grpo", "task": {"data": data, "eval_data": data, "system_prompt": "long"}}
    (note,) = rows_for(config_of(values)).notes
    assert "`tools`" in note


GOOD = {"prompt": "a", "text": "b", "chosen": "b", "rejected": "c"}


def settings(tmp_path: Path, method: str, *rows: Any, **sections: Any) -> Config:
    data = jsonl(tmp_path / "a.jsonl", rows)
    return config_of({"method": method, "task": {"data": data, "eval_data": data}, **sections})


def test_rows_to_learn_from_are_answered_with_their_line(tmp_path: Path):
    for method, first, row in (
        ("sft", GOOD, {f"{'x' * 30}{n}": "v" * 90 for n in range(2000)}),
        ("dpo", GOOD, {"prompt": "a", "chosen": "b", "rejected": 3}),
        ("reward", {"text": "b", "label": 1}, {"chosen": "a b", "rejected": "a c"}),
    ):
        with pytest.raises(ValueError, match=r"a\.jsonl:2: ") as caught:
            rows_for(settings(tmp_path, method, first, row))
        assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("method", ["reward", "ppo"])
def test_a_bad_row_is_reported_before_a_model_is_loaded(tmp_path: Path, method: str):
    config = settings(tmp_path, method, GOOD, {"n": 1})
    if method == "ppo":
        text = jsonl(tmp_path / "b.jsonl", [GOOD])
        config = settings(tmp_path, method, GOOD, ppo={"ptx_coef": 1.0, "ptx_data": text})
        Path(text).write_text("{")
    with pytest.raises(ValueError, match=r"[ab]\.jsonl:\d: "):
        prepare(config)
