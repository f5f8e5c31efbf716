"""Two processes against one: the same samples, metrics and weights, for every method and whatever they exchange."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests import running
from tests.distributed.cases import STEPS, cases
from tests.distributed.ranks import Ranks
from tests.faults.children import Child
from tinyrl.config.schema import Config
from tinyrl.runs.run_dir import RunDir

pytestmark = pytest.mark.slow
NAMES = ("grpo", "grpo-environment", "ppo", "ppo-full", "ppo-judged", "distill")
TEXT = ("sft", "reward", "kto")
RELATIVE, ABSOLUTE, OF_WEIGHTS = 1e-5, 1e-6, 1e-4
OF_KL = 1e-5  # nats of a response: a difference of two sums of log-probabilities, a hundred times as large


@dataclass
class Both:
    """The folders of the runs of one process, and of two."""

    one: Path
    two: Path

    def runs(self, name: str) -> tuple[RunDir, RunDir]:
        return RunDir(self.one / name), RunDir(self.two / name)


def train_all(settings: dict[str, Config], folder: Path) -> None:
    for name, config in settings.items():
        code, *_ = running.train(config, folder, name=name)
        if code:
            sys.exit(code)


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Both:
    folder = tmp_path_factory.mktemp("runs")
    settings = cases(folder)
    assert set(settings) == {*NAMES, *TEXT}
    alone = Child(train_all, settings, folder / "one", output=folder / "one.txt")
    together = Ranks(train_all, settings, folder / "two", folder=folder)
    assert together.end() == [0, 0], together.said
    assert alone.end() == 0, alone.said
    return Both(folder / "one", folder / "two")


def samples(run: RunDir, step: int) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in run.samples.read_text().splitlines()]
    return [
        {k: line.get(k) for k in ("kind", "prompt_index", "sample", "completion", "finish_reason", "episode")}
        for line in lines
        if line["step"] == step
    ]


@pytest.mark.parametrize("name", [*NAMES, *TEXT])
def test_samples_metrics_and_weights_agree(name: str, both: Both) -> None:
    runs = both.runs(name)
    if name in NAMES:
        one, two = (samples(run, 1) for run in runs)
        assert len(one) > 1
        assert two == one
    one, two = (running.lasting(run) for run in runs)
    assert [line["step"] for line in two] == [*range(STEPS + 1)]
    for ours, theirs in zip(one, two, strict=True):
        assert set(ours) == set(theirs)
        for key, value in ours.items():
            if isinstance(value, float) and not math.isnan(value):
                absolute = OF_KL if key.endswith("/kl") else ABSOLUTE
                assert theirs[key] == pytest.approx(value, rel=RELATIVE, abs=absolute), (ours["step"], key)
            elif not isinstance(value, list):
                assert theirs[key] == value, (ours["step"], key)
    one, two = (running.weights(run, STEPS) for run in runs)
    assert set(one) == set(two)
    for key, tensor in one.items():
        assert float((two[key].double() - tensor.double()).abs().max()) < OF_WEIGHTS, key


def test_the_cases_differ_in_what_they_exchange(both: Both) -> None:
    """Refills happened, the KL's weight adapted, episodes were played: else the cases above would show nothing."""
    last = {name: running.lasting(both.runs(name)[0])[-1] for name in NAMES}
    assert last["ppo"]["objective/kl_coef"] != running.lasting(both.runs("ppo")[0])[1]["objective/kl_coef"]
    assert last["grpo-environment"]["environment/turns"] > 1
    kept = [line.get("reward/zero_spread_kept") for line in running.lasting(both.runs("grpo")[0])]
    flat = [line.get("reward/zero_spread_groups") for line in running.lasting(both.runs("grpo")[0])]
    assert kept != flat
