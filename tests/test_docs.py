"""README and docs/: what their pages name is there, their examples run, their tables are the code's own."""

import ast
import inspect
import json
import re
import runpy
import shlex
import subprocess
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from tests.rewards.judge_server import Judge
from tests.tiny_models import tiny_model
from tinyrl.cli.commands import app
from tinyrl.config.aliases import ALIASES
from tinyrl.config.recipe import load_config, packaged_recipes
from tinyrl.config.sections import RewardFunctionConfig
from tinyrl.config.settings import SECTIONS, fields_of
from tinyrl.config.yaml_reader import parse_plain
from tinyrl.rewards.judge import JudgeReward
from tinyrl.runs import findings
from tinyrl.tasks import Task
from tinyrl.tasks.run_rows import Prompts

ROOT = Path(__file__).resolve().parents[1]
ROOT_PAGES = ("README.md", "CONTRIBUTING.md", "AGENTS.md")
FILES = [*sorted((ROOT / "docs").glob("*.md")), *(ROOT / name for name in ROOT_PAGES)]
PAGES = {path.name: path.read_text(encoding="utf-8") for path in FILES}
GENERATED = runpy.run_path(str(ROOT / "docs" / "generate.py"))["PAGES"]
COMMANDS = typer.main.get_command(app).commands  # pyright: ignore[reportAttributeAccessIssue]
MADE = {"rewards.py", "env.py", "game.py", "tools.py", "guess.py", "double.py", "my-recipe.yaml"}  # by the reader


def one_line_each(text: str) -> str:
    """A page whose commands are a line each: a backslash at the end of a line goes on with the next."""
    return re.sub(r" *\\\n *", " ", text)


def shell_lines(text: str) -> list[str]:
    """The lines of a page's blocks of shell: of docs/ those between fences, of README and the like indented ones."""
    text = one_line_each(text)
    fenced = re.findall(r"^```bash\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return [line for block in fenced for line in block.splitlines()] + re.findall(r"^    (.*)", text, re.MULTILINE)


def commands(page: str) -> list[str]:
    """The commands of tinyrl in a page's blocks and tables, without what is said beside them."""
    lines = [line for line in shell_lines(PAGES[page]) if line.startswith("tinyrl ")]
    lines += re.findall(r"^\| `(tinyrl [^`]*)` \|", PAGES[page], re.MULTILINE)
    parts = [part.strip() for line in lines for part in re.split(r"  +#|; ", line)[: 1 + line.count("; tinyrl")]]
    return [part for part in parts if re.match(r"tinyrl [a-z]", part)]


def blocks(page: str, kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```", PAGES[page], re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("page", PAGES)
def test_commands_settings_recipes_and_files_are_there(page: str):
    for line in commands(page):
        _, name, *words = shlex.split(line)
        command = COMMANDS[name]
        if hasattr(command, "commands"):
            command = command.commands[words.pop(0)]
        known = {option for each in command.params for option in (*each.opts, *each.secondary_opts)}
        assert {word for word in words if word.startswith("--")} <= known, line
        if name == "train" and "--resume" not in words:
            named = {after for before, after in pairwise(words) if before == "--name"} | MADE
            recipes = [word for word in words if re.fullmatch(r"[a-z0-9][a-z0-9.]*-[a-z0-9.-]+|lookup|gsm8k", word)]
            assert {*recipes} - named <= {*packaged_recipes()}, line
    prose = re.sub(r"^```python\n.*?^```", "", PAGES[page], flags=re.DOTALL | re.MULTILINE)
    settings = re.findall(rf"(?<=[`' (])((?:{'|'.join(SECTIONS)})\.[a-z_.]+)", prose)
    shown = [word.rstrip(".") for word in settings if not word.endswith(".py")]
    for section, *fields in (word.split(".") for word in shown if word not in ALIASES):
        assert len(fields) != 1 or fields[0] in fields_of(section), f"{section}.{fields}"
    for file in re.findall(r"(?<![\w/.])((?:recipes|tests|tinyrl|examples|benchmarks)/[\w./-]+\.\w+)\b", PAGES[page]):
        assert (ROOT / file).is_file(), file


WIDTHS = {"README.md": 97, "CONTRIBUTING.md": 97, "AGENTS.md": 97}  # of a block, in GitHub's column
PAGE_WIDTH = 80  # of a block of docs/ as a site


@pytest.mark.parametrize("page", PAGES)
def test_no_line_of_a_block_is_wider_than_the_page(page: str) -> None:
    fenced = [line for block in blocks(page, r"\w*") for line in block.splitlines()]
    indented = re.findall(r"^    (.*)", re.sub(r"^```.*?^```", "", PAGES[page], flags=re.M | re.S), re.M)
    assert [line for line in fenced + indented if len(line) > WIDTHS.get(page, PAGE_WIDTH)] == []


@pytest.mark.parametrize("path", sorted((ROOT / "docs").glob("*.md")), ids=lambda path: path.name)
def test_a_block_of_the_site_names_its_language(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    fences = re.findall(r"^ *```(.*)$", text, re.MULTILINE)
    assert "" not in fences[::2]
    outside = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    assert re.findall(r"\n\n {4}\S.*", outside) == []


def loaded(name: str, source: str, folder: Path) -> Any:
    (folder / f"{name}.py").write_text(source, encoding="utf-8")
    return SimpleNamespace(**runpy.run_path(str(folder / f"{name}.py")))


def test_the_code_of_the_pages_runs(tmp_path: Path):
    rewards = loaded("rewards", blocks("rewards.md", "python")[0], tmp_path)
    assert rewards.score(prompts=["?", "?"], completions=["It is 4.", "5"], answer=["4", "4"]) == [1.0, 0.0]
    assert rewards.short(completions=["a"], completion_ids=[[1] * 128]) == [-0.5]
    later = loaded("later", blocks("rewards.md", "python")[1], tmp_path)
    assert later.short(completion_ids=[[1] * 128], step=5, num_steps=10, answer=["4"]) == [-0.25]
    sources = dict(
        re.findall(r"^```python\n# (\w+)\.py\n(.*?)^```", PAGES["environments.md"], re.MULTILINE | re.DOTALL)
    )
    game, tools, guess = (loaded(name, sources[name], tmp_path) for name in ("game", "tools", "guess"))
    turns = [[{"role": "assistant", "content": text}] for text in ("4", " 3", "5", "?")]
    assert game.respond(["?"] * 4, turns, answer=[4] * 4) == [None, "\nhigher\n", "\nlower\n", "\nlower\n"]
    assert tools.look("Ulm", {"map": {"Ulm": "a spire"}}) == "a spire"
    episode = guess.Guess()
    episode.reset(seed=0, answer=4)
    assert {episode.guess(number) for number in range(1, 10)} == {"right", "higher", "lower"}
    task: Task = loaded("double", blocks("data.md", "python")[0], tmp_path).TASK
    rows = task.rows("eval")
    Prompts(task, verified=True).check(rows[0])
    assert task.verify is not None
    prompts, right = [task.prompt(row) for row in rows], [row["answer"] for row in rows]
    assert set(task.verify(prompts, [task.gold(row) for row in rows], answer=right)) == {1.0}


def test_the_criteria_of_the_page_are_asked_about_and_weighed(tmp_path: Path) -> None:
    block = blocks("rewards.md", "yaml")[1]
    [values] = parse_plain(block, "rewards.md")["reward"]["functions"]
    judge = Judge(lambda system, answers: json.dumps({"scores": {"right": int("is 4:" in system), "short": 5}}))
    try:
        values |= {"url": judge.url, "cache": str(tmp_path / "cache.sqlite")}
        reward = JudgeReward(RewardFunctionConfig.model_validate(values), timeout_s=20.0)
        call = reward(["2 + 2?"] * 2, ["4", "5"], {"answer": ["4", "5"]})
    finally:
        judge.close()
    assert call.values == [(3 * 1 + 0.5) / 4, (3 * 0 + 0.5) / 4]


def test_the_criteria_in_the_rows_of_the_page_are_asked_about_and_weighed(tmp_path: Path) -> None:
    block = blocks("rewards.md", "yaml")[2]
    [values] = parse_plain(block, "rewards.md")["reward"]["functions"]
    [row] = re.findall(r'`(\{"prompt": .*"rubrics": .*?\]\})`', PAGES["rewards.md"])
    judge = Judge(lambda system, answers: json.dumps({"scores": {"criterion_1": 1, "criterion_2": 1}}))
    try:
        values |= {"url": judge.url, "cache": str(tmp_path / "cache.sqlite")}
        reward = JudgeReward(RewardFunctionConfig.model_validate(values), timeout_s=20.0)
        call = reward(["How much?"], ["5 mg"], {"rubrics": [json.loads(row)["rubrics"]]})
    finally:
        judge.close()
    assert call.values == [(5 - 3) / 5]


def test_a_reward_goes_on_in_verl_and_openrlhf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(tmp_path)
    loaded("rewards", blocks("rewards.md", "python")[0], tmp_path)
    carried = loaded("carried", blocks("scale.md", "python")[0], tmp_path)
    assert [carried.compute_score("sums", text, "4") for text in ("It is 4.", "5")] == [1.0, 0.0]
    assert carried.reward_func(["2 + 2 = 4"], ["2 + 2 = "], ["4"]) == {"rewards": 1.0, "scores": 1.0}


@pytest.mark.slow
def test_the_lines_for_your_data_run_as_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    part = PAGES["README.md"].partition("## Your data and your reward")[2].partition("\n## ")[0]
    code = re.findall(r"^```python\n# (\S+)\n(.*?)^```", part, re.MULTILINE | re.DOTALL)
    model = tiny_model(tmp_path / "model", "llama")
    monkeypatch.chdir(tmp_path)
    for name, source in code:
        Path(name).write_text(source, encoding="utf-8")
    part = part.replace("model.path=DIR", f"model.path={model}")
    lines = re.findall(r"^    ((?:echo|tinyrl) .*)", one_line_each(part), re.MULTILINE)
    assert len(lines) >= 3
    few = ["run.num_steps=1", "generation.max_new_tokens=8", "grpo.num_prompts=1", "grpo.group_size=4"]
    for line in lines:
        words = shlex.split(line, comments=True)
        if words[0] == "echo":
            subprocess.run(line, shell=True, check=True)
            continue
        done = CliRunner().invoke(app, [*words[1:], *(few if words[1] == "train" else [])])
        assert done.exit_code == 0, (line, done.output)


def test_the_generated_pages_and_the_tables_are_the_code_s_own(tmp_path: Path):
    for page, generate in GENERATED.items():
        assert PAGES[page] == generate(), "run `python docs/generate.py`"
    (tmp_path / "my-recipe.yaml").write_text(blocks("index.md", "yaml")[0], encoding="utf-8")
    for method, prompts in (("grpo", 32), ("ppo", 128)):
        config = load_config(method, str(tmp_path / "my-recipe.yaml"), overrides=[])
        assert getattr(config, method).num_prompts == prompts


def names_of_findings() -> set[str]:
    """Names that runs/findings.py gives to its findings, read from the source."""
    calls = [node for node in ast.walk(ast.parse(inspect.getsource(findings))) if isinstance(node, ast.Call)]
    made = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id == "Finding"]
    return {ast.literal_eval(word.value) for call in made for word in call.keywords if word.arg == "name"}


def test_the_table_of_findings_has_each_of_them() -> None:
    checks = (findings.diverged, *findings.AT_ONCE, *findings.AFTER_SOME_STEPS)
    table = PAGES["runs.md"].partition("| finding |")[2].partition("\n\n")[0]
    documented = set(re.findall(r"^\| ([^|]+?) \|", table, re.MULTILINE))
    assert documented == names_of_findings()
    assert len(documented) == len({*checks})
    [counted] = re.findall(r"(\d+) findings", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert int(counted) == len(documented)


def rows_on_a_gpu() -> dict[str, list[list[float]]]:
    """Rows of the table of a step on a GPU by name: the numbers of tinyrl and of TRL."""
    table = PAGES["benchmarks.md"].partition("## On a GPU")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| ([^|]+?) \| ([0-9][^|]*) \| ([0-9][^|]*) \|$", table, re.MULTILINE)
    return {name: [[float(x) for x in re.findall(r"[0-9.]+", side)] for side in sides] for name, *sides in rows}


def test_the_readme_s_speed_on_a_gpu_is_the_table_s_range_with_its_memory_in_the_same_sentence() -> None:
    ours, theirs = rows_on_a_gpu()["in all"]
    [[our_peak], [their_peak]] = rows_on_a_gpu()["peak memory, GB"]
    [sentence] = [part for part in re.split(r"\. ", PAGES["README.md"]) if "times as fast" in part and "H100" in part]
    slowest = min(theirs) / max(ours)
    fastest = max(theirs) / min(ours)
    assert f"{slowest:.1f} to {fastest:.1f} times" in sentence
    assert f"{our_peak:.0f} GB" in sentence
    assert f"TRL {their_peak:.0f}" in sentence
