"""Runs that sample through a stand-in of vLLM's server: the numbers of a run without one, faults, resumes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests import running
from tests.faults.lookup_runs import lookup
from tests.generation.stand_in import Faults, StandIn
from tests.tiny_models import TinyModels
from tinyrl.config.schema import Config
from tinyrl.data import http_client
from tinyrl.models.loading import resolve_model_path
from tinyrl.runs.run_dir import RunDir
from tinyrl.training.step import Updater


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tinyrl.generation.server.WAITS_S", (0.01, 0.01))
    monkeypatch.setattr(http_client, "POLL_S", 0.02)


def by_server(path: Path, server: StandIn, **sections: Any) -> Config:
    generation = {"engine": "server", "url": server.url, "max_prompt_tokens": 64, **sections.pop("generation", {})}
    return running.config("grpo", path, generation=generation, **sections)


def trained(settings: Config, folder: Path, name: str) -> RunDir:
    code, run, _ = running.train(settings, folder, name=name)
    assert code == 0
    return run


def completions(run: RunDir) -> list[str]:
    return [json.loads(line)["completion"] for line in run.samples.read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("episodes", [False, True])
def test_the_numbers_are_those_of_a_run_without_a_server(tiny: TinyModels, tmp_path: Path, *, episodes: bool) -> None:
    """Three steps with evaluations, also of episodes: the same samples, and metrics to rounding."""
    model = Path(resolve_model_path("lookup")) if episodes else tiny("llama")
    with StandIn(model) as server:
        if episodes:
            through, plain = (
                lookup(generation=generation)
                for generation in ({"engine": "server", "url": server.url}, {"engine": "hf"})
            )
        else:
            preset = {"grpo": {"preset": "grpo"}}
            through = by_server(model, server, **preset)
            plain = running.config("grpo", model, generation={"engine": "hf", "max_prompt_tokens": 64}, **preset)
        ours = trained(through, tmp_path, "server")
        assert not server.loaded
    plainly = trained(plain, tmp_path, "hf")
    assert completions(ours) == completions(plainly)
    assert len(completions(ours)) > 20 or episodes
    for lines in zip(running.lasting(ours), running.lasting(plainly), strict=True):
        here, there = (
            {k: v for k, v in line.items() if isinstance(v, int | float) and k != "policy/capped_weights"}
            for line in lines
        )
        assert here == pytest.approx(there, rel=1e-4, abs=1e-5, nan_ok=True)


@pytest.mark.slow
def test_a_server_that_sleeps_does_so_while_the_run_learns(
    tiny: TinyModels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The numbers are those of one that stays awake."""
    step, runs, asleep = Updater.step, list[RunDir](), list[bool]()
    with StandIn(tiny("llama"), faults=Faults(sleeps=True)) as server:

        def noted(self: Updater, *args: Any, **named: Any) -> dict[str, float]:
            asleep.append(server.asleep)
            return step(self, *args, **named)

        monkeypatch.setattr(Updater, "step", noted)
        for sleeps in (False, True):
            settings = by_server(tiny("llama"), server, generation={"server_sleep": sleeps})
            runs.append(trained(settings, tmp_path, str(sleeps)))
    assert asleep == [False] * 3 + [True] * 3
    assert running.lasting(runs[0]) == running.lasting(runs[1])


@pytest.mark.slow
def test_a_load_that_is_ignored_stops_the_run_in_the_next_step(tiny: TinyModels, tmp_path: Path) -> None:
    """The adapter of the first update is accepted and not used: nothing is sampled with the old one."""
    with StandIn(tiny("llama"), faults=Faults(loads_applied=2)) as server:
        code, run, _ = running.train(by_server(tiny("llama"), server, run={"eval_every": 0}), tmp_path)
    assert code == 3
    assert [line["step"] for line in running.metrics(run)] == [0, 1]


@pytest.mark.slow
def test_a_server_that_dies_leaves_a_run_that_is_resumed(tiny: TinyModels, tmp_path: Path) -> None:
    """Exit code 75; the server is started again, and the run ends as one that was never interrupted."""
    with StandIn(tiny("llama")) as server:
        settings = by_server(tiny("llama"), server)
        whole = trained(settings, tmp_path, "whole")
        server.faults.dead_after = server.completions + 60
        code, run, _ = running.train(settings, tmp_path, name="run")
        assert code == 75
        assert 0 < len(running.metrics(run)) < 4
        server.faults.dead_after = None
        assert running.go_on(run) == 0
    assert running.lasting(run) == running.lasting(whole)


@pytest.mark.parametrize(
    ("sections", "named"),
    [
        ({"generation": {"engine": "server"}}, "generation.url"),
        ({"generation": {"engine": "server", "url": "localhost:8000"}}, "localhost:8000"),
        ({"generation": {"engine": "server", "url": "http://h:1"}, "lora": {"enabled": False}}, "lora.enabled"),
        ({"generation": {"engine": "server", "url": "http://h:1", "dtype": "float32"}}, "dtype"),
    ],
)
def test_settings_that_cannot_go_together(sections: dict[str, Any], named: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=named):
        running.config("grpo", tmp_path, **sections)
