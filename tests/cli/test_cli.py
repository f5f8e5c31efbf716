"""The command line: what goes wrong before training gives at most six lines and exit code 2, and nothing is written."""

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import typer
from typer.testing import CliRunner, Result

from tinyrl import __version__
from tinyrl.cli.commands import app
from tinyrl.cli.options import user_errors
from tinyrl.config.recipe import dump_config
from tinyrl.config.schema import Config
from tinyrl.process.errors import ExplainedByCheck, GuardStop, OutOfRoom, Signalled
from tinyrl.rollout.prepared import PreparedRun
from tinyrl.runs.resolve import config_of


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with recipes, rows and runs in it: one in order, one changed by hand, one without a file."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    Path("r.yaml").write_text("method: grpo\ntask: {name: sort}\n")
    Path("bad.yaml").write_text('method: ppo\n"\\e[31mred": 1\n')
    Path("texts.jsonl").write_text('{"prompt": "a", "completion": "b"}\n' * 8)
    Path("rows.jsonl").write_text('{"prompt": "\x1b[31m", "prompt": "b"}\n')
    for name in ("mine/checkpoints", "changed", "bare"):
        Path("runs", name).mkdir(parents=True)
    text = dump_config(config_of({"method": "grpo", "task": {"name": "sort"}}))
    Path("runs/mine/config.yaml").write_text(text)
    Path("runs/changed/config.yaml").write_text(text.replace("num_steps: 200", "num_steps: many"))
    return tmp_path


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments), prog_name="tinyrl")


def refused(*arguments: str) -> str:
    """What is printed on standard error, after checking that it has the form of every error."""
    before = {p: p.stat().st_mtime_ns for p in Path().rglob("*")}
    result = run(*arguments)
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    text = result.stderr
    assert text.startswith("tinyrl: ")
    assert text.endswith("\n")
    assert 1 <= len(text.splitlines()) <= 6
    assert "Traceback" not in text
    assert "\x1b" not in text
    assert {p: p.stat().st_mtime_ns for p in Path().rglob("*")} == before, "something was written"
    return text.removeprefix("tinyrl: ")


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ("train grpo r.yaml grpo.group_sise=4", "grpo.group_sise"),
        ("train grpo r.yaml --name a/../../x --overwrite", "--name 'a/../../x'"),
        ("train grpo r.yaml --name mine", "tinyrl train --resume runs/mine"),
        ("train grpo task.data=rows.jsonl", "rows.jsonl:1: "),
        ("train ppo bad.yaml", "bad.yaml: unknown key `\\x1b[31mred`"),
        ("train grpo r.yaml --output-dir=~/r.yaml", "--output-dir"),  # of the home folder, where the shell leaves it
        ("train grpo task.data=~/rows.jsonl", "rows.jsonl:1: "),
        ("train gpro", "Did you mean `grpo`?"),
        ("train", "which method?"),
        ("train --resume runs/none", "runs/none"),
        ("train --resume runs/changed", "`run.num_steps`"),
        ("train grpo --resume x", "--resume"),
        ("train --resume x --from x", "--resume"),
        ("train --from runs/none@3", "runs/none"),
        ("train grpo --allow-config-change", "--resume"),
        ("eval runs/mine optim.learning_rate=1", "reward, generation, task"),
        ("eval reward.model=starter", "which run, checkpoint or model?"),
        ("eval a b --vs base", "--vs base"),
        ("eval a b --split train", "--split train"),
        ("report runs/none --output here", "--output"),
        ("check grpo --memory 24GB", "--offline"),
        ("check grpo --quick --write f --samples 16", "--samples and --write"),
        ("check grpo --quick --minutes 1", "--minutes"),
        ("check grpo --offline --prompts 4", "--prompts"),
        ("check grpo --offline --quick", "--quick"),
        ("check sft task.data=texts.jsonl --samples 4", "--samples"),
        ("show runs/mine --worst --json --export-hard f", "--export-hard and --json"),
        ("show runs/mine --worst --prompts", "--prompts"),
        ("show runs/mine --prompts --json", "--json"),
        ("show runs/mine --num 3", "--num"),
        ("show runs/mine --prompt 1 --worst", "--worst"),
        ("train --resume runs/mine --overwrite", "--overwrite"),
        ("train --from runs/mine@1 grpo", "METHOD"),
        ("export runs/mine --private", "--push"),
        ("chat starter generation.engine=fused", "generation.engine"),  # it has an engine of its own
        ("chat starter generation.max_rows=4", "generation.max_rows"),
        ("list tasks sort", "sort"),
    ],
)
def test_what_is_wrong_is_refused_before_anything_is_written(words: str, part: str):
    assert part in refused(*words.split())


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["train", "--resume", ""], "--resume is empty"),  # not the run in the current folder
        (["train", "--from", " "], "--from is empty"),
        (["train", "grpo", ""], "METHOD"),  # not the default recipe
        (["train", "grpo", "r.yaml", "--output-dir="], "--output-dir is empty"),
        (["check", "grpo", "r.yaml", "--write", ""], "--write is empty"),
        (["eval", "runs/mine", "--vs", ""], "--vs is empty"),
        (["eval", "runs/mine", "--save-samples", ""], "--save-samples is empty"),
        (["eval", ""], "TARGET"),
        (["export", "runs/mine", "--output", ""], "--output is empty"),
        (["chat", ""], "MODEL"),
        (["serve", "starter", "--host", ""], "--host is empty"),
        (["doctor", ""], "RUN is empty"),
        (["report", "runs/mine", ""], "RUN"),
        (["show", "runs/mine", "--export-hard", ""], "--export-hard is empty"),
        (["list", "settings", ""], "is empty"),
    ],
)
def test_an_empty_word_is_refused_by_its_name(words: list[str], part: str):
    """As of a shell's variable that is not set."""
    Path("config.yaml").write_text(Path("runs/mine/config.yaml").read_text())
    assert part in refused(*words)


@pytest.mark.parametrize("arguments", ["train --nmae x", "train --resume", "eval x --split test", "eval", "tarin"])
def test_an_option_or_command_that_is_wrong(arguments: str):
    result = run(*arguments.split())
    assert result.exit_code == 2
    assert len(result.output.splitlines()) <= 6


@pytest.mark.parametrize("option", ["--learning_rate 2e-5", "--learning-rate=2e-5"])
def test_a_setting_given_as_an_option_is_answered_with_how_it_is_written(option: str):
    result = run("train", "grpo", *option.split())
    assert result.exit_code == 2
    assert "optim.learning_rate=2e-5" in result.output


@pytest.mark.parametrize(
    ("words", "end"),
    [
        ("train dpo --train_batch_size 16", "dpo.batch_size=16"),
        ("train preferences-dpo-0.5b --train_batch_size=16", "dpo.batch_size=16"),  # a recipe names its method
        ("train --overwrite dpo --beta 0.3", "dpo.beta=0.3"),
        ("train grpo --weight_decay -1", "optim.weight_decay=-1"),
        ("train grpo --bf16", "model.dtype=bfloat16"),  # a flag
        ("train grpo --bf16 --learning_rate 1", "model.dtype=bfloat16 optim.learning_rate=1"),
        ("train grpo --weight_decay --bf16", "optim.weight_decay=VALUE model.dtype=bfloat16"),
    ],
)
def test_an_option_is_answered_for_the_method_that_was_typed(words: str, end: str):
    assert run(*words.split()).output.strip().endswith(f": {end}")


def test_each_unknown_name_is_shown_whatever_their_number():
    names = ["beta", "epsilon", "num_generations", "num_iterations", "loss_type", "scale_rewards", "seed", "lora_alpha"]
    shown = run("train", "grpo", *[f"{name}=1" for name in names]).stderr
    assert [name for name in names if f"`{name}`" in shown] == names


def test_debug_shows_where_it_came_from():
    result = run("train", "grpo", "r.yaml", "grpo.group_sise=4", "--debug")
    assert isinstance(result.exception, ValueError)
    assert "unknown key `grpo.group_sise`" in str(result.exception)


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (GuardStop("rewards failed"), 3, "tinyrl: stopped: rewards failed\n"),
        (OutOfRoom("one sequence"), 4, "tinyrl: stopped: one sequence\n"),
        (Signalled("SIGTERM"), 75, "tinyrl: stopped: SIGTERM\n"),
        (
            Signalled("SIGINT"),
            130,
            "tinyrl: stopped by Ctrl-C; no step was taken, and there is nothing to resume\n",
        ),
        (OSError(28, "No space left on device", "runs/x"), 4, "tinyrl: runs/x: No space left on device\n"),
        (PermissionError(13, "Permission denied", "rows.jsonl"), 2, "tinyrl: rows.jsonl: Permission denied\n"),
        (ValueError("\n".join("abcdefgh")), 2, "tinyrl: a\nb\nc\nd\ne\nf\n"),
        (ValueError("\x1b]0;x\x07"), 2, "tinyrl: [ESC]]0;x[U+0007]\n"),
    ],
)
def test_an_error_is_a_sentence_and_an_exit_code(
    error: Exception, code: int, said: str, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(typer.Exit) as caught, user_errors(False):
        raise error
    assert caught.value.exit_code == code
    assert capsys.readouterr().err == said
    with pytest.raises(type(error)), user_errors(True):
        raise error


def test_one_process_of_a_machine_prints(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    for rank, lines in (("0", 1), ("1", 0)):
        monkeypatch.setenv("LOCAL_RANK", rank)
        with pytest.raises(typer.Exit), user_errors(False):
            raise ValueError("x")
        assert len(capsys.readouterr().err.splitlines()) == lines


OUT_OF_MEMORY = [
    MemoryError(),
    OSError(12, "Cannot allocate memory"),
    RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory\n  frame #0: c10"),
    ImportError("libtorch_cpu.so: failed to map segment from shared object"),
]


@pytest.mark.parametrize("error", OUT_OF_MEMORY)
def test_memory_that_ran_out_is_a_sentence_wherever_it_arises(error: Exception, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(typer.Exit) as caught, user_errors(False):
        raise error
    with pytest.raises(typer.Exit) as later, user_errors(False, training=True):
        raise ValueError("a library in between") from error
    assert (caught.value.exit_code, later.value.exit_code) == (4, 4)
    lines = capsys.readouterr().err.splitlines()
    assert ["memory" in line for line in lines] == [True, True]


def test_a_bug_is_raised():
    with pytest.raises(RuntimeError, match="shape"), user_errors(False):
        raise RuntimeError("shape")
    with pytest.raises(ValueError, match="shape"), user_errors(False, training=True):
        raise ValueError("shape")


def test_a_run_is_started_with_what_is_given_and_its_exit_code_is_ours(monkeypatch: pytest.MonkeyPatch):
    calls: list[tuple[Config, dict[str, Any]]] = []

    def start(prepared: PreparedRun, **how: Any) -> SimpleNamespace:
        calls.append((prepared.config, how))
        return SimpleNamespace(go=lambda **_: 3)

    monkeypatch.setattr("tinyrl.training.launch.start", start)
    words = ["grpo", "r.yaml", "grpo.kl_coef=5e-2", "optim.learning_rate=3e-4"]
    assert run("train", "--overwrite", "--name", "x", *words, "--output-dir", "out").exit_code == 3
    [(config, how)] = calls
    assert (how["name"], how["output_dir"], how["overwrite"]) == ("x", "out", True)
    assert config.grpo is not None
    assert (config.grpo.kl_coef, config.optim.learning_rate) == (0.05, 0.0003)


@pytest.mark.parametrize(
    ("error", "points"), [(ExplainedByCheck("all fail"), True), (OutOfRoom("memory"), True), (ValueError("x"), False)]
)
def test_a_start_that_fails_points_to_check_where_that_explains_more(
    error: Exception, points: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tinyrl.training.launch.start", mock.Mock(side_effect=error))
    done = run("train", "grpo", "r.yaml")
    assert done.exit_code == (4 if isinstance(error, OutOfRoom) else 2)
    assert str(error) in done.stderr
    assert ("tinyrl check" in done.stderr) is points


def test_lists_version_and_help(monkeypatch: pytest.MonkeyPatch):
    names = re.findall(r"^  (\w+)  ", run("--help").stdout.partition("Commands:")[2], re.MULTILINE)
    assert names == ["train", "check", "eval", "doctor", "export", "chat", "serve", "report", "show", "list"]
    monkeypatch.setenv("COLUMNS", "20")  # narrower than anything could be read in
    assert run("--version").stdout == f"{__version__}\n"
    assert "sort" in run("list", "tasks").stdout
    recipes = run("list", "recipes").stdout.splitlines()
    assert any(line.startswith("starter-grpo ") for line in recipes)
    assert all(len(line.split(maxsplit=1)) == 2 for line in recipes)
    one = run("list", "settings", "lora").stdout
    assert "\n  r: 16 " in one
    assert one in run("list", "settings").stdout
    assert "num_steps: 60" in run("list", "settings", "starter-grpo").stdout


def test_a_report_of_several_runs_is_beside_them_or_where_one_says(folder: Path) -> None:
    for name in ("a", "b"):
        (folder / "runs" / name).mkdir(parents=True)
        (folder / "runs" / name / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n')
    done = run("report", "runs/a", "runs/b")
    assert [Path(line).parent for line in done.stdout.splitlines()] == [folder.resolve() / "runs"] * 2
    done = run("report", "runs/a", "runs/b", "--output", "here")
    assert done.stdout.splitlines() == ["here/report.html", "here/report.png"]


def test_a_reader_that_has_enough_is_no_error():
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "tinyrl", "list", "recipes"]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, check=False)
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, b"")
