"""Each command in a block or table of README and docs/ runs as it is typed, at its smallest size."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import AutoTokenizer
from typer.testing import CliRunner

from benchmarks import real
from benchmarks.__main__ import main, parse, problem
from tests.generation.sampling import TEMPLATE
from tests.test_docs import PAGES, blocks, commands, shell_lines
from tests.tiny_models import tiny_model
from tinyrl.cli.commands import app

LEFT_OUT = {  # a part of a command, and why it is not run here
    "METHOD": "a line of a table that shows how others are typed",
    "RECIPE": "a line of a table that shows how others are typed",
    "Qwen/": "a model of the hub",
    "gsm8k ": "rows and a model of the hub",
    "train grpo my-recipe.yaml": "a model of the hub",
    "search-r1-1.5b": "a model of the hub",
    "smollm2": "a model that examples/smollm2.py makes from a package of 98 MB",
    "leg_counting": "the extra reasoning_gym",
    "environment.agent": "agents that need the extra `serve`: tests/agents and tests/endpoint/test_agents run them",
    "tinyrl serve": "it answers until a signal comes: tests/tools/test_serve runs it",
    "--peer-python": "it needs TRL: tests/benchmarks run its parts",
}
WITHOUT_ROWS = ("tinyrl train sft", "tinyrl train reward", "tinyrl train dpo")  # names of methods, in a table
READS_THE_HUB = ("tinyrl check grpo my-recipe.yaml",)  # without --quick, with which no model is read
LINES = [(page, line) for page in PAGES for line in commands(page)]
SHELL = [line for page in PAGES.values() for line in shell_lines(page)]
SHELL += [line for page in PAGES.values() for line in re.findall(r"^\| `([^`]*)` \|", page, re.M)]
BENCHMARKS = [line.partition("python -m benchmarks ")[2] for line in SHELL if "python -m benchmarks " in line]
FEW = ["run.num_steps=1", "run.eval_prompts=2", "run.threads=1"]
FEWER = {
    "grpo": ["generation.max_new_tokens=4", "grpo.num_prompts=2", "grpo.group_size=2", "grpo.minibatch_size=null"],
    "ppo": ["generation.max_new_tokens=4", "ppo.num_prompts=2", "ppo.minibatch_size=2"],
    "distill": ["generation.max_new_tokens=4", "distill.num_prompts=2"],
    "sft": ["sft.batch_size=2"],
    "reward": ["reward_model.batch_size=2"],
    "dpo": ["dpo.batch_size=2"],
}
FILES = {
    "rows.jsonl": '{"prompt": "%d + 1 =", "answer": "2"}',
    "prompts.jsonl": '{"prompt": "%d + 1 ="}',
    "chats.jsonl": '{"prompt": "%d + 1 =", "completion": "2"}',
    "pairs.jsonl": '{"prompt": "%d + 1 =", "chosen": "2", "rejected": "3"}',
    "judged.jsonl": '{"prompt": "%d + 1 =", "chosen": "2", "rejected": "3"}',
}


def left_out(line: str) -> bool:
    return line in (*WITHOUT_ROWS, *READS_THE_HUB) or any(part in f"{line} " for part in LEFT_OUT)


def small(line: str, folder: Path) -> list[str]:
    """The words of a command, with folders that are there for those it names, and the smallest settings for it."""
    line = line.replace("=DIR", f"={folder / 'model'}").replace("SFT_RUN", "RUN").replace("[RUN ...]", "RUN")
    line = re.sub(r"(reward.model|critic.path)=RUN", r"\1=runs/reward", line)
    line = line.replace("distill my-recipe.yaml", "distill my-distillation.yaml")  # my-recipe.yaml is one of grpo
    line = re.sub(r"model.adapter=RUN", "model.adapter=runs/sft", line)
    line = line.replace("RUN@120", "RUN@1").replace("step-000040", "step-000001").replace("FOLDER", "out")
    line = re.sub(r"\bRUN\b", "runs/grpo-rows-1", line)
    _, command, *words = shlex.split(line)
    if command == "eval":
        words += ["--num-prompts", "2"]
    if command == "train" and words[0] in FEWER:
        words += [*FEW, *FEWER[words[0]], *([] if "--name" in words else ["--name", "made", "--overwrite"])]
    if "--from" in words:
        words.append("run.num_steps=2")
    if "--resume" in words and "run.num_steps=400" in words:  # which may only be more steps
        words[words.index("run.num_steps=400")] = "run.num_steps=2"
        words.append("--allow-config-change")
    return [command, *words]


def typed(*words: str, typing: str = "") -> None:
    done = CliRunner().invoke(app, [*words], input=typing)
    assert done.exit_code in (0, 3 if words[0] == "check" else 0), (words, done.output, done.exception)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """What the pages have their readers write, and a run of each kind that they name."""
    made = tmp_path_factory.mktemp("pages")
    before = Path.cwd()
    os.chdir(made)
    for name, row in FILES.items():
        Path(name).write_text("".join(row % i + "\n" for i in range(16)))
    sources = [text for page in PAGES for text in blocks(page, "python")]
    for source in sources:
        name, _, rest = source.partition("\n")
        if file := re.fullmatch(r"# (\w+\.py)", name):
            Path(file[1]).write_text(rest, encoding="utf-8")
    Path("rewards.py").write_text(blocks("rewards.md", "python")[0], encoding="utf-8")
    Path("double.py").write_text(blocks("data.md", "python")[0], encoding="utf-8")
    Path("my-recipe.yaml").write_text(blocks("index.md", "yaml")[0], encoding="utf-8")
    Path("my-distillation.yaml").write_text("method: distill\nmodel: {path: starter}\ntask: {name: sort}\n")
    model = f"model.path={tiny_model(made / 'model', 'llama')}"
    reward = "reward.functions=[{use: rewards.py:score}]"
    typed("train", "grpo", model, "task.data=rows.jsonl", reward, *FEW, *FEWER["grpo"], "--name", "grpo-rows-1")
    typed("train", "grpo", *FEW, *FEWER["grpo"], "--name", "grpo-sort-1")
    typed("train", "distill", *FEW, *FEWER["distill"], "--name", "distill-sort-1")
    typed("train", "sft", model, "task.data=chats.jsonl", *FEW, *FEWER["sft"], "--name", "sft")
    typed("train", "reward", model, "task.data=judged.jsonl", *FEW, *FEWER["reward"], "--name", "reward")
    yield made
    os.chdir(before)


@pytest.mark.slow
@pytest.mark.parametrize(("page", "line"), [pair for pair in LINES if not left_out(pair[1])])
def test_a_documented_command_runs(page: str, line: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("functions", "[{use: rewards.py:score}]")
    typed(*small(os.path.expandvars(line), folder), typing="/quit\n")


def test_what_is_left_out_is_documented() -> None:
    everything = "\n".join([*(f"{line} " for _, line in LINES), *BENCHMARKS])
    assert [part for part in LEFT_OUT if part not in everything] == []


@pytest.mark.slow
@pytest.mark.parametrize("words", [words for words in BENCHMARKS if not left_out(words)])
def test_a_documented_benchmark_runs(words: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["benchmarks", *shlex.split(words)])
    if "--help" in words:
        with pytest.raises(SystemExit, match="0"):
            main()
    else:
        main()


def test_each_documented_benchmark_is_one_that_there_is() -> None:
    for words in BENCHMARKS:
        if "--help" not in words:
            assert problem(parse(shlex.split(words.replace("...", "python")))) is None


@pytest.mark.slow
def test_the_benchmark_of_a_real_model_prepares_its_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without TRL: one step of SFT and its export, which the other methods begin from."""
    model = tiny_model(tmp_path / "real", "llama")
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(model)
    monkeypatch.setenv("TINYRL_REAL_MODEL", str(model))
    monkeypatch.setattr(real, "FORM", {"num_steps": 1, "seed": 100, "eval_prompts": 2})
    options = parse(["real", "--peer-python", "none", "--methods", "sft", "--out", str(tmp_path / "out")])
    folders = real.prepare(options)
    assert (folders["form"] / "model" / "model.safetensors").is_file()
    assert (folders["form"] / "eval.jsonl").is_file()
