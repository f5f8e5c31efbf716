"""The command line: what goes wrong before training gives at most six lines and exit code 2, and nothing is written."""

import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from tinyrl import __version__
from tinyrl.cli.commands import GONE, app
from tinyrl.cli.options import user_errors
from tinyrl.config.recipe import dump_config
from tinyrl.config.schema import Config
from tinyrl.errors import GuardStop, Interrupted, OutOfRoom

ROOT = Path(__file__).resolve().parents[2]
RECIPE = "method: grpo\ntask: {name: sort}\n"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a recipe in it."""
    monkeypatch.chdir(tmp_path)
    Path("r.yaml").write_text(RECIPE)
    return tmp_path


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments), prog_name="tinyrl")


@pytest.mark.parametrize("gone", GONE)
def test_a_removed_command_is_answered_with_the_line_that_replaces_it(gone: str):
    name, *options = gone.split()
    done = run(name, "x", *(f"{option}=x" if option.startswith("-") else option for option in options))
    assert done.exit_code == 2
    assert GONE[gone] in done.output


def refused(*arguments: str) -> str:
    """What is printed on standard error, after checking that it has the form of every error."""
    before = {p: p.stat().st_mtime_ns for p in Path().rglob("*")}
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    said = result.stderr
    assert said.startswith("tinyrl: ")
    assert said.endswith("\n")
    assert 1 <= len(said.splitlines()) <= 6
    assert "Traceback" not in said
    assert {p: p.stat().st_mtime_ns for p in Path().rglob("*")} == before, "something was written"
    return said.removeprefix("tinyrl: ")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["grpo", "r.yaml", "grpo.group_sise=4"], "override 'grpo.group_sise=4': unknown key `grpo.group_sise`."),
        (["grpo", "r.yaml", "grpo.minibatch_size=7"], "grpo.minibatch_size=7 does not divide the 256 sequences"),
        (["grpo", "r.yaml", "model.path=./nope"], "model.path=./nope: there is no such folder"),
        (["grpo", "r.yaml", "--name", "a/../../x", "--overwrite"], "--name 'a/../../x': a run's name is made of"),
        (["grpo", "r.yaml", "--output-dir", "r.yaml"], "--output-dir r.yaml: r.yaml is no folder that can be written"),
        (["grpo", "task.data=rows.jsonl"], "rows.jsonl:1: broken JSON at column 13"),
        (["ppo", "bad.yaml"], "bad.yaml:2: unknown key `\\x1b[31mred`"),
        (["gpro"], "unknown method 'gpro'. Did you mean `grpo`? Methods: grpo, ppo, distill, sft, reward, dpo"),
        ([], "which method? `tinyrl train grpo`, ppo, distill, sft, reward or dpo; or `tinyrl train --resume RUN`"),
        (["r.yaml"], "which method? Say it first, as in `tinyrl train grpo r.yaml`"),
        (["--resume", "runs/none"], "runs/none is not a run: it does not exist."),
        (["grpo", "--resume", "x"], "--resume needs nothing else: config.yaml of the run says everything (got 'grpo'"),
        (["--resume", "x", "--from", "x"], "--resume needs nothing else"),
        (["--from", "runs/none@3"], "runs/none"),
        (["grpo", "--from", "x", "--overwrite"], "--from takes section.key=value, --name, --output-dir and --until"),
    ],
)
def test_train_refuses_before_anything_is_written(arguments: list[str], sentence: str):
    Path("rows.jsonl").write_text('{"prompt": "\x1b[31m", "prompt": "b"}\n')
    Path("bad.yaml").write_text('method: ppo\n"\\e[31mred": 1\n')
    said = refused("train", *arguments)
    assert sentence in said
    assert "\x1b" not in said


def test_a_name_that_exists():
    existing = Path("runs/mine")
    existing.mkdir(parents=True)
    assert refused("train", "grpo", "r.yaml", "--name", "mine").startswith("run folder runs/mine exists.")
    (existing / "config.yaml").write_text("method: grpo\n")
    assert "tinyrl train --resume runs/mine" in refused("train", "grpo", "r.yaml", "--name", "mine")


def test_resuming_a_run_whose_config_was_changed_by_hand():
    Path("runs/mine").mkdir(parents=True)
    text = dump_config(Config.model_validate({"method": "grpo", "task": {"name": "sort"}}))
    Path("runs/mine/config.yaml").write_text(text.replace("num_steps: 200", "num_steps: many"))
    assert "config.yaml:" in (said := refused("train", "--resume", "runs/mine"))
    assert "`run.num_steps` is 'many'; it must be a whole number of at least 1." in said


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["reward.model=no/such/place"], "reward.model=no/such/place: there is no such folder, and a hub name is"),
        (["reward.functions=[{use: none.py:f}]"], "reward.functions: use 'none.py:f': there is no file"),
        (["optim.learning_rate=1"], "override 'optim.learning_rate=1': settings of reward, gen"),
        (["--data", "none.jsonl"], "none.jsonl: no such file"),
        (["--data", "r.yaml", "--split", "train"], "--data FILE says which rows; --split train chooses among those"),
        (["--save-samples", "no/s.jsonl"], "--save-samples no/s.jsonl: there is no folder no"),
    ],
)
def test_what_eval_is_given(arguments: list[str], sentence: str):
    Path("runs/mine/checkpoints").mkdir(parents=True)
    text = dump_config(Config.model_validate({"method": "grpo", "task": {"name": "sort"}}))
    Path("runs/mine/config.yaml").write_text(text)
    assert refused("eval", "runs/mine", *arguments).startswith(sentence)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["report", "runs/none"], "runs/none is not a run"),
        (["report", "runs/none", "--output", "here"], "--output is for a report of several runs"),
        (["eval", "runs/none"], "runs/none is not a run."),
        (["eval", "starter", "--task", "srot"], "task.name: there is no task 'srot'"),
        (["eval", "reward.model=starter"], "which run, checkpoint or model?"),
        (["eval", "a", "b", "--vs", "base"], "--vs base is of one run"),
        (["eval", "a", "b", "--split", "train"], "--split train is for one target"),
        (["eval", "a", "b"], "a is not a run"),
        (["show", "r", "--worst", "--unsolved"], "--worst and --unsolved: one of them"),
        (["list", "tasks", "sort"], "sort: only `tinyrl list settings` takes a name"),
    ],
)
def test_other_commands_refuse(words: list[str], sentence: str):
    assert refused(*words).startswith(sentence)


@pytest.mark.parametrize(
    "arguments",
    [
        "train --nmae x",
        "train grpo --name",
        "train --resume",
        "train grpo --device gpu",
        "eval x --split test",
        "eval x --samples 0",
        "eval",
        "tarin",
    ],
)
def test_an_option_or_command_that_is_wrong(arguments: str):
    result = run(*arguments.split())
    assert result.exit_code == 2
    assert len(result.output.splitlines()) <= 6


def test_debug_shows_where_it_came_from():
    result = run("train", "grpo", "r.yaml", "grpo.group_sise=4", "--debug")
    assert isinstance(result.exception, ValueError)
    assert "unknown key `grpo.group_sise`" in str(result.exception)


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (GuardStop("rewards failed"), 3, "tinyrl: stopped: rewards failed\n"),
        (OutOfRoom("one sequence"), 4, "tinyrl: stopped: one sequence\n"),
        (Interrupted("SIGTERM"), 75, "tinyrl: stopped: SIGTERM\n"),
        (OSError(28, "No space left on device", "runs/x"), 4, "tinyrl: runs/x: No space left on device\n"),
        (PermissionError(13, "Permission denied", "rows.jsonl"), 2, "tinyrl: rows.jsonl: Permission denied\n"),
        (ValueError("\n".join("abcdefgh")), 2, "tinyrl: a\nb\nc\nd\ne\nf\n"),
        (ValueError("\x1b]0;x\x07"), 2, "tinyrl: [ESC]]0;x[U+0007]\n"),
        (ValueError("lost\nException raised from connect at socket.cpp:1 (first call):\n#0"), 2, "tinyrl: lost\n"),
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


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OSError(12, "Cannot allocate memory"),
        RuntimeError("can't start new thread"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory\n  frame #0: c10"),
        ImportError("libtorch_cpu.so: failed to map segment from shared object"),
    ],
)
def test_memory_that_ran_out_is_a_sentence_wherever_it_arises(error: Exception, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(typer.Exit) as caught, user_errors(False):
        raise error
    with pytest.raises(typer.Exit) as later, user_errors(False, training=True):
        raise ValueError("a library in between") from error
    assert (caught.value.exit_code, later.value.exit_code) == (4, 4)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert all("memory" in line for line in lines)


def test_a_bug_is_raised():
    with pytest.raises(RuntimeError, match="shape"), user_errors(False):
        raise RuntimeError("shape")
    with pytest.raises(ValueError, match="shape"), user_errors(False, training=True):
        raise ValueError("shape")


# What goes right, up to where a model would be loaded


@dataclass
class Started:
    """What launch.start was called with."""

    config: Config
    name: str | None = None
    overwrite: bool = False
    output_dir: str = ""


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Started]:
    """Stands in for tinyrl.training.launch, which loads models."""
    calls: list[Started] = []
    stand_in: Any = ModuleType("tinyrl.training.launch")

    def start(config: Config, *, options: Any, output_dir: str, name: str | None, overwrite: bool, **_: Any) -> Any:
        calls.append(Started(config, name, overwrite, output_dir))
        return stand_in

    stand_in.Options, stand_in.start, stand_in.go = dict, start, lambda **_: 3
    monkeypatch.setitem(sys.modules, "tinyrl.training.launch", stand_in)
    return calls


def test_options_may_stand_anywhere(started: list[Started]):
    for arguments in (["--name", "x", "grpo", "r.yaml", "run.seed=7"], ["grpo", "r.yaml", "--name", "x", "run.seed=7"]):
        run("train", *arguments)
        assert (started[-1].name, started[-1].config.run.seed) == ("x", 7)


def test_a_run_is_started_with_what_was_said_and_its_exit_code_is_ours(started: list[Started]):
    arguments = ["r.yaml", "grpo.kl_coef=5e-2", "optim.learning_rate=3e-4", "--name", "mine", "--output-dir", "out"]
    result = run("train", "grpo", *arguments, "--overwrite")
    assert result.exit_code == 3
    (call,) = started
    assert (call.name, call.output_dir, call.overwrite) == ("mine", "out", True)
    assert call.config.grpo is not None
    assert (call.config.grpo.kl_coef, call.config.optim.learning_rate) == (0.05, 0.0003)


def test_lists_and_version(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "20")  # narrower than anything could be read in
    assert run("--version").stdout == f"{__version__}\n"
    assert "sort" in run("list", "tasks").stdout
    recipes = run("list", "recipes").stdout.splitlines()
    assert any(line.startswith("starter-grpo ") for line in recipes)
    assert all(len(line.split(maxsplit=1)) == 2 for line in recipes)
    one, every = run("list", "settings", "lora").stdout, run("list", "settings").stdout
    assert one.startswith("lora:")
    assert "\n  r: 16 " in one
    assert one in every
    assert "num_steps: 60" in run("list", "settings", "starter-grpo").stdout


# The real command


def real(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tinyrl", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env={"PYTHONPATH": str(ROOT)}, check=False)


def test_the_real_command():
    done = real("train", "grpo", "r.yaml", "grpo.group_sise=4")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "tinyrl: override 'grpo.group_sise=4': unknown key `grpo.group_sise`. Did you mean `grpo.group_size`?\n"
    )
    assert {p.name for p in Path().iterdir()} == {"r.yaml"}


@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("tinyrl train g", ["grpo"]),
        ("tinyrl train ppo ppo.kl_c", ["ppo.kl_coef="]),
        ("tinyrl list settings re", ["reference", "reward", "reward_model"]),
    ],
)
def test_the_shell_completes_methods_recipes_and_settings(typed: str, completed: list[str]) -> None:
    asked = {"_TINYRL_COMPLETE": "complete_bash", "COMP_WORDS": typed, "COMP_CWORD": str(typed.count(" "))}
    assert CliRunner().invoke(app, [], prog_name="tinyrl", env=asked).stdout.split() == completed


def test_a_report_of_several_runs_is_beside_them_or_where_one_says(folder: Path) -> None:
    for name in ("a", "b"):
        (folder / "runs" / name).mkdir(parents=True)
        (folder / "runs" / name / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n')
    (folder / "here").mkdir()
    assert refused("report", "runs/a", "runs/b", "--output", "none").startswith("none is no folder")
    done = run("report", "runs/a", "runs/b")
    assert (done.exit_code, done.stderr) == (0, "")
    assert [Path(line) for line in done.stdout.splitlines()] == [
        folder.resolve() / "runs" / name for name in ("report.html", "report.png")
    ]
    done = run("report", "runs/a", "runs/b", "--output", "here")
    assert done.stdout.splitlines() == ["here/report.html", "here/report.png"]
    assert "2 runs" in Path("here/report.html").read_text("utf-8")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="address space is limited as Linux does it")
@pytest.mark.parametrize("megabytes", [150, 900])
def test_a_limit_on_address_space_is_a_sentence(megabytes: int):
    """Less than any torch needs, which is found before it is imported: its C++ would end or hang."""
    code = (
        f"import resource; resource.setrlimit(resource.RLIMIT_AS, ({megabytes << 20},) * 2)\n"
        "from tinyrl.cli.commands import main\nmain()"
    )
    command = [sys.executable, "-c", code, "train", "grpo", "run.num_steps=1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 4, done.stderr
    assert "Traceback" not in done.stderr
    assert "memory" in done.stderr


@pytest.mark.slow
def test_trials_of_peoples_code_import_no_library_of_models(tmp_path: Path):
    """Nor anything that such a library prints when it is imported."""
    (tmp_path / "mine.py").write_text(
        "def score(completions, answer, **_):\n    return [float(a in c) for a, c in zip(answer, completions)]\n\n\n"
        "def respond(prompts, transcripts, **_):\n    return [None] * len(prompts)\n"
    )
    rows = [{"prompt": f"{i} + 1?", "answer": str(i + 1)} for i in range(4)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    code = (
        "import sys\nfrom typer.testing import CliRunner\nfrom tinyrl.cli.commands import GONE, app\n"
        "words = ['check', 'grpo', 'task.data=rows.jsonl', 'reward.functions=[{use: mine.py:score}]',"
        " 'environment.use=mine.py:respond', '--quick']\n"
        "assert CliRunner().invoke(app, words).exit_code in (0, 3)\n"
        "print([name for name in ('torch', 'transformers', 'peft', 'bitsandbytes') if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("[]\n", 0), done.stderr


def test_the_commands_are_these():
    names = re.findall(r"^  (\w+)  ", run("--help").stdout.partition("Commands:")[2], re.MULTILINE)
    kept = "train check eval doctor export chat serve report show list"
    assert names == kept.split()
