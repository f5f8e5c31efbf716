"""The benchmarks' commands: what they refuse, and which options each of them has."""

import pytest

from benchmarks.__main__ import parse, parser, problem

BESIDE_A_PEER = ["--peer-python", "python"]


@pytest.fixture(autouse=True)
def _no_real_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TINYRL_REAL_MODEL", raising=False)


@pytest.mark.parametrize("what", ["grpo", "ppo", "text", "images", "learning", "real"])
def test_a_comparison_needs_a_peer(what: str):
    with pytest.raises(SystemExit):
        parse([what])


@pytest.mark.parametrize("what", ["grpo", "ppo", "text", "images", "learning"])
def test_a_comparison_with_its_peer_is_not_refused(what: str):
    assert problem(parse([what, *BESIDE_A_PEER])) is None


@pytest.mark.parametrize("words", [["real", "--methods", "grpo"], ["grpo", "--sizes", "s", "real"]])
def test_a_real_model_needs_its_folder_and_nothing_else(words: list[str]):
    assert "--real-model" in (problem(parse([*words, *BESIDE_A_PEER])) or "")
    assert problem(parse([*words, *BESIDE_A_PEER, "--real-model", "smollm2"])) is None


def test_ppo_of_a_real_model_needs_the_peer_that_has_it():
    words = ["real", *BESIDE_A_PEER, "--real-model", "smollm2", "--methods", "sft"]
    assert problem(parse(words)) is None
    assert "--ppo-peer-python" in (problem(parse([*words, "ppo"])) or "")


def test_what_cannot_be_measured_is_refused():
    assert "warm-up" in (problem(parse(["grpo", *BESIDE_A_PEER, "--steps", "1"])) or "")
    assert problem(parse(["grpo", *BESIDE_A_PEER, "--steps", "2"])) is None
    assert "at most 10" in (problem(parse(["learning", *BESIDE_A_PEER, "--pairs", "11"])) or "")
    assert problem(parse(["learning", *BESIDE_A_PEER, "--pairs", "10"])) is None
    assert "by itself" in (problem(parse(["gpu", "--shapes", "tiny", "7b"])) or "")
    assert problem(parse(["gpu", "--shapes", "tiny"])) is None


@pytest.mark.parametrize(
    ("words", "allowed"),
    [
        (["gpu", "--list"], True),
        (["gpu", "--pairs", "2"], False),
        (["grpo", *BESIDE_A_PEER, "--micro-batches", "8"], True),
        (["ppo", *BESIDE_A_PEER, "--micro-batches", "8"], False),
        (["ppo", *BESIDE_A_PEER, "--critics", "shared"], True),
        (["learning", *BESIDE_A_PEER, "--critics", "shared"], False),
        (["grpo", *BESIDE_A_PEER, "--sizes", "xs"], True),
        (["learning", *BESIDE_A_PEER, "--sizes", "xs"], False),
    ],
)
def test_a_command_has_the_options_that_it_reads_and_no_other(words: list[str], allowed: bool):
    if allowed:
        parser().parse_args(words)
    else:
        with pytest.raises(SystemExit):
            parser().parse_args(words)
