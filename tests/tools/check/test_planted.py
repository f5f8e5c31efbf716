"""`tinyrl check` finds planted faults, each with the setting or the place to mend, and passes sound recipes."""

import importlib.util
import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from tinyrl.cli.train import typed_config
from tinyrl.data.writers import write_rows
from tinyrl.process.launched import Options
from tinyrl.runs.finding import found_by
from tinyrl.starter import starter_path
from tinyrl.tasks import sums
from tinyrl.tools.check import check, exit_code
from tinyrl.tools.check.reward import FINDINGS, ScoredTexts, gold_answers_do_not_win, lines_of
from tinyrl.tools.check.section import CheckSection

CODE = """
import itertools, os
from tinyrl.environments import Reply
from tinyrl.tasks import Task
calls = itertools.count()
def right(completions, answer, **_): return [float(c.strip() == a) for a, c in zip(answer, completions)]
def brief(completions, **_): return [-0.01 * min(len(c), 10) for c in completions]
def message(completions, answer, **_): return [float(c[0]["content"].strip() == a) for a, c in zip(answer, completions)]
def silent(completions, **_): return [None for c in completions]
def tokens(completions, completion_ids, **_): return [-len(ids) / 256 for ids in completion_ids]
def unknown(completions, answer, **_): return [None if a in c else 1.0 for a, c in zip(answer, completions)]
def flat(completions, **_): return [0.5] * len(completions)
def longer(completions, **_): return [float(len(c)) for c in completions]
def moody(completions, **_): return [float(next(calls)) for c in completions]
def crash(completions, **_): return [1 / 0 for c in completions]
def inside(completions, answer, **_): return [float(a in c) for a, c in zip(answer, completions)]
def other(completions, solution, **_): return [float(s in c) for s, c in zip(solution, completions)]
def tagged(completions, letter, **_):
    return [float(c == f"<answer>{a}</answer>") if "<answer>" in c else None for c, a in zip(completions, letter)]
def mute(prompts, **_): return [None for _ in prompts]
def half(prompts, answer, **_): return [5 if a in "abcdefgh" else None for a in answer]
def changing(prompts, **_): return [str(next(calls)) for _ in prompts]
def wordy(prompts, **_): return ["a long reply " * 99 for _ in prompts]
def game(prompts, transcripts, answer, **_):
    ended = [right in turns[-1]["content"] for turns, right in zip(transcripts, answer)]
    return [Reply("right", done=True, reward=2.0) if over else "no, \\x1b[2J again\\n" for over in ended]
def aimed(prompts, transcripts, target, **_): return game(prompts, transcripts, target)
def add(a: int, b: list[int]) -> int:
    '''Add.

    Args:
        a: One.
        b: Others.
    '''
    return a + sum(b)
def look(place: str, episode: dict) -> str:
    '''Look.

    Args:
        place: Its name.
    '''
    return episode["map"][place]
def day(date: str) -> str:
    '''Name a day.

    Args:
        date: Its date.
    '''
    import datetime
    return datetime.date.fromisoformat(date).strftime("%A")
def power(expression: str) -> str:
    '''Compute.

    Args:
        expression: An expression, such as "2 ** 3".
    '''
    return str(eval(expression))
def store(answer: str) -> str:
    '''Store.

    Args:
        answer: It.
    '''
    raise RuntimeError("no database")
def leave(place: str) -> str:
    '''Leave.

    Args:
        place: Its name.
    '''
    os._exit(1)
def grade(prompts, completions, answer, **_): return [0.5 * (a in c) for a, c in zip(answer, completions)]
def letters(split): return [{"prompt": f"say {c}", "answer": c} for c in ("abcdefgh" if split == "train" else "ij")]
TASK = Task(name="half", summary="half marks", rows=letters, verify=grade, gold=lambda row: row["answer"])
"""
TURN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}<eos>{% endfor %}"
TEMPLATES = {  # of copies of the embedded model
    "endless": TURN.replace("<eos>", "END"),
    "tools": TURN + "{{ tools }}",
    "deaf": TURN.replace("for m in messages", "for m in messages if m.role != 'system'"),
}
QUICK, FULL, OFFLINE = {"quick": True}, {"prompts": 8}, {"offline": True, "memory": "2GB"}
SMALL = "run.eval_prompts=8 run.threads=1"
GRPO = f"grpo {SMALL} generation.max_new_tokens=16 grpo.num_prompts=4 grpo.minibatch_size=32"
ROWS = f"{GRPO} task.data=rows.jsonl"
REWARD = ROWS + ' reward.functions=[{"use":"mine.py:NAME"}]'
PLANTED: dict[str, tuple[str, dict[str, Any], int, str]] = {  # words, options, exit code, what is named
    "broken JSON": (f"{GRPO} task.data=broken.jsonl", QUICK, 2, "broken.jsonl:2"),
    "one row again and again": (f"{GRPO} task.data=same.jsonl", QUICK, 3, "task.data"),
    "held-out rows are trained on": (f"{ROWS} task.eval_data=rows.jsonl", QUICK, 0, "task.eval_data"),
    "a verifier beside an environment's rewards": (
        f"{ROWS} environment.name=mine.py:game", QUICK, 0, "task.columns.target"
    ),
    "a turn without an end": (f"{GRPO} model.path=endless task.name=sort", FULL, 3, "task.chat=false"),
    "no system prompt": (f"{GRPO} model.path=deaf task.name=sort task.system_prompt=Go", FULL, 2, "task.system_prompt"),
    "one reward for everything": (REWARD.replace("NAME", "flat"), QUICK, 3, "docs/rewards.md"),
    "reference answers do not win": (REWARD.replace("NAME", "longer"), QUICK, 3, "docs/rewards.md"),
    "no reward for anything": (REWARD.replace("NAME", "silent"), QUICK, 3, "docs/rewards.md"),
    "reference answers without a score": (REWARD.replace("NAME", "unknown"), QUICK, 3, "docs/rewards.md"),
    "half marks for reference answers": (f"{GRPO} task.name=mine.py:TASK", QUICK, 3, "docs/data.md"),
    "tools without a template": (f"{ROWS} environment.tools=[mine.py:add]", QUICK, 3, "template"),
    "chance": (REWARD.replace("NAME", "moody"), QUICK, 3, "random numbers"),
    "an exception": (REWARD.replace("NAME", "crash"), QUICK, 3, "mine.py, line 15"),
    "a tool without its column": (f"{ROWS} environment.tools=[mine.py:look]", QUICK, 3, "columns"),
    "a tool that fails on its own column": (f"{ROWS} environment.tools=[mine.py:store] model.path=tools", QUICK, 3,
                                            "no database"),
    "a tool that ends its process": (f"{GRPO} task.data=few.jsonl environment.tools=[mine.py:leave] model.path=tools",
                                     QUICK, 3, "call leave"),
    "no column to compare with": (f"{GRPO} task.data=plain.jsonl", QUICK, 2, "`answer`"),
    "a reward that takes messages for text": (REWARD.replace("NAME", "inside") + " environment.tools=[mine.py:add] "
                                              "model.path=tools", QUICK, 3, "completion[-1]['content']"),
    "a hole": (REWARD.replace("NAME", "inside"), QUICK, 3, "compare all of it"),
    "messages taken for text": (f"{REWARD.replace('NAME', 'inside')} task.data=chat.jsonl model.path=tools", QUICK, 3,
                               "docs/"),
    "an argument that is no column": (REWARD.replace("NAME", "other"), QUICK, 2, "solution"),
    "no reply": (f"{ROWS} environment.name=mine.py:mute", QUICK, 3, "silent"),
    "failing rows": (f"{ROWS} environment.name=mine.py:half", QUICK, 3, "`half`"),
    "another reply each time": (f"{ROWS} environment.name=mine.py:changing", QUICK, 3, "`seed`"),
    "replies that are cut": (f"{ROWS} environment.name=mine.py:wordy environment.max_observation_tokens=9", QUICK, 3,
                             "environment.max_observation_tokens="),
    "no turn to read a reply": ("lookup environment.max_turns=1", QUICK, 3, "environment.max_turns"),
    "a model that does not fit": ("gsm8k model.path=Qwen/Qwen2.5-7B-Instruct", OFFLINE, 3, "run.micro_batch_tokens"),
    "a step that does not fit": (GRPO, FULL, 3, "run.micro_batch_tokens"),
    "too few tokens for an answer": (f"{GRPO} generation.max_new_tokens=3", FULL, 3, "generation.max_new_tokens=16"),
}  # fmt: skip
SOUND: dict[str, tuple[str, dict[str, Any]]] = {
    "starter-grpo": (f"{SMALL} grpo.num_prompts=4 grpo.minibatch_size=32", FULL),
    "starter-ppo": (f"{SMALL} ppo.num_prompts=8 ppo.minibatch_size=8", FULL),
    "starter-distill": (f"{SMALL} distill.num_prompts=4", FULL),
    "lookup": (f"{SMALL} grpo.num_prompts=4 grpo.minibatch_size=32", FULL),
    "sentiment-reward": (f"{SMALL} task.data=pairs.jsonl task.eval_data=null", FULL),
    "smollm2-sums-sft": (f"{SMALL} model.path=starter", FULL),
    REWARD.replace("NAME", "right"): ("", QUICK),
    REWARD.replace("NAME", "message"): ("task.data=chat.jsonl model.path=tools", QUICK),
    REWARD.replace('"}]', '"},{"use":"mine.py:brief"}]').replace("NAME", "right"): ("", QUICK),  # by their sum
    f"{ROWS} environment.name=mine.py:aimed": ("task.columns.target=answer", QUICK),
    REWARD.replace('"}]', '"},{"use":"mine.py:tokens","weight":0.1}]').replace("NAME", "right"): ("", QUICK),
    f"{ROWS} environment.tools=[mine.py:add]": ("model.path=tools", QUICK),
    f"{ROWS} environment.name=python": ("", QUICK),
    f"{ROWS} environment.tools=[mine.py:day]": ("model.path=tools", QUICK),  # it refuses what was invented
    f"{ROWS} environment.tools=[mine.py:power]": ("model.path=tools", QUICK),
    f"distill {SMALL} task.data=plain.jsonl": ("model.path=starter teacher.path=starter", QUICK),  # needs no reward
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of rows, functions and models with chat templates of their own."""
    folder = tmp_path_factory.mktemp("planted")
    rows = [{"prompt": f"say {letter}", "answer": letter} for letter in "abcdefghijklmnop"]
    for name, some in {
        "rows": rows,
        "same": rows[:1] * 20,
        "few": rows[:2],
        "plain": [{"prompt": row["prompt"], "letter": row["answer"]} for row in rows],
        "chat": [{**row, "prompt": [{"role": "user", "content": row["prompt"]}]} for row in rows],
        "pairs": [{**row, "chosen": f"yes {row['answer']}", "rejected": "no"} for row in rows],
    }.items():
        write_rows(folder / f"{name}.jsonl", some)
    sums.write(folder / "data")
    (folder / "broken.jsonl").write_text('{"prompt": "a", "answer": "b"}\n{"prompt": "a\n')
    (folder / "mine.py").write_text(CODE)
    for name, template in TEMPLATES.items():
        shutil.copytree(str(starter_path("starter")), folder / name)
        file = folder / name / "tokenizer_config.json"
        written = {**json.loads(file.read_text()), "chat_template": template}
        file.write_text(json.dumps(written))
    return folder


@pytest.fixture(autouse=True)
def here(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(files)


def sections_of(words: str, options: dict[str, Any]) -> list[CheckSection]:
    config = typed_config(words.split())
    sections = [*check(config, options=Options(device="cpu"), **options)]
    assert all(len(section.render().splitlines()) <= 20 and "\x1b" not in section.render() for section in sections)
    return sections


def checked(words: str, options: dict[str, Any]) -> tuple[int, str]:
    """Return the exit code, and what is found with what to change."""
    try:
        found = [finding for section in sections_of(words, options) for finding in section.findings]
    except ValueError as error:
        return 2, str(error)
    return exit_code(found), "\n".join(f"{one.name}: {one.what} {one.change}" for one in found)


@pytest.mark.parametrize("fault", PLANTED)
@pytest.mark.wide
def test_a_planted_fault_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    words, options, code, place = PLANTED[fault]
    if fault == "a step that does not fit":
        monkeypatch.setattr("tinyrl.tools.check.largest_step.memory_room", lambda device: 10**8)
    got, text = checked(words, options)
    assert (got, place in text) == (code, True), text


@pytest.mark.parametrize("run", SOUND)
@pytest.mark.wide
def test_a_sound_run_raises_no_alarm(run: str) -> None:
    words, options = SOUND[run]
    assert checked(f"{run} {words}", options) == (0, "")


def test_the_facts_of_rewards_and_environments_are_counted() -> None:
    reward = sections_of(REWARD.replace("NAME", "right"), QUICK)[2].facts
    assert [reward[kind] for kind in ("gold", "nothing", "nonsense", "failed")] == [1.0, 0.0, 0.0, 0.0]
    game = sections_of(f"{ROWS} environment.name=mine.py:game", QUICK)[-1].facts
    assert game["gold"] == {"answered": 15, "ended": 15, "invalid": 0, "tool_errors": 0, "failed": 0}
    assert game["nothing"] == {"answered": 15, "ended": 0, "invalid": 0, "tool_errors": 0, "failed": 0}
    tools = sections_of(f"{ROWS} environment.tools=[mine.py:add] model.path=tools", QUICK)[-1].facts
    assert tools["call add"] == {"answered": 15, "ended": 0, "invalid": 0, "tool_errors": 0, "failed": 0}
    assert tools["unknown tool"]["invalid"] == tools["gold"]["ended"] == 15


def test_gold_is_tried_in_the_forms_in_which_chat_models_write_it() -> None:
    """Letters have nine of them: the verifier finds all, a function that compares the whole text the bare one."""
    verified = sections_of(ROWS, QUICK)[2]
    compared = sections_of(REWARD.replace("NAME", "right"), QUICK)[2]
    assert [*verified.facts["dresses"].values()] == [True] * 9
    assert [name for name, scores in compared.facts["dresses"].items() if scores] == ["bare"]
    assert "The answer is" in compared.render()


def test_a_small_penalty_on_length_does_not_keep_a_form_from_being_paid_in_full() -> None:
    penalty = ',{"use":"mine.py:tokens","weight":0.1}]'
    penalised = sections_of(REWARD.replace("NAME", "inside").replace("]", penalty), QUICK)[2]
    assert [*penalised.facts["dresses"].values()] == [True] * 9


def test_a_reward_that_reads_a_column_of_its_own_in_a_form_of_its_own_is_sound_and_attacked() -> None:
    words = REWARD.replace("NAME", "tagged").replace("rows.jsonl", "plain.jsonl")
    reward = sections_of(words, QUICK)[2]
    assert reward.findings == []
    assert reward.facts["right answers"]["column"] == "letter"
    assert reward.facts["right answers"]["example"] == "<answer>a</answer>"
    assert reward.facts["holes"] == []


def test_a_tool_is_tried_with_the_example_of_its_docstring() -> None:
    tools = sections_of(f"{ROWS} environment.tools=[mine.py:power] model.path=tools", QUICK)[-1]
    assert tools.facts["call power"] == {"answered": 15, "ended": 0, "invalid": 0, "tool_errors": 0, "failed": 0}


def test_the_share_that_failed_is_of_the_calls_that_were_made() -> None:
    """Rows without reference answers make fewer calls."""
    words = f"{GRPO} task.data=plain.jsonl " + 'reward.functions=[{"use":"mine.py:crash"}]'
    assert sections_of(words, QUICK)[2].facts["failed"] == 1.0


NO_SCORES = {"nothing": [math.nan] * 3, "nonsense": [math.nan] * 3}


def trial(**fields: Any) -> ScoredTexts:
    given = {
        "scores": NO_SCORES,
        "again": [math.nan] * 3,
        "failed": 0.0,
        "why": "",
        "other": "",
        "gets_messages": False,
    }
    return ScoredTexts(**(given | fields))


def test_a_reward_is_the_environments_only_where_no_call_failed() -> None:
    other = "the environment's"
    [alone] = lines_of(trial(other=other), name="score", rows=3)
    [failed] = lines_of(trial(other=other, failed=1.0, why="no"), name="score", rows=3)
    assert (other in alone, other in failed) == (True, False)


@pytest.mark.parametrize(("ties", "is_found"), [(0, False), (1, False), (2, True)])
def test_reference_answers_that_score_no_more_than_nonsense_in_over_a_fifth_of_the_rows_are_found(
    ties: int, is_found: bool
) -> None:
    nonsense = [1.0] * ties + [0.5] * (5 - ties)
    scores = {"gold": [1.0] * 5, "nothing": [0.0] * 5, "nonsense": nonsense}
    assert (gold_answers_do_not_win(trial(scores=scores)) is not None) is is_found


def test_advice_about_messages_is_for_rewards_that_get_them() -> None:
    changes = [[one.change for one in found_by(FINDINGS, trial(gets_messages=gets))] for gets in (True, False)]
    assert ["completion[-1]['content']" in change for [change] in changes] == [True, False]


@pytest.mark.skipif(importlib.util.find_spec("math_verify") is None, reason="needs the extra math")
def test_gold_answers_that_cannot_be_read_are_counted() -> None:
    golds = ["1", r"\frac12", r"\text{}", "$$"] * 4
    rows = [{"prompt": f"p{place}", "answer": gold} for place, gold in enumerate(golds)]
    Path("golds.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = "grpo task.name=rows task.data=golds.jsonl task.eval_data=golds.jsonl task.grading=math model.path=starter"
    assert sections_of(words, QUICK)[2].facts["unread"] == 8
