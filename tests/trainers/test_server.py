"""Runs that sample through a stand-in of a serving engine: the numbers of a run without one, faults, resumes."""

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
from tinyrl.training.update import Updater


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tinyrl.generation.server.WAITS_S", (0.01, 0.01))
    monkeypatch.setattr(http_client, "POLL_S", 0.02)


def by_server(method: str, path: Path, server: StandIn, **sections: Any) -> Config:
    generation = {"engine": "server", "url": server.url, "max_prompt_tokens": 64, **sections.pop("generation", {})}
    return running.config(method, path, generation=generation, **sections)


def numbers(run: RunDir) -> list[dict[str, float]]:
    """Metrics, but for what the clock decides and what only a run with inexact sampling has."""
    kept = [{k: v for k, v in line.items() if isinstance(v, int | float)} for line in running.lasting(run)]
    return [{k: v for k, v in line.items() if k != "policy/capped_weights"} for line in kept]


def completions(run: RunDir) -> list[str]:
    return [json.loads(line)["completion"] for line in run.samples.read_text().splitlines()]


@pytest.mark.slow
def test_the_numbers_are_those_of_a_run_without_a_server(tiny: TinyModels, tmp_path: Path) -> None:
    """Three steps with evaluations: the same samples, and metrics to rounding."""
    with StandIn(tiny("llama")) as server:
        sections = {"grpo": {"preset": "grpo"}}
        code, ours, _ = running.train(by_server("grpo", tiny("llama"), server, **sections), tmp_path, name="server")
        assert code == 0
        assert not server.loaded
    generation = {"engine": "hf", "max_prompt_tokens": 64}
    code, plain, _ = running.train(
        running.config("grpo", tiny("llama"), generation=generation, **sections), tmp_path, name="hf"
    )
    assert code == 0
    assert completions(ours) == completions(plain)
    assert len(completions(ours)) > 20
    for here, there in zip(numbers(ours), numbers(plain), strict=True):
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
            settings = by_server("grpo", tiny("llama"), server, generation={"server_sleep": sleeps})
            code, run, _ = running.train(settings, tmp_path, name=str(sleeps))
            assert code == 0
            runs.append(run)
    assert asleep == [False] * 3 + [True] * 3
    assert numbers(runs[0]) == numbers(runs[1])


@pytest.mark.slow
def test_episodes_are_those_of_a_run_without_a_server(tmp_path: Path) -> None:
    """Each turn is a request with all that was said before it."""
    with StandIn(Path(resolve_model_path("lookup"))) as server:
        through = lookup(generation={"engine": "server", "url": server.url})
        code, ours, _ = running.train(through, tmp_path, name="server")
        assert code == 0
    code, plain, _ = running.train(lookup(generation={"engine": "hf"}), tmp_path, name="hf")
    assert code == 0
    assert completions(ours) == completions(plain)
    for here, there in zip(numbers(ours), numbers(plain), strict=True):
        assert here == pytest.approx(there, rel=1e-4, abs=1e-5, nan_ok=True)


@pytest.mark.slow
def test_a_load_that_is_ignored_stops_the_run_in_the_next_step(tiny: TinyModels, tmp_path: Path) -> None:
    """The adapter of the first update is taken and not used: nothing is sampled with the old one."""
    with StandIn(tiny("llama"), faults=Faults(loads_applied=2)) as server:
        settings = by_server("grpo", tiny("llama"), server, run={"eval_every": 0})
        code, run, _ = running.train(settings, tmp_path)
    assert code == 3
    assert [line["step"] for line in running.metrics(run)] == [0, 1]


@pytest.mark.slow
def test_a_server_that_dies_leaves_a_run_that_goes_on(tiny: TinyModels, tmp_path: Path) -> None:
    """Exit code 75; the server is started again, and the run ends as one that was never interrupted."""
    with StandIn(tiny("llama")) as server:
        settings = by_server("grpo", tiny("llama"), server)
        code, whole, _ = running.train(settings, tmp_path, name="whole")
        assert code == 0
        server.faults.dead_after = server.completions + 60
        code, run, _ = running.train(settings, tmp_path, name="run")
        assert code == 75
        assert 0 < len(running.metrics(run)) < 4
        server.faults.dead_after = None
        assert running.go_on(run) == 0
    assert running.lasting(run) == running.lasting(whole)


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"generation": {"engine": "server"}}, "generation.url"),
        ({"generation": {"engine": "server", "url": "localhost:8000"}}, "localhost:8000"),
        ({"generation": {"engine": "server", "url": "http://h:1"}, "lora": {"enabled": False}}, "lora.enabled"),
        ({"generation": {"engine": "server", "url": "http://h:1", "dtype": "float32"}}, "dtype"),
    ],
)
def test_settings_that_cannot_go_together(sections: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=said):
        running.config("grpo", tmp_path, **sections)
