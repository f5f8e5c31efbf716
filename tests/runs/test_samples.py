"""`tinyrl show RUN --samples`: which lines of samples.jsonl are shown, by role, observations in grey."""

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from tests.tools.report.runs import sample, write_run
from tinyrl.cli.commands import app
from tinyrl.runs.show import render_samples, select_samples

EPISODE = [
    {"role": "assistant", "content": "search Ada ;"},
    {"role": "tool", "content": "found\nBern ;"},
    {"role": "assistant", "content": "answer Bern ."},
]


def run(folder: Path, samples: list[dict[str, Any]], *, tail: str = "", config: dict[str, Any] | None = None) -> Path:
    made = write_run(folder / "run", [{"step": 0}], samples=samples, config=config)
    with (made / "samples.jsonl").open("a", encoding="utf-8") as file:
        file.write(tail)
    return made


def shown(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["show", *arguments, "--samples"])


def picked(path: Path, **asked: Any) -> list[tuple[int, str, int]]:
    wanted = {"kind": None, "step": None, "num": 9, **asked}
    return [(r["step"], r["kind"], r["prompt_index"]) for r in select_samples(path / "samples.jsonl", [], **wanted)]


def test_the_last_step_is_shown_unless_one_is_named(tmp_path: Path) -> None:
    lines = [
        sample(step, i, "P", "c", 1.0, kind=kind) for step in (0, 4, 2) for kind in ("train", "eval") for i in (7, 3)
    ]
    made = run(tmp_path, lines)
    assert picked(made) == [(4, "train", 7), (4, "train", 3), (4, "eval", 7), (4, "eval", 3)]
    assert picked(made, num=3, step=2) == [(2, "train", 7), (2, "train", 3), (2, "eval", 7)]
    assert picked(made, kind="eval", num=1) == [(4, "eval", 7)]


def test_an_episode_is_printed_by_role_and_what_was_read_is_grey() -> None:
    line = sample(5, 12, "city of Ada ?", "not shown", 0.25, episode=EPISODE, advantage=-0.5, finish_reason="turns")
    line["rewards"] = {"exact": 0.0, "short": 0.5}
    assert render_samples([line, sample(5, 0, "P", "", None)], grey=lambda text: f"<{text}>").split("\n") == [
        "step 5 | eval | prompt 12, sample 0 | reward 0.25 (exact 0, short 0.5) | advantage -0.5 | ended: turns",
        "prompt",
        "  city of Ada ?",
        "policy",
        "  search Ada ;",
        "<environment>",
        "<  found",
        "  Bern ;>",
        "policy",
        "  answer Bern .",
        "",
        "step 5 | eval | prompt 0, sample 0 | reward - | ended: eos",
        "prompt",
        "  P",
        "policy",
        "  (nothing)",
    ]


def test_a_terminal_is_told_nothing_by_a_sample(tmp_path: Path) -> None:
    hostile = [{"role": "tool", "content": "a\x1b[2Jb\u202ec\x00\ud800"}]
    made = run(tmp_path, [sample(1, 0, "p\x1b]0;x\x07", "", 1.0, episode=hostile, finish_reason="\x1b")])
    done = shown(str(made))
    assert done.exit_code == 0
    assert "a[ESC][2Jb[U+202E]c[U+0000][U+D800]" in done.stdout
    assert "p[ESC]]0;x[U+0007]" in done.stdout
    assert "\x1b" not in done.stdout


def test_damaged_lines_are_left_out_and_said(tmp_path: Path) -> None:
    odd = {"step": 1, "kind": "eval", "episode": [3, {"role": "tool"}, {"content": None}], "reward": "x", "rewards": 5}
    made = run(tmp_path, [odd], tail='{"step": 1, \n[]\n{"step": 2, "kind": "ev')
    done = shown(str(made))
    assert done.exit_code == 0
    assert done.stderr == "tinyrl: samples.jsonl: 2 lines could not be read and are left out.\n"
    assert done.stdout.startswith("step 1 | eval | prompt -, sample - | reward - | ended: \nprompt\n")
    assert done.stdout.count("environment") == 2


def test_what_is_not_there_is_refused_with_what_is(tmp_path: Path) -> None:
    made = run(tmp_path, [sample(step, 0, "P", "c", 1.0) for step in (4, 0)])
    for arguments, message in (
        (["--step", "9"], "no samples at step 9; there are some of step 0, 4"),
        (["--kind", "train", "--step", "4"], "no samples of kind train at step 4; there are none"),
    ):
        done = shown(str(made), *arguments)
        assert (done.exit_code, done.stdout) == (2, "")
        assert message in done.stderr
    (made / "samples.jsonl").unlink()
    assert "no samples; there are none" in shown(str(made)).stderr


def rewards_of(rows: list[dict[str, Any]]) -> list[tuple[int, Any]]:
    return [(row["prompt_index"], row["reward"]) for row in rows]


ASKED: dict[str, Any] = {"kind": None, "step": None, "num": 9}


def test_the_worst_come_first_and_what_has_no_reward_last(tmp_path: Path) -> None:
    rewards = [0.5, None, -1.0, 0.5, 0.25]
    lines = [sample(3, i, "P", "c", reward) for i, reward in enumerate(rewards)]
    path = run(tmp_path, [*lines, sample(1, 9, "P", "c", -9.0)]) / "samples.jsonl"
    expected = [(2, -1.0), (4, 0.25), (0, 0.5), (3, 0.5), (1, None)]
    assert rewards_of(select_samples(path, [], **ASKED, worst=True)) == expected
    assert rewards_of(select_samples(path, [], **{**ASKED, "num": 2}, worst=True)) == expected[:2]
    assert rewards_of(select_samples(path, [], **{**ASKED, "step": 1}, worst=True)) == [(9, -9.0)]


def test_a_prompt_is_unsolved_when_none_of_its_samples_is_right(tmp_path: Path) -> None:
    lines = [sample(3, i, "P", "c", reward) for i, reward in ((0, 0.0), (1, 1.0), (0, 0.5), (1, 0.0), (2, None))]
    path = run(tmp_path, [*lines, sample(3, 1, "P", "c", 0.1, kind="train")]) / "samples.jsonl"
    found = select_samples(path, [], **ASKED, unsolved=1.0)
    assert rewards_of(found) == [(0, 0.0), (0, 0.5), (2, None), (1, 0.1)]
    assert rewards_of(select_samples(path, [], **{**ASKED, "kind": "eval"}, unsolved=0.5)) == [(2, None)]


def test_one_prompt_is_followed_over_the_steps(tmp_path: Path) -> None:
    lines = [sample(step, i, "P", "c", 0.0, sample=n) for step in (0, 2, 4, 6, 8) for i in (1, 2) for n in (0, 1)]
    lines += [sample(3, 2, "P", "c", 0.0, kind="train"), sample(5, 6, "P", "c", 0.0, kind="train")]
    path = run(tmp_path, lines) / "samples.jsonl"

    def steps(prompt: int, num: int, kind: Any = None) -> list[tuple[int, str, int]]:
        found = select_samples(path, [], kind=kind, prompt=prompt, num=num)
        return [(row["step"], row["kind"], row["sample"]) for row in found]

    assert steps(2, 9) == [(step, "eval", 0) for step in (0, 2, 4, 6, 8)]
    assert steps(2, 3) == [(step, "eval", 0) for step in (0, 4, 8)]
    assert steps(2, 1) == [(8, "eval", 0)]
    assert steps(2, 4, kind="train") == [(3, "train", 0)]
    assert steps(6, 4) == [(5, "train", 0)]
    with pytest.raises(ValueError, match="no samples of kind eval of prompt 6"):
        steps(6, 4, kind="eval")


def test_options_of_the_command(tmp_path: Path) -> None:
    lines = [sample(step, i, f"prompt {i}", f"text {step}", (step + i) / 10) for step in (0, 4) for i in (0, 1)]
    made = str(run(tmp_path, lines, config={"method": "grpo", "task": {"name": "sort", "solved_reward": 0.45}}))
    for words, headings in (
        (("--worst", "--num", "1"), ["step 4 | eval | prompt 0, sample 0 | reward 0.4 | ended: eos"]),
        (("--unsolved",), ["step 4 | eval | prompt 0, sample 0 | reward 0.4 | ended: eos"]),
        (("--prompt", "1", "--step", "0"), ["step 0 | eval | prompt 1, sample 0 | reward 0.1 | ended: eos"]),
    ):
        assert [line for line in shown(made, *words).stdout.splitlines() if " | " in line] == headings
    assert shown(made, "--worst", "--prompt", "1").exit_code == 2


def test_a_megabyte_of_text_is_cut_in_the_middle(tmp_path: Path) -> None:
    made = run(tmp_path, [sample(0, 0, "P", "start" + "x" * 1_000_000 + "end", 1.0)])
    done = shown(str(made)).stdout
    assert len(done) < 25_000
    assert "\n  start" in done
    assert done.endswith("end\n")
    assert "\n  [980,0" in done
    assert shown(str(run(tmp_path / "lines", [sample(0, 0, "P", "y\n" * 500_000, 1.0)]))).stdout.count("\n") < 1010
