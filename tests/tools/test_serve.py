"""`tinyrl serve` as people start it: an address, an answer, an end by a signal; what it refuses before loading."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import openai
import pytest
from typer.testing import CliRunner

from tests import running
from tests.tiny_models import TinyModels
from tinyrl.cli.commands import app
from tinyrl.evaluation.targets import Target, policy_at
from tinyrl.process.launched import Options
from tinyrl.runs.resolve import config_of
from tinyrl.tools.serve import listen, names_of, served


@pytest.mark.slow
def test_the_command_answers_until_a_signal_comes(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tinyrl", "serve", "starter", "--port", "0"]
    server = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    try:
        assert server.stdout is not None
        url = next(line for line in server.stdout if " at http" in line).split()[-1]
        client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
        assert [model.id for model in client.models.list()] == ["starter"]
        answer = client.completions.create(model="starter", prompt="letters: b a sorted:", max_tokens=5, temperature=0)
        assert answer.choices[0].text
        server.send_signal(signal.SIGTERM)
        assert server.wait(30) == 0
    finally:
        server.kill()
    assert not [*tmp_path.iterdir()]


TOKENISES = """
import sys, threading, time
from tinyrl.cli.commands import app
from tinyrl.endpoint import endpoint


def for_ever(*args, **options):
    print("tokenising", flush=True)
    time.sleep(3600)


endpoint.render_prompt = for_ever
app(["serve", "starter", "--port", "0"])
"""


def wait_for_answer(client: openai.OpenAI) -> None:
    with contextlib.suppress(openai.OpenAIError):
        client.completions.create(model="starter", prompt="x")


@pytest.mark.slow
def test_a_signal_ends_a_server_that_tokenises(tmp_path: Path) -> None:
    """In the middle of a text that takes for ever, whose client waits."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    server = subprocess.Popen(
        [sys.executable, "-c", TOKENISES], stdout=subprocess.PIPE, text=True, cwd=tmp_path, env=environment
    )
    try:
        assert server.stdout is not None
        url = next(line for line in server.stdout if " at http" in line).split()[-1]
        client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
        threading.Thread(target=wait_for_answer, args=[client], daemon=True).start()
        assert "tokenising" in next(server.stdout)
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0
    finally:
        server.kill()


def test_a_run_answers_with_its_policy_and_its_base(tiny: TinyModels, tmp_path: Path) -> None:
    code, run, _ = running.train(running.config("grpo", tiny("llama"), run={"num_steps": 1}), tmp_path)
    assert code == 0
    with served(policy_at(str(run.path), []), options=Options(device="cpu"), max_rows=2) as endpoint:
        assert endpoint.models == {"run/step-000001": "policy", "run": "policy", "base": "base"}
        assert str(tmp_path) not in endpoint.tokenizer.name_or_path, "errors of its template name it to clients"


@pytest.mark.parametrize(
    ("name", "lora", "names"),
    [
        ("base", True, {"base/step-000001": "policy"}),
        ("base", False, {"base/step-000001": "policy", "base": "policy"}),
        ("policy", True, {"policy/step-000001": "policy", "policy": "policy", "base": "base"}),
    ],
)
def test_a_run_called_as_its_untrained_model_is_asked_for_by_its_whole_name(
    name: str, lora: bool, names: dict[str, str], tmp_path: Path
) -> None:
    (run := tmp_path / name).mkdir()
    config = config_of({"method": "grpo", "lora": {"enabled": lora}})
    checkpoint = run / "checkpoints" / "step-000001"
    assert names_of(Target(str(run), run, config, checkpoint=checkpoint)) == names


def test_what_cannot_be_served_is_refused() -> None:
    """Before anything is loaded; a port that is taken, too."""
    with pytest.raises(ValueError, match="TINYRL_KEY"):  # other machines could reach it
        listen("0.0.0.0", 0, key=None)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        for words, named in (
            (["starter", "optim.learning_rate=1"], "optim.learning_rate"),
            (["starter", "generation.stop=[x]"], "generation.stop"),  # a request has its own
            (["starter", "generation.max_rows=4"], "generation.max_rows"),  # --max-rows
            (["starter", "reward.truncated=mask"], "reward.truncated"),
            (["starter-reward", "--port", "0"], "starter-reward"),
            (["nothing-there/at-all/here"], "nothing-there"),
            (["starter", "--port", port], port),
        ):
            done = CliRunner().invoke(app, ["serve", *words])
            assert done.exit_code == 2
            assert named in done.stderr
