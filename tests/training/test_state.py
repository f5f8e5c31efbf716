"""state.json: what was written comes back, and what was edited is refused with the first thing that is wrong."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tinyrl.models.device import python_rng
from tinyrl.training.state import STATE, Best, CheckpointState, Controllers, RunState, Sources, read_state


@pytest.fixture
def written(tmp_path: Path) -> tuple[Path, CheckpointState]:
    run = RunState(
        step=7,
        phase="evaluation",
        values={"reward/mean": math.nan, "completion/tokens": 96},
        controllers=Controllers(kl_coef=0.07, exact_sampling=True, failing_batches=1),
        best=Best(step=5, value=0.5),
        skipped=1,
        loss_scale={
            "scale": 512.0,
            "growth_factor": 2.0,
            "backoff_factor": 0.5,
            "growth_interval": 2000,
            "_growth_tracker": 0,
        },
    )
    state = CheckpointState(
        run=run,
        micro_batch_tokens=768,
        threads=1,
        sources=Sources(rows={"training": "abc"}),
        config={"method": "grpo"},
        records={"metrics.jsonl": 10},
        python_random=python_rng(),
    )
    folder = tmp_path / "step-000007"
    folder.mkdir()
    state.write(folder)
    return folder, state


def test_what_was_written_comes_back(written: tuple[Path, CheckpointState]) -> None:
    folder, state = written
    back = read_state(folder)
    assert str(back.run.values.pop("reward/mean")) == "nan"
    state.run.values.pop("reward/mean")
    assert back == state


EDITS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "a negative step": (lambda s: s["run"].update(step=-1), "run.step: Input should be greater than or equal to 0"),
    "a missing field": (lambda s: s.pop("records"), "records: Field required"),
    "another step than the folder's": (lambda s: s["run"].update(step=8), "run.step: 8, in step-000007"),
    "a negative KL weight": (lambda s: s["run"]["controllers"].update(kl_coef=-1.0), "run.controllers.kl_coef: "),
    "a scale without its growth": (lambda s: s["run"]["loss_scale"].pop("_growth_tracker"), "run.loss_scale: "),
    "a generator of text": (lambda s: s["python_random"][1].__setitem__(0, "a"), "python_random.1"),
    "a section that is a list": (lambda s: s["config"].update(run=[]), "config.run."),
    "a field of another version": (lambda s: s.update(new=1), "new: Extra inputs are not permitted"),
}


@pytest.mark.parametrize("name", EDITS)
def test_what_was_edited_is_refused(name: str, written: tuple[Path, CheckpointState]) -> None:
    folder, _ = written
    edit, problem = EDITS[name]
    values = json.loads((folder / STATE).read_text())
    edit(values)
    (folder / STATE).write_text(json.dumps(values))
    with pytest.raises(ValueError, match="not what this tinyrl writes") as caught:
        read_state(folder)
    assert problem in str(caught.value)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"run": NULL}', "\udcff"])
def test_what_is_no_json_object_is_refused(text: str, written: tuple[Path, CheckpointState]) -> None:
    folder, _ = written
    (folder / STATE).write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ValueError, match="not what this tinyrl writes"):
        read_state(folder)
