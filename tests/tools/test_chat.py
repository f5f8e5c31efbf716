"""A conversation: pieces are the answer, memory if there is a template, rewards, an environment, commands."""

import math
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests import running
from tests.images import image_file
from tests.tiny_models import tiny_model, tiny_tokenizer
from tests.tiny_vision import tiny_vision
from tests.training.rows import write_rows
from tinyrl.config.recipe import load_config
from tinyrl.data.images import is_image_id
from tinyrl.evaluation.targets import policy_at
from tinyrl.generation.plain import PlainEngine
from tinyrl.models.detokenizer import IncrementalDetokenizer
from tinyrl.process.launched import Options
from tinyrl.tools.chat import CHAT_STEP, ChatAnswer, ChatSession, converse
from tinyrl.workers.loading import use_of

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)
ASKED = "letters: b a sorted:"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chat")
    base = tiny_model(folder / "base", "llama")
    assert running.train(running.config("grpo", base), folder)[0] == 0
    return folder / "run"


@pytest.fixture
def session(run: Path) -> Iterator[ChatSession]:
    with ChatSession(policy_at(str(run), []), options=Options(device="cpu")) as session:
        yield session


def say(session: ChatSession, asked: str | int) -> tuple[str, ChatAnswer]:
    pieces: list[tuple[str, str]] = []
    answer = session.say(asked, lambda who, piece: pieces.append((who, piece)))
    return "".join(piece for who, piece in pieces if who != "prompt"), answer


def test_answers_are_the_engines_with_the_runs_reward(session: ChatSession) -> None:
    text, answer = say(session, ASKED)
    assert text == answer.text
    plain = PlainEngine(session.policy, session.policy.tokenizer, session.engine.settings)
    seed = session.target.config.run.seed
    [again] = plain.sample(plain.requests_for(answer.prompt.tokens, 1, row=0, seed=seed, step=CHAT_STEP))
    assert again.response == answer.sample.response
    assert session.rewards() == ({"reward": len(set(text)), "variety": len(set(text))}, None)
    assert say(session, ASKED)[1].sample.response != again.response  # the next turn draws its own numbers
    _, answer = say(session, 3)  # a held-out row by its number
    assert (answer.prompt.row["prompt"], answer.prompt.index) == (answer.prompt.text, 3)
    for number in (-1, 10**6):
        with pytest.raises(ValueError, match="0 to"):
            say(session, number)


def test_temperature_zero_is_greedy(session: ChatSession) -> None:
    session.set_temperature(0)
    assert say(session, ASKED)[0] == session(ASKED, greedy=True)
    session.set_temperature(0.5)
    assert (session.greedy, session.engine.settings.temperature) == (False, 0.5)
    for other in (-1, math.inf, math.nan):
        with pytest.raises(ValueError, match=str(other)):
            session.set_temperature(other)


def test_with_a_chat_template_the_conversation_continues_until_it_is_reset(tmp_path: Path) -> None:
    base = tiny_model(tmp_path / "base", "llama")
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(base)
    with ChatSession(policy_at(str(base), ["generation.max_new_tokens=4"]), options=Options(device="cpu")) as session:
        _, first = say(session, "hi")
        assert first.prompt.text == "<user>hi<a>"
        assert say(session, "more")[1].prompt.text == f"<user>hi<assistant>{first.text}<user>more<a>"
        session.reset()
        assert say(session, "hi")[1].prompt.text == "<user>hi<a>"


def test_half_a_character_waits_for_its_other_half() -> None:
    tokenizer = tiny_tokenizer()
    spelling, text = IncrementalDetokenizer(tokenizer), "aé漢🙂b"
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert len(tokens) == len(text.encode())  # a byte each
    pieces = [spelling.add([token]) for token in tokens]  # pyright: ignore[reportArgumentType]
    assert [piece for piece in pieces if piece] == ["a", "é", "漢", "🙂", "b"]
    assert spelling.end() == ""
    spelling.add([tokens[1]])  # pyright: ignore[reportArgumentType]
    assert spelling.end() == "\ufffd"


def test_an_environment_answers_in_the_middle(tmp_path: Path) -> None:
    """The embedded model that looks up; facts are columns of a held-out row."""
    few = ["run.num_steps=1", "grpo.num_prompts=2", "grpo.group_size=2", "grpo.minibatch_size=null"]
    config = load_config("grpo", "lookup", overrides=[*few, "run.eval_prompts=0", "run.threads=1"])
    assert running.train(config, tmp_path)[0] == 0
    with ChatSession(policy_at(str(tmp_path / "run"), []), options=Options(device="cpu")) as session:
        speakers: list[str] = []
        answers = (session.say(row, lambda who, piece: speakers.append(who)) for row in range(12))
        answer = next(answer for answer in answers if "environment" in speakers)
        assert answer.episode is not None
        assert answer.text == "".join(m["content"] for m in answer.episode.transcript if m["role"] == "assistant")
        assert {m["role"] for m in answer.episode.transcript} == {"assistant", "tool"}
        scores, why = session.rewards()
        assert why is None
        assert scores["reward"] in (0.0, 1.0)
        with pytest.raises(ValueError, match="`world`"):  # a prompt of one's own has no such column
            say(session, "question: job of nobody ?")


# ---- in a terminal ----


@pytest.fixture
def typed(session: ChatSession, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Return what is printed when these lines are typed."""

    def transcript(*lines: str) -> str:
        monkeypatch.setattr("builtins.input", lambda prompt, left=iter([*lines, "/quit"]): next(left))
        converse(session)
        return capsys.readouterr().out

    return transcript


def test_the_reward_of_a_question_of_ones_own_says_how_to_ask_a_row(session: ChatSession, typed: Any) -> None:
    assert "/prompt I" in typed(ASKED, "/reward")
    assert "/prompt I" not in typed("/prompt 1", "/reward")


def test_commands_do_what_help_says(session: ChatSession, typed: Any) -> None:
    asked = ["", "/reward", ASKED, "/reward", "/temperature 0", "/temperature x", "/prompt 1", "/prompt 0.5"]
    written = typed(*asked, "/what", "/quit", "/reset")
    assert written.count("nothing has been asked yet") == 1
    for expected in ("reward ", ", variety ", "type /temperature T", "type /prompt I", "/help"):
        assert expected in written
    assert "invalid literal" not in written
    assert session.greedy
    assert session.answer is not None
    assert session.answer.prompt.index == 1
    assert f"[{session.answer.prompt.text}]" in written


@pytest.mark.parametrize("command", ["/quit", "/reset", "/reward", "/help"])
def test_words_behind_a_command_that_takes_none_are_refused(command: str, session: ChatSession, typed: Any) -> None:
    written = typed(ASKED, f"{command} now")
    assert f"{command} alone" in written
    assert "unknown" not in written
    assert session.answer is not None


@pytest.mark.parametrize("line", ["a\udcffb", "/prompt \udcff", "/\udcff"])
def test_bytes_that_are_no_text_are_refused_and_the_conversation_goes_on(line: str, typed: Any) -> None:
    assert typed(line, "/bogus").count("unknown command /bogus") == 1


@pytest.mark.parametrize(
    ("typed_path", "path"),
    [
        ("a b.png", "a b.png"), ("'a b.png'", "a b.png"), ('"a b.png"', "a b.png"), ("a\\ b.png", "a b.png"),
        ("it's.png", "it's.png"), ("a.png", "a.png"),
    ],
)  # fmt: skip
def test_a_path_may_be_quoted_as_terminals_do(
    typed_path: str, path: str, session: ChatSession, typed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = list[str]()
    monkeypatch.setattr(session, "show_image", shown.append)
    typed(f"/image {typed_path}")
    assert shown == [path]


@pytest.mark.parametrize(("line", "unknown"), [("/bogus", 1), ("/help", 0)])
def test_a_command_that_there_is_not_is_named(typed: Any, line: str, unknown: int) -> None:
    written = typed(line)
    assert written.count("unknown command /bogus") == unknown
    assert "/temperature T" in written


def test_what_a_model_writes_is_made_safe_to_show(
    session: ChatSession, typed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, answer = say(session, "a")
    hostile = "\x1b[2J\u202e\ud800<script>"
    monkeypatch.setattr(ChatSession, "say", lambda session, text, on_text: on_text("policy", hostile) or answer)
    assert "[ESC][2J[U+202E][U+D800]<script>" in typed("hello")


def test_ctrl_c_ends_the_answer_and_not_the_conversation(
    session: ChatSession, typed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(IncrementalDetokenizer, "add", lambda *_, **__: signal.raise_signal(signal.SIGINT) or "")
    assert "stopped" in typed(ASKED, "/temperature 0")
    assert session.answer is None
    assert session.greedy


# ---- images ----


def letters(prompts: list[Any], completions: list[Any], **columns: Any) -> list[float]:
    """Reward different characters."""
    return [float(len({*str(completion)})) for completion in completions]


@pytest.fixture(scope="module")
def vision(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one step on pictures of one colour each."""
    folder = tmp_path_factory.mktemp("vision")
    base = tiny_vision("smolvlm", folder / "base")
    rows = list[dict[str, Any]]()
    for number in range(4):
        image_file(folder / f"{number}.png", color=(60 * number, 9, 9), size=(32, 32))
        rows.append({"prompt": "what?", "image": f"{number}.png"})
    data = str(write_rows(folder / "rows.jsonl", rows))
    task = {"name": "rows", "data": data, "eval_data": data}
    reward = {"functions": [{"use": use_of(partial(letters))}]}
    config = running.config("grpo", base, task=task, reward=reward, run={"num_steps": 1})
    assert running.train(config, folder)[0] == 0
    return folder / "run"


@pytest.fixture
def shows(vision: Path) -> Iterator[ChatSession]:
    with ChatSession(policy_at(str(vision), []), options=Options(device="cpu")) as session:
        session.set_temperature(0)
        yield session


def test_an_image_is_in_the_next_message_alone(shows: ChatSession, vision: Path) -> None:
    shows.show_image(str(vision.parent / "0.png"))
    _, first = say(shows, "what?")
    _, second = say(shows, "and now?")
    counts = [sum(map(is_image_id, answer.prompt.tokens)) for answer in (first, second)]
    assert counts == [4, 4]
    assert [len(message.get("images", ())) for message in shows.messages[::2]] == [1, 0]


def test_a_held_out_row_is_asked_with_its_image(shows: ChatSession, vision: Path) -> None:
    """As the same picture and text that are typed."""
    text, row = say(shows, 3)
    shows.reset()
    shows.show_image(str(vision.parent / "3.png"))
    typed_text, typed_answer = say(shows, "what?")
    assert row.prompt.tokens == typed_answer.prompt.tokens
    assert typed_text == text


def test_a_picture_that_cannot_be_shown_is_refused(shows: ChatSession, session: ChatSession, tmp_path: Path) -> None:
    """There is no such file; the model reads text."""
    with pytest.raises(ValueError, match=r"none\.png"):
        shows.show_image(str(tmp_path / "none.png"))
    with pytest.raises(ValueError, match="no images"):
        session.show_image(str(image_file(tmp_path / "a.png")))
    assert not shows.images
