"""`tinyrl show RUN`: which there are, how good they were, and whether they verify."""

import json
from pathlib import Path

from typer.testing import CliRunner

from tinyrl.cli.commands import app
from tinyrl.config.recipe import load_config
from tinyrl.runs.checkpoint import write_checkpoint
from tinyrl.runs.run_dir import RunDir, create_run
from tinyrl.runs.show import show_checkpoints


def a_run(folder: Path) -> RunDir:
    config = load_config("grpo", None, overrides=[])
    run = create_run(str(folder), name="one", config=config, overwrite=False)
    run.write_config(config)
    for step, score in ((2, 0.25), (4, 0.75), (6, None)):
        run.append_metrics(step, {} if score is None else {"eval/reward_mean": score})

        def write(folder: Path, step: int = step) -> None:
            (folder / "x").write_bytes(b"x" * 1000 * step)

        write_checkpoint(run.checkpoints, step, write=write)
    return run


def test_a_checkpoint_is_listed_with_its_size_metric_and_problem(tmp_path: Path) -> None:
    run = a_run(tmp_path)
    (run.checkpoints / "step-000006" / "x").write_bytes(b"y" * 6000)
    with run.metrics.open("a") as file:
        file.write('{"step": 7, "eval/rew')  # cut off by a crash
    listed = json.loads(show_checkpoints(run, as_json=True))
    assert [(one["name"], one["step"], one["metric"]) for one in listed] == [
        ("step-000002", 2, 0.25),
        ("step-000004", 4, 0.75),
        ("step-000006", 6, None),
    ]
    assert [one["problem"] is None for one in listed] == [True, True, False]
    assert 4000 < listed[1]["size"] < 5000
    text = show_checkpoints(run)
    assert "reward_mean" in text.splitlines()[0]
    assert text.splitlines()[2].endswith("0.7500  yes, best")
    assert "no: x is not what was written (its SHA-256 differs)" in text
    assert f"tinyrl eval {run.checkpoints / 'step-000004'}" in text
    (run.checkpoints / "step-000002" / "MANIFEST.json").unlink()
    (run.checkpoints / "step-000004" / "MANIFEST.json").unlink()
    assert "none verifies" in show_checkpoints(run)


def test_checkpoints_prints_a_table_or_json(tmp_path: Path) -> None:
    run = a_run(tmp_path)
    done = CliRunner().invoke(app, ["show", str(run.path), "--json"])
    assert [one["step"] for one in json.loads(done.output)] == [2, 4, 6]
    assert all(one["problem"] is None for one in json.loads(done.output))
    refused = CliRunner().invoke(app, ["show", str(tmp_path / "two")])
    assert refused.exit_code == 2


def test_a_path_cannot_move_the_cursor(tmp_path: Path) -> None:
    run = a_run(tmp_path / "a b\x1b[2Jc")
    text = show_checkpoints(run)
    assert text.replace("\n", "").isprintable()
    assert "train --resume '" in text
    assert "a b[ESC][2Jc/one'" in text
    assert max(map(len, text.splitlines())) < 300
