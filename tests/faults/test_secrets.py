"""Secrets of an address in the settings: in no file of a run, on no terminal."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from tests import running
from tests.environments.test_search_server import Server, documents
from tests.faults.lookup_runs import lookup_query, searching
from tinyrl.config.derive import derive_over
from tinyrl.config.recipe import load_written_config
from tinyrl.environments import search
from tinyrl.tools.report import write_report


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
        server.answers = [(200, {"result": [documents("a b")]})]
        address = server.url.replace("//", f"//me:{secret}@") + f"?api_key={secret}"
        variable = "TINYRL_ENVIRONMENT_CORPUS"
        monkeypatch.delenv(variable, raising=False)
        settings = searching(tmp_path, address, num_steps=2)
        code, run, _ = running.train(settings, tmp_path, stop_at=25)
        assert code == 75
        with pytest.raises(ValueError, match=variable):
            running.go_on(run)
        again = derive_over(load_written_config(run.path / "config.yaml"), [f"environment.corpus={address}"])
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
    assert len({login for _, login, _ in server.requests} - {None}) == 1
    said = capsys.readouterr()
    assert secret not in said.out + said.err
    assert not [p for p in tmp_path.rglob("*") if p.is_file() and secret.encode() in p.read_bytes()]
    assert f"{server.url.replace('//', '//***@')}?api_key=***" in (run.path / "config.yaml").read_text()
