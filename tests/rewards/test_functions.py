"""Reward functions in their worker process, with real faults: what is scored, what is dropped, and the messages."""

import json
import math
import os
import signal
import textwrap
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import psutil
import pytest

from tests import running
from tests.running import LookedAt
from tests.tiny_models import TinyModels
from tests.training.test_resume import assert_same
from tinyrl.data.images import IMAGE_MARK
from tinyrl.process import errors
from tinyrl.process.errors import CodeChanged, Interrupted
from tinyrl.rewards.functions import FunctionReward
from tinyrl.tasks.prompts import row_columns
from tinyrl.training.failing_rewards import describe_failures
from tinyrl.workers import calls, process
from tinyrl.workers.loading import parse_use, use_of
from tinyrl.workers.progress import Progress
from tinyrl.workers.values import RowResults

MakeReward = Callable[..., FunctionReward]


@pytest.fixture
def make_reward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeReward]:
    """make_reward(code, ...): the function `score` of a file with this code, as a reward; closed after the test."""
    made: list[FunctionReward] = []
    monkeypatch.chdir(tmp_path)

    def make(code: str | None, *, use: str = "rewards.py:score", **options) -> FunctionReward:
        if code is not None:
            (tmp_path / "rewards.py").write_text(textwrap.dedent(code), encoding="utf-8")
        made.append(FunctionReward(use, **options))
        return made[-1]

    yield make
    for reward in made:
        reward.close()


def score(reward: FunctionReward, completions: list) -> RowResults:
    return reward(["p"] * len(completions), completions, {})


def shown(call: RowResults) -> list[float | None]:
    """The scores, with None for NaN so that they can be compared."""
    return [None if math.isnan(score) else score for score in call.values]


def reasons(call: RowResults) -> dict[int, str]:
    return {failure.row: failure.reason for failure in call.failures}


def test_a_batch_is_scored_in_order_and_arrives_as_it_is(make_reward: MakeReward, tmp_path: Path):
    reward = make_reward("""
        import json
        def score(prompts, completions, **columns):
            open("seen.json", "w").write(json.dumps([prompts, completions, columns]))
            return [1.5, None]
    """)
    prompts = [[{"role": "user", "content": "é\ud800\U0001f600\u2028\x00\n"}], "plain"]
    completions = [[{"role": "assistant", "content": "\udfff"}], "x" * 300_000]
    columns = {"nested": [{"a": [1, None, True]}, 1.5], "large": [2**70, -1], "completion_ids": [[7], [8]]}
    call = reward(prompts, completions, columns)
    assert (shown(call), call.failures, reward.retried) == ([1.5, None], [], None)
    assert json.loads((tmp_path / "seen.json").read_text()) == [prompts, completions, columns]


def test_a_function_gets_paths_of_images_and_prompts_in_parts(make_reward: MakeReward, tmp_path: Path):
    reward = make_reward("""
        import json
        def score(prompts, completions, images, **columns):
            open("seen.json", "w").write(json.dumps([prompts, images]))
            return [1.0] * len(prompts)
    """)
    image = {"path": "/pictures/a.png", "sha256": "0" * 64, "size": [4, 2]}
    asked = [{"role": "user", "content": f"{IMAGE_MARK}what?", "images": [image]}]
    columns = row_columns([{"images": [image]}, {"images": None}])
    assert shown(reward([asked, "plain"], ["x", "y"], columns)) == [1.0, 1.0]
    parts = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what?"}]}]
    assert json.loads((tmp_path / "seen.json").read_text()) == [[parts, "plain"], [["/pictures/a.png"], []]]


# ---- how far the run is ----


def test_a_function_that_names_them_gets_the_step_and_the_number_of_steps(make_reward: MakeReward):
    reward = make_reward("""
        def score(completions, step, num_steps, **columns):
            return [float(step), float(num_steps), float(len(columns))]
    """)
    columns = {"answer": ["1", "2", "3"]}
    call = reward(["p"] * 3, ["x"] * 3, columns, progress=Progress.at(2, 10))
    assert shown(call) == [3.0, 10.0, 2.0]  # prompts, answer


def test_what_no_step_trains_on_is_scored_as_at_the_end(make_reward: MakeReward):
    reward = make_reward("""
        def score(completions, step, trainer_state):
            return [float(step), float(trainer_state.global_step)]
    """)
    for step in (None, 10, 1 << 40):
        assert shown(reward(["p"] * 2, ["x"] * 2, {}, progress=Progress.at(step, 10))) == [10.0, 10.0]
    assert shown(reward(["p"] * 2, ["x"] * 2, {}, progress=Progress.at(9, 10))) == [10.0, 9.0]


def test_a_column_of_the_same_name_is_the_rows_own(make_reward: MakeReward):
    reward = make_reward("""
        def score(completions, step, num_steps):
            return [float(of_row) + num_steps for of_row in step]
    """)
    call = reward(["p"] * 2, ["x"] * 2, {"step": [100, 200]}, progress=Progress.at(0, 10))
    assert shown(call) == [110.0, 210.0]


def test_a_function_that_names_none_sees_its_columns_alone(make_reward: MakeReward, tmp_path: Path):
    reward = make_reward("""
        def score(prompts, completions, **columns):
            open("seen.txt", "w").write(" ".join(columns))
            return [1.0]
    """)
    reward(["p"], ["x"], {"answer": ["1"]}, progress=Progress.at(0, 10))
    assert (tmp_path / "seen.txt").read_text() == "answer"


@pytest.mark.parametrize(
    ("signature", "state"),
    [
        ("completions, trainer_state, **columns", "trainer_state"),
        ("completions, **kwargs", 'kwargs["trainer_state"]'),
        ("completions, **kwargs", 'kwargs.get("trainer_state")'),
    ],
)
def test_a_reward_for_trl_reads_trainer_state(signature: str, state: str, make_reward: MakeReward):
    reward = make_reward(f"""
        def score({signature}):
            state = {state}
            return [state.global_step / state.max_steps] * len(completions)
    """)
    assert shown(reward(["p"], ["x"], {}, progress=Progress.at(5, 10))) == [0.5]


def test_what_trainer_state_does_not_have_here_is_named(make_reward: MakeReward):
    reward = make_reward("""
        def score(completions, trainer_state):
            return [trainer_state.epoch]
    """)
    [reason] = reasons(reward(["p"], ["x"], {}, progress=Progress.at(0, 10))).values()
    assert "'epoch'" in reason
    assert "global_step" in reason


def test_rows_that_are_tried_alone_are_of_the_same_step(make_reward: MakeReward):
    reward = make_reward("""
        def score(completions, step):
            assert "bad" not in completions
            return [float(step)] * len(completions)
    """)
    call = reward(["p"] * 3, ["x", "bad", "y"], {}, progress=Progress.at(6, 10))
    assert shown(call) == [7.0, None, 7.0]


def annealed(level: float, completions: list[str], step: int, num_steps: int) -> list[float]:
    """Ten times the step, and a hundred times the number of steps; the rest differs by completion."""
    return [level + 10 * step + 100 * num_steps + len({*text}) % 2 for text in completions]


def test_a_run_scores_by_its_step_evaluates_as_at_its_end_and_resumes_with_the_same_numbers(
    tiny: TinyModels, tmp_path: Path
) -> None:
    functions = {"functions": [{"use": use_of(partial(annealed, 0.0))}]}
    settings = running.config("grpo", tiny("llama"), reward=functions, run={"epochs": 0.125})  # 2 steps of 4 prompts
    code, run, looks = running.train(settings, tmp_path)
    assert code == 0
    lines = running.metrics(run)
    by_step = {line["step"]: line["reward/mean"] for line in lines if "reward/mean" in line}
    assert {step: int(mean // 10) for step, mean in by_step.items()} == {1: 21, 2: 22}
    assert {int(line["eval/reward_mean"] // 10) for line in lines if "eval/reward_mean" in line} == {22}
    code, stopped, _ = running.train(settings, tmp_path, name="stopped", stop_at=looks // 2)
    assert code == 75
    assert running.go_on(stopped) == 0
    assert_same(stopped, run, 2)


def test_functions_may_name_the_columns_they_take(make_reward: MakeReward):
    reward = make_reward("def score(completions, answer, bonus=0.5):\n    return [a + bonus for a in answer]")
    assert shown(reward(["p"], ["c"], {"answer": [1], "other": [2]})) == [1.5]
    with pytest.raises(ValueError, match=r"takes a column 'answer'.*Did you mean `answers`"):
        reward(["p"], ["c"], {"answers": [1]})


def test_a_file_or_module_imports_what_is_beside_it(make_reward: MakeReward, tmp_path: Path):
    code = "def score(prompts, completions, **columns):\n    return [worth] * len(prompts)\n"
    for use, files in (
        ("rewards.py:score", {"rewards.py": "from loading import worth\n", "loading.py": "worth = 4.0"}),
        ("json.py:score", {"json.py": "import json\nworth = json.loads('4.0')\n"}),  # it replaces no module
        ("people.scores:score", {"people/scores.py": "from . import worth\n", "people/__init__.py": "worth = 4.0"}),
    ):
        for i, (name, start) in enumerate(files.items()):
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(start + code * (i == 0))
        assert shown(score(make_reward(None, use=use), ["a"])) == [4.0]


def test_workers_hash_alike_and_load_no_torch(make_reward: MakeReward):
    reward = make_reward("""
        import sys
        def score(prompts, completions):
            return [hash('tinyrl') % 1_000_003, float('torch' in sys.modules)]
    """)
    first = shown(score(reward, ["a", "b"]))
    reward.close()
    assert shown(score(reward, ["a", "b"])) == first
    assert first[1] == 0.0


def test_a_function_that_raises_once_loses_nothing(make_reward: MakeReward):
    reward = make_reward("""
        from pathlib import Path
        def score(prompts, completions, **columns):
            mark = Path(__file__).with_name("raised")
            if not mark.exists():
                mark.touch()
                raise OSError("the network blinked")
            return [1.0] * len(prompts)
    """)
    call = score(reward, ["a", "b"])
    assert (shown(call), call.failures) == ([1.0, 1.0], [])
    assert reward.retried == "raised OSError: the network blinked (rewards.py, line 7)"


def test_rows_that_raise_are_dropped_and_others_keep_their_scores(make_reward: MakeReward):
    reward = make_reward("""
        def score(prompts, completions, **columns):
            return [number(text) for text in completions]
        def number(text):
            return 1 / float(text)
    """)
    call = score(reward, ["1", "two\n\x1b[31m", "4", "0", "nan"])
    assert shown(call) == [1.0, None, 0.25, None, None]
    found = reasons(call)
    assert "`score` raised ValueError: could not convert string to float: 'two" in found[1]
    assert found[1].isprintable()
    assert found[3] == "`score` raised ZeroDivisionError: float division by zero (rewards.py, line 5)"
    assert found[4] == "`score` returned NaN"


def test_the_rows_are_tried_in_a_fresh_process(make_reward: MakeReward):
    reward = make_reward("""
        calls = []
        def score(prompts, completions, **columns):
            calls.append(len(prompts))
            if len(prompts) > 1:
                raise RuntimeError("together")
            return [float(len(calls))]
    """)
    assert shown(score(reward, ["a", "b", "c"])) == [1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    ("fault", "timeout_s", "reason"),
    [
        ("time.sleep(1000)", 1, "gave no answer within 1 s (rewards.py, line 5)"),
        ("re.match('(a+)+b', 'a' * 60)", 1, "gave no answer within 1 s (rewards.py, line 5)"),  # keeps the GIL
        ("ctypes.string_at(0)", 30, "died of SIGSEGV (rewards.py, line 5)"),
        ("os._exit(3)", 30, "ended its process with exit code 3"),
        ("sys.exit('no\\n more\\x1b[2J')", 30, "raised SystemExit: no more[ESC][2J (rewards.py, line 5)"),
        ("os.closerange(3, 100), time.sleep(1000)", 30, "gave no answer"),
    ],
)
@pytest.mark.wide
def test_a_row_that_hangs_or_crashes_is_found(make_reward: MakeReward, fault: str, timeout_s: float, reason: str):
    code = f"""
        import ctypes, os, re, signal, sys, time
        def score(prompts, completions, **columns):
            if "bad" in completions:
                {fault}
            return [1.0] * len(prompts)
    """
    reward = make_reward(code, timeout_s=timeout_s)
    call = score(reward, ["a", "bad", "c"])
    assert shown(call) == [1.0, None, 1.0]
    assert reasons(call) == {1: f"`score` {reason}"}
    assert reward.retried == reason
    assert shown(score(reward, ["a"])) == [1.0]


@pytest.mark.parametrize("waits_s", [0.1, pytest.param(None, marks=pytest.mark.slow)], ids=["short", "ours"])
def test_a_function_that_outlasts_its_worker_is_ended_by_us(
    waits_s: float | None, make_reward: MakeReward, monkeypatch: pytest.MonkeyPatch
):
    if waits_s is not None:
        monkeypatch.setattr(process, "GRACE_S", waits_s)
        monkeypatch.setattr(process, "EXIT_S", waits_s)
    reward = make_reward(
        """
        import faulthandler, time
        def score(prompts, completions, **columns):
            faulthandler.cancel_dump_traceback_later()
            time.sleep(1000)
        """,
        timeout_s=0.1,
    )
    assert reasons(score(reward, ["a"])) == {0: "`score` gave no answer within 0.1 s"}


def test_a_worker_that_is_killed_while_it_is_asked_is_replaced(make_reward: MakeReward, tmp_path: Path):
    to_kill: list[int] = []

    def kill_instead_of_stopping() -> None:
        if to_kill:
            worker = to_kill.pop()
            os.kill(worker, signal.SIGKILL)
            while psutil.pid_exists(worker):
                time.sleep(0.001)

    reward = make_reward("""
        import os, time
        def score(prompts, completions):
            doomed = os.path.exists("doomed") and int(open("doomed").read()) == os.getpid()
            if doomed:
                time.sleep(1000)  # until it is killed
            return [float(os.getpid())]
    """)
    first = score(reward, ["a"]).values[0]
    (tmp_path / "doomed").write_text(str(int(first)))
    to_kill.append(int(first))
    with LookedAt(kill_instead_of_stopping):
        call = score(reward, ["a" * 1_000_000])
    assert (len(to_kill), call.failures, reward.retried) == (0, [], "died of SIGKILL")
    assert call.values[0] != first


def test_rows_that_fail_alone_are_tried_for_a_limited_time(make_reward: MakeReward, monkeypatch: pytest.MonkeyPatch):
    raises = make_reward("def score(prompts, completions):\n    return [float(text) for text in completions]")
    assert shown(score(raises, ["a", "b", "5"])) == [None, None, 5.0]
    monkeypatch.setattr(calls, "ROWS_TIMEOUTS", 0)
    call = score(raises, ["a", "5"])
    assert shown(call) == [None, None]
    second = reasons(call)[1]
    assert "was not tried again alone" in second
    said = describe_failures([("p", second), ("q", second), ("r", "`score` gave no answer within 1 s")])
    assert said.startswith("2 x `score` was not tried again alone, as 0 x timeout_s had gone into other rows, 1 x")


def test_what_a_function_prints_is_kept_in_lines_and_stays_out_of_the_way(
    make_reward: MakeReward, capfd: pytest.CaptureFixture[str]
):
    reward = make_reward("""
        import os, subprocess, sys
        print("loading")
        def score(prompts, completions, **columns):
            print("judging", *completions)
            if completions == ["die"]:
                print("no line break", end="", flush=True)
                os.abort()
            if completions == ["flood"]:
                for _ in range(20_000):
                    print('{"scores": [9.0], "failures": []}')
                    print("flood", file=sys.stderr)
                os.write(1, b'{"scores": [9.0], "failures": []}\\n')
                subprocess.run([sys.executable, "-c", "print('from a child')"], check=True)
                assert sys.stdin.read() == ""
                sys.stdin.close(), sys.stdout.close(), os.close(2)
            return [1.0] * len(prompts)
    """)
    lines: list[str] = []
    score(reward, ["a", "b"])
    score(reward, ["die"])
    reward.printed.send_to(lines.append)
    first, second, third, fourth, *_ = "".join(lines).splitlines()
    assert (first, second, third) == ("score: loading", "score: judging a b", "score: judging die")
    assert fourth.startswith("score: no line break")
    assert shown(score(reward, ["flood"])) == [1.0]
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("value", [{1, 2}, b"x", object()])
def test_a_column_that_is_not_json_is_named(make_reward: MakeReward, value: object):
    reward = make_reward("def score(prompts, completions, **columns):\n    return [1.0]")
    with pytest.raises(ValueError, match=rf"^Column 'strange' cannot be .* {type(value).__name__} is not JSON"):
        reward(["p"], ["c"], {"fine": [1], "strange": [value]})


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("import no_such_module\ndef score(): ...", r"No module named .* \(rewards\.py, line 1\)"),
        ("score = 'high'", "'high' is not a callable"),
        ("import time\ntime.sleep(1000)\ndef score(): ...", r"no answer within 0\.5 s \(rewards\.py, line 2"),
    ],
)
def test_code_that_does_not_load_is_the_persons_to_mend(
    code: str, why: str, make_reward: MakeReward, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(calls, "LOAD_TIMEOUT_S", 0.5 if "sleep" in code else 60.0)
    with pytest.raises(ValueError, match=rf"^reward\.functions: use 'rewards\.py:score' could not be loaded: .*{why}"):
        make_reward(code, timeout_s=0.5).start()


def test_code_that_stops_loading_later_fails_rows_and_not_the_run(make_reward: MakeReward, tmp_path: Path):
    reward = make_reward("""
        from pathlib import Path
        if Path(__file__).with_name("gone").exists():
            raise RuntimeError("the data is gone")
        def score(prompts, completions):
            return [1.0] * len(prompts)
    """)
    assert shown(score(reward, ["a"])) == [1.0]
    reward.close()
    (tmp_path / "gone").touch()
    assert "could not be loaded: it raised RuntimeError: the data is gone" in reasons(score(reward, ["a"]))[0]


RAISES_ON_X = """
    from helper import WORTH
    def score(completions):
        if "x" in completions:
            raise RuntimeError("a bad row")
        return [WORTH] * len(completions)
"""


@pytest.mark.parametrize(
    ("edited", "text"), [("helper.py", "WORTH = 5.0\n"), ("rewards.py", "def score(completions):\n    return [5.0]\n")]
)
def test_another_worker_is_not_started_on_edited_code(edited: str, text: str, make_reward: MakeReward, tmp_path: Path):
    (tmp_path / "helper.py").write_text("WORTH = 1.0\n")
    reward = make_reward(RAISES_ON_X)
    assert shown(score(reward, ["a", "b"])) == [1.0, 1.0]
    (tmp_path / edited).write_text(text)
    assert shown(score(reward, ["a", "b"])) == [1.0, 1.0]  # the worker has the code that it loaded
    with pytest.raises(CodeChanged, match=edited):
        score(reward, ["a", "x"])
    with pytest.raises(CodeChanged, match=edited):
        score(reward, ["a", "b"])


def test_another_worker_is_started_on_a_file_that_was_only_written_again(make_reward: MakeReward, tmp_path: Path):
    (tmp_path / "helper.py").write_text("WORTH = 1.0\n")
    (tmp_path / "near.py").write_text("")
    reward = make_reward(RAISES_ON_X)
    assert shown(score(reward, ["a"])) == [1.0]
    (tmp_path / "helper.py").write_text("WORTH = 1.0\n")
    os.utime(tmp_path / "helper.py", (1, 1))
    (tmp_path / "near.py").write_text("not imported")
    assert shown(score(reward, ["a", "x"])) == [1.0, None]


def test_a_file_that_is_gone_is_no_other_code_to_go_on_with(make_reward: MakeReward, tmp_path: Path):
    (tmp_path / "helper.py").write_text("WORTH = 1.0\n")
    reward = make_reward(RAISES_ON_X)
    assert shown(score(reward, ["a"])) == [1.0]
    (tmp_path / "helper.py").unlink()
    with pytest.raises(CodeChanged, match=r"helper\.py"):
        score(reward, ["a", "x"])


def test_workers_of_one_source_load_the_same_code(make_reward: MakeReward, tmp_path: Path):
    """As the agents of an environment do, of which only the first is started at the beginning."""
    (tmp_path / "rewards.py").write_text("def score(completions):\n    return [1.0] * len(completions)\n")
    source = parse_use("rewards.py:score")
    with FunctionReward(source) as first, FunctionReward(source) as second:
        assert shown(score(first, ["a"])) == [1.0]
        (tmp_path / "rewards.py").write_text("def score(completions):\n    return [5.0] * len(completions)\n")
        with pytest.raises(CodeChanged, match=r"rewards\.py"):
            second.start()
    with FunctionReward(parse_use("rewards.py:score")) as another_run:
        assert shown(score(another_run, ["a"])) == [5.0]


def test_half_of_the_memory_of_machine_or_container_is_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(errors, "CGROUP_LIMIT", tmp_path / "memory.max")
    total = psutil.virtual_memory().total
    for limit, wanted in ((None, total // 2), ("max\n", total // 2), ("1000000\n", 500_000)):
        if limit is not None:
            (tmp_path / "memory.max").write_text(limit)
        assert process.memory_limit() == wanted


def test_a_stop_ends_the_wait_and_the_next_call_is_not_answered_with_the_last(
    make_reward: MakeReward, monkeypatch: pytest.MonkeyPatch
):
    """Also where one row of a batch is tried alone and floods its output."""
    monkeypatch.setattr(process, "POLL_S", 0.02)
    answers: list[bool] = []
    code = """
        import time
        def score(prompts, completions, **columns):
            if len(prompts) > 1:
                raise RuntimeError("now one by one")
            while "flood" in completions:
                print("flood" * 1000)
            if "slow" in completions:
                time.sleep(1000)
            return [float(len(text)) for text in completions]
    """

    def stop_if_told() -> None:
        if answers and answers.pop():
            raise Interrupted("SIGTERM")

    reward = make_reward(code, timeout_s=1000)
    reward.start()
    for completions, looks in ((["slow"], 5), (["flood", "b"], 10)):
        answers += [True] + [False] * looks
        with LookedAt(stop_if_told), pytest.raises(Interrupted):
            score(reward, completions)
        assert answers == []
        call = score(reward, ["abc"])
        assert call.values == [3.0]


def test_an_empty_batch_starts_nothing(make_reward: MakeReward):
    reward = make_reward("raise RuntimeError('not needed')\ndef score(prompts, completions):\n    return []")
    assert reward([], [], {}) == RowResults([])


@pytest.mark.slow
@pytest.mark.parametrize(
    "attack",
    [
        "import sys; sys.stdout = sys.stderr = None",
        "import sys, io; sys.stdout = io.BytesIO(); sys.stdout.flush = lambda: 1 / 0",
        "import sys; sys.stdout = sys.stderr = type('Out', (), {'flush': lambda self: 1 / 0})()",
        "import os; os.write(1, b'{\"values\": [9, 9]}\\n' * 1000)",
        "import os; os.close(1)",
        "import os; os.closerange(0, 64)",
        "import os; os._exit(0)",
        "raise SystemExit",
        "raise KeyboardInterrupt",
        "raise GeneratorExit",
        "import numpy; return numpy.array([numpy.float16(1), numpy.int8(2)])",
        "return [float('nan'), float('inf')]",
        "import signal, os; os.kill(os.getpid(), signal.SIGTERM)",
        "import sys; sys.setrecursionlimit(20)",
    ],
)
def test_no_attack_on_its_process_is_more_than_a_failed_call(attack: str, make_reward: MakeReward):
    reward = make_reward(f"def score(completions, **columns):\n    {attack}\n    return [1.0, 2.0]\n")
    call = score(reward, ["a", "b"])
    failed = [row for row, value in enumerate(shown(call)) if value is None]
    assert shown(call) == [1.0, 2.0] or failed == [0, 1]
    assert sorted(reasons(call)) == failed
    assert all("`score`" in reason and "\n" not in reason for reason in reasons(call).values())
