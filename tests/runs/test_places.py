"""What an argument that names a run means: a run, one of its checkpoints, the seeds of a command, or none of these."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import tinyrl
from tests.tools.report.runs import sample
from tinyrl.cli.commands import app
from tinyrl.config.recipe import load_config
from tinyrl.models.reading import resolve_model_path
from tinyrl.runs.checkpoint import write_checkpoint
from tinyrl.runs.places import checkpoint_of, run_at, run_to_resume
from tinyrl.runs.records import not_a_run
from tinyrl.runs.run_dir import RunDir, open_run


def made(folder: Path) -> RunDir:
    """A run whose steps 2 and 4 are evaluated and saved; that of step 2 is the better one."""

    def write(checkpoint: Path) -> None:
        (checkpoint / "x").write_text("x")

    folder.mkdir(parents=True)
    run = RunDir(folder)
    run.write_config(load_config("grpo", None, overrides=[]))
    run.write_environment({})
    for step, value in ((2, 0.9), (4, 0.5)):
        run.append_metrics(step, {"eval/reward_mean": value})
        run.append(run.samples, [sample(step, 0, "say it", f"at step {step}", value)])
        run.append(run.prompts, [{"step": step, "prompts": [[step, f"key {step}", 4, 0]]}])
        write_checkpoint(run.checkpoints, step, write=write)
    run.lock.release()
    return run


@pytest.fixture(autouse=True)
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.chdir(tmp_path)
    return made(Path("runs/one"))


@pytest.fixture
def seeds() -> Path:
    """The folder of a command with --seeds, with a fork of one beside them."""
    for name in ("seed-10", "seed-9", "forked"):
        made(Path("runs/two") / name)
    return Path("runs/two")


def typed(*arguments: str) -> Result:
    return CliRunner().invoke(app, [*arguments])


def output(*arguments: str) -> str:
    done = typed(*arguments)
    assert done.exit_code == 0, done.stderr
    return done.stdout


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports name their file and are not drawn, which takes seconds."""
    monkeypatch.setattr("tinyrl.tools.report._write", lambda folder, *_, **__: [folder / "report.html"])


# ---- a checkpoint of a run ----

NAMED = {"runs/one": None, "runs/one@4": 4, "runs/one@best": 2, "runs/one/checkpoints/step-000004": 4}


@pytest.mark.parametrize(("place", "step"), NAMED.items())
def test_a_run_is_named_itself_or_by_a_checkpoint(place: str, step: int | None) -> None:
    at = run_at(place)
    assert (at.run.path.resolve(), at.step) == (Path("runs/one").resolve(), step)


@pytest.mark.parametrize("place", ["runs/one@3", "runs/one@last", "runs/one/checkpoints/step-000003"])
def test_a_checkpoint_that_is_not_there_is_refused_wherever_one_is_taken(place: str) -> None:
    for take in (run_at, checkpoint_of):
        with pytest.raises(ValueError, match="runs/one"):
            take(place)


def test_a_damaged_checkpoint_is_shown_and_not_loaded(run: RunDir) -> None:
    (run.checkpoints / "step-000004/x").write_text("y")
    assert "no: " in output("show", "runs/one@4")
    with pytest.raises(ValueError, match="damaged"):
        checkpoint_of("runs/one@4")


def test_show_shows_the_step_of_a_checkpoint() -> None:
    assert [one["step"] for one in json.loads(output("show", "runs/one@best", "--json"))] == [2]
    assert [one["step"] for one in json.loads(output("show", "runs/one", "--json"))] == [2, 4]
    assert "at step 2" in output("show", "runs/one@best", "--samples")
    assert "at step 4" in output("show", "runs/one", "--samples")


def test_show_counts_the_tries_of_prompts_up_to_a_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tinyrl.tasks.run_rows.row_texts", lambda run, hard, notes: {})
    assert "prompts tried: 1," in output("show", "runs/one@2", "--prompts")
    assert "prompts tried: 2," in output("show", "runs/one@4", "--prompts")


def test_a_step_beside_a_checkpoint_is_refused_unless_it_is_the_same() -> None:
    assert typed("show", "runs/one@2", "--step", "4").exit_code == 2
    assert "at step 2" in output("show", "runs/one@2", "--step", "2")


@pytest.mark.usefixtures("undrawn")
def test_doctor_and_report_are_of_the_whole_run() -> None:
    assert output("doctor", "runs/one@2") == output("doctor", "runs/one")
    assert output("report", "runs/one@best") == "runs/one/report.html\n"


def test_a_resume_takes_the_run_and_no_checkpoint_of_it() -> None:
    assert run_to_resume("runs/one/").path == Path("runs/one")
    for place in ("runs/one@4", "runs/one/checkpoints/step-000004"):
        with pytest.raises(ValueError, match=f"--from {place}"):
            run_to_resume(place)


def test_in_python_a_run_is_opened_at_a_checkpoint() -> None:
    best = tinyrl.open_run("runs/one@best")
    assert {line["step"] for line in best.samples()} == {2}
    assert {line["step"] for line in tinyrl.open_run("runs/one").samples()} == {2, 4}
    with pytest.raises(ValueError, match="--from"):
        best.resume()


def test_metrics_alone_are_enough_to_read_a_run() -> None:
    Path("runs/bare").mkdir()
    Path("runs/bare/metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n')
    assert "1 step" in output("doctor", "runs/bare")


# ---- the seeds of a command ----


def test_what_only_reads_takes_each_seed_in_their_order(seeds: Path) -> None:
    assert [*json.loads(output("show", "runs/two", "--json"))] == ["two/seed-9", "two/seed-10"]
    assert [*json.loads(output("doctor", "runs/two", "--json"))] == ["two/seed-9", "two/seed-10"]
    assert output("show", "runs/two", "--samples").count("at step 4") == 2


@pytest.mark.usefixtures("seeds", "undrawn")
def test_the_report_of_several_seeds_is_in_their_folder_and_one_with_other_runs_beside_it() -> None:
    assert output("report", "runs/two") == "runs/two/report.html\n"
    assert output("report", "runs/two", "runs/one") == f"{Path('runs').resolve()}/report.html\n"


def test_a_seed_without_a_step_is_left_out_with_a_note(seeds: Path) -> None:
    (seeds / "seed-10/metrics.jsonl").unlink()
    done = typed("doctor", "runs/two", "--json")
    assert json.loads(done.stdout) == []
    assert "seed-10" in done.stderr


def test_the_rows_of_one_seed_at_a_time_are_written(seeds: Path) -> None:
    assert "seed-9" not in typed("show", "runs/two", "--export-hard", "hard.jsonl").stdout
    assert not Path("hard.jsonl").exists()


@pytest.mark.parametrize(
    "words", ["train --resume", "train --from", "eval", "export", "chat", "serve", "eval --task sort"]
)
def test_what_needs_one_run_names_those_that_a_folder_holds(words: str, seeds: Path) -> None:
    done = typed(*words.split(), "runs/two")
    assert done.exit_code == 2
    assert "seed-9, " in done.stderr or "seed-10, seed-9" in done.stderr


def test_a_resume_of_several_seeds_names_the_command_that_goes_on_with_all(seeds: Path) -> None:
    with pytest.raises(ValueError, match="--seeds"):
        run_to_resume(str(seeds))


# ---- what is not a run ----


@pytest.mark.parametrize(
    ("place", "part"),
    [
        ("runs", "such as runs/one."),
        ("runs@best", "such as runs/one."),
        ("runs/one/samples.jsonl", "inside one: runs/one."),
        ("runs/one/checkpoints", "inside one: runs/one."),
        ("runs/onw", "`runs/one`"),
        ("runs/onw@4", "`runs/one`"),
    ],
)  # fmt: skip
def test_what_is_not_a_run_is_said_with_the_run_that_may_be_meant(place: str, part: str) -> None:
    assert part in not_a_run(place)
    with pytest.raises(ValueError, match="not a run"):
        open_run(place)


def test_a_folder_of_runs_is_not_taken_for_a_model(seeds: Path) -> None:
    for path in ("runs/two", "runs/two@best"):
        with pytest.raises(ValueError, match="such as runs/two/seed-9"):
            resolve_model_path(path)
    (seeds / "config.json").write_text("{}")
    assert resolve_model_path("runs/two") == "runs/two"
