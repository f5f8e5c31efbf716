"""Secrets in what a reward raises and prints, and in settings: in no file of a run, on no terminal."""

from __future__ import annotations

import json
import textwrap
import threading
from pathlib import Path

import pytest

from tests import running
from tests.environments.test_search_server import Server, documents, says
from tests.faults.test_search_runs import lookup_query, searching
from tests.training.test_resume import stopped_in_update
from tinyrl.config.recipe import load_written_config
from tinyrl.environments import search
from tinyrl.runs.run_dir import RunDir
from tinyrl.tools.report import write_report

BEARER, LAST_WORD = "tok-xyz", "sk-proj-abcdefgh12345678"
REWARD = f"""
    import os, sys

    def score(prompts, completions, **columns):
        for prompt in prompts:
            if "raise" in prompt:
                raise OSError("401 from https://me:pw-in-url@judge/: Authorization: Bearer {BEARER} " + "." * 250)
            if "die" in prompt:
                print("cannot log in with api_key={LAST_WORD}", file=sys.stderr, flush=True)
                os._exit(3)
        return [float(len(set(completion))) for completion in completions]
"""


def holding(folder: Path, secret: str) -> list[str]:
    return [str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file() and secret.encode() in p.read_bytes()]


@pytest.mark.slow
def test_no_file_of_a_run_and_no_line_of_its_log_holds_a_secret(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rewards.py").write_text(textwrap.dedent(REWARD))
    words = ["say a", "raise", "die", *(f"say {word}" for word in "bcdefghijklmnopqrs")]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"prompt": f"{word}:"}) + "\n" for word in words))
    rows = str(tmp_path / "rows.jsonl")
    settings = running.config(
        "grpo",
        model,
        task={"name": "rows", "data": rows, "eval_data": rows, "chat": False},
        reward={"functions": [{"use": f"{tmp_path / 'rewards.py'}:score"}]},
        grpo={"num_prompts": 21, "group_size": 2},
        run={"num_steps": 2, "save_every": 1, "eval_prompts": 4},
    )
    run = stopped_in_update(settings, tmp_path)
    assert running.go_on(run) == 0
    write_report(run.path)
    said = capsys.readouterr()
    reasons = " ".join(json.loads(line)["reason"] for line in run.failed_rewards.read_text().splitlines())
    for part in ("raised OSError: 401", "it last wrote: cannot log in"):
        assert part in reasons
    for secret in (BEARER, LAST_WORD, "pw-in-url"):
        assert holding(RunDir(run.path).path, secret) == []
        assert secret not in said.out + said.err


@pytest.mark.slow
def test_secrets_of_a_search_servers_address_are_sent_and_in_no_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resume asks for them; given again, in the environment or as a setting, they are no change."""
    server, secret = Server(), "hunter2"
    monkeypatch.setattr(search, "WAITS_S", (0.0, 0.0))
    monkeypatch.setattr(search, "_between", lookup_query)
    thread = threading.Thread(target=server.http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        server.answers = [says({"result": [documents("a b")]})]
        address = server.url.replace("//", f"//me:{secret}@") + f"?api_key={secret}"
        variable = "TINYRL_ENVIRONMENT_CORPUS"
        monkeypatch.delenv(variable, raising=False)
        settings = searching(tmp_path, address, num_steps=2)
        settings.environment.top_k = 1
        _, run, looks = running.train(settings, tmp_path, name="whole")
        _, run, _ = running.train(settings, tmp_path, stop_at=looks * 2 // 3)
        write_report(run.path)
        with pytest.raises(ValueError, match=variable):
            running.go_on(run)
        again = load_written_config(run.path / "config.yaml", overrides=[f"environment.corpus={address}"])
        assert running.go_on(run, config=again, stop_at=8) == 75
        monkeypatch.setenv(variable, address)
        assert running.go_on(run) == 0
        write_report(run.path)
    finally:
        server.ended.set()
        server.http.shutdown()
        server.http.server_close()
        thread.join()
    assert {path for path, *_ in server.requests} == {f"/retrieve?api_key={secret}"}
    assert len({*server.logins}) == 1
    assert server.logins[0] is not None
    said = capsys.readouterr()
    assert secret not in said.out + said.err
    assert holding(tmp_path, secret) == []
    assert f"{server.url.replace('//', '//***@')}?api_key=***" in (run.path / "config.yaml").read_text()
