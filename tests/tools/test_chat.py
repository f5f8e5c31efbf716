"""A conversation: pieces are the answer, memory where there is a template, the start beside it, its reward, tools."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from tests import running
from tests.tiny_models import tiny_model, tiny_tokenizer
from tinyrl.config.recipe import load_config
from tinyrl.evaluation.targets import policy_at
from tinyrl.generation.engine import Request
from tinyrl.generation.engines import HfEngine
from tinyrl.generation.scheduler import IncrementalDetokenizer
from tinyrl.rollout.components import Options
from tinyrl.tools.chat import CHAT_STEP, ChatAnswer, ChatSession, converse

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)


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


def on_token(session: ChatSession, text: str) -> tuple[str, ChatAnswer]:
    pieces: list[str] = []
    answer = session.say(text, lambda who, piece: pieces.append(piece))
    return "".join(pieces), answer


def test_the_pieces_are_the_answer_and_the_answer_is_the_engines(session: ChatSession):
    said, answer = on_token(session, "letters: b a sorted:")
    assert said == answer.text
    plain = HfEngine(session.parts.roles, session.parts.tokenizer, session.engine.settings)
    request = Request(answer.prompt.tokens, prompt_row=0)
    [[again]] = plain.sample([request], 1, seed=session.target.config.run.seed, step=CHAT_STEP)
    assert again.tokens == answer.completion.tokens


def test_the_start_says_something_else_with_the_same_random_numbers(session: ChatSession):
    _, answer = on_token(session, "letters: q w e sorted:")
    start = session.compare(lambda who, piece: None)
    plain = HfEngine(session.parts.roles, session.parts.tokenizer, session.engine.settings)
    request = Request(answer.prompt.tokens, prompt_row=0)
    [[alone]] = plain.sample([request], 1, role="reference", seed=session.target.config.run.seed, step=CHAT_STEP)
    assert alone.tokens == start.completion.tokens
    assert start.completion.tokens != answer.completion.tokens


def test_the_reward_is_that_of_the_run(session: ChatSession):
    _, answer = on_token(session, "letters: b a sorted:")
    [(role, scores, why)] = session.rewards()
    assert (role, why) == ("policy", None)
    assert scores == {"reward": len(set(answer.text)), "variety": len(set(answer.text))}


def test_a_held_out_row_is_asked_by_its_number(session: ChatSession):
    answer = session.say(3, lambda who, piece: None)
    assert answer.prompt.row["prompt"] == answer.prompt.text
    with pytest.raises(ValueError, match="they are 0 to"):
        session.say(10**6, lambda who, piece: None)


def test_temperature_zero_is_greedy(session: ChatSession):
    session.set_temperature(0)
    assert on_token(session, "letters: b a sorted:")[0] == session("letters: b a sorted:", greedy=True)
    session.set_temperature(0.5)
    assert (session.greedy, session.engine.settings.temperature) == (False, 0.5)
    with pytest.raises(ValueError, match="0 \\(greedy\\) to 100"):
        session.set_temperature(-1)


def test_with_a_chat_template_the_conversation_goes_on_until_it_is_reset(tmp_path: Path):
    base = tiny_model(tmp_path / "base", "llama")
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(base)
    target = policy_at(str(base), ["generation.max_new_tokens=4"])
    with ChatSession(target, options=Options(device="cpu")) as session:
        _, first = on_token(session, "hi")
        assert first.prompt.text == "<user>hi<a>"
        _, second = on_token(session, "more")
        assert second.prompt.text == f"<user>hi<assistant>{first.text}<user>more<a>"
        session.reset()
        assert on_token(session, "hi")[1].prompt.text == "<user>hi<a>"
        with pytest.raises(ValueError, match="no start to compare with"):
            session.compare(lambda who, piece: None)


def test_half_a_character_waits_for_its_other_half():
    tokenizer = tiny_tokenizer()
    spelling, text = IncrementalDetokenizer(tokenizer), "aé漢🙂b"
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert len(tokens) == len(text.encode())  # a byte each
    pieces = [spelling.add([token]) for token in tokens]  # pyright: ignore[reportArgumentType]
    assert [piece for piece in pieces if piece] == ["a", "é", "漢", "🙂", "b"]
    assert spelling.end() == ""
    spelling.add([tokens[1]])  # pyright: ignore[reportArgumentType]
    assert spelling.end() == "\ufffd"


def test_an_environment_answers_in_the_middle(tmp_path: Path):
    """The embedded model that looks up; facts are columns of a held-out row."""
    few = ["run.num_steps=1", "grpo.num_prompts=2", "grpo.group_size=2", "grpo.minibatch_size=null"]
    config = load_config("grpo", "lookup", overrides=[*few, "run.eval_prompts=0", "run.threads=1"])
    assert running.train(config, tmp_path)[0] == 0
    with ChatSession(policy_at(str(tmp_path / "run"), []), options=Options(device="cpu")) as session:
        speakers: list[str] = []
        answer = session.say(0, lambda who, piece: speakers.append(who))
        row = 0
        while "environment" not in speakers and row < 11:
            row += 1
            answer = session.say(row, lambda who, piece: speakers.append(who))
        assert answer.episode is not None
        assert answer.text == "".join(m["content"] for m in answer.episode.transcript if m["role"] == "assistant")
        assert {m["role"] for m in answer.episode.transcript} == {"assistant", "tool"}
        [(_, scores, why)] = session.rewards()
        assert why is None
        assert scores["reward"] in (0.0, 1.0)
        # Its prompt typed in has the row's columns as well; of another nothing is known that could answer.
        prompt = answer.prompt.text
        typed = session.say(prompt, lambda who, piece: None)
        assert (typed.prompt.row, typed.prompt.index) == (answer.prompt.row, answer.prompt.index)
        with pytest.raises(ValueError, match=r"`world`.*/prompt"):
            session.say("question: job of nobody ?", lambda who, piece: None)


# ---- in a terminal ----


def transcript(session: ChatSession, *lines: str) -> str:
    """What is written when these lines are typed."""
    typed, written = iter(lines), list[str]()

    def read(prompt: str) -> str:
        try:
            return next(typed)
        except StopIteration:
            raise EOFError from None

    converse(session, read=read, write=written.append)
    return "".join(written)


def test_commands_do_what_help_says(session: ChatSession):
    said = transcript(
        session, "/reward", "/compare", "letters: b a sorted:", "/compare", "/reward", "/temperature 0",
        "/temperature x", "/prompt 1", "/prompt 0.5", "/reset", "/what", "/quit", "never",
    )  # fmt: skip
    assert said.count("nothing has been asked yet") == 2
    for expected in ("the start: ", "policy: reward ", "variety ", "greedy", "/temperature takes a number", "forgotten",
                     "/prompt takes a number", "there is no /what"):  # fmt: skip
        assert expected in said


def test_what_a_model_says_is_made_safe_to_show(session: ChatSession, monkeypatch: pytest.MonkeyPatch):
    hostile = "\x1b[2J\u202e\ud800<script>" + "x" * 100_000
    monkeypatch.setattr(ChatSession, "say", lambda session, text, on_text: on_text("policy", hostile) or answer)
    answer = session._answer(session._prepare("a"), lambda who, piece: None, greedy=True)
    said = transcript(session, "hello")
    assert "[ESC][2J[U+202E][U+D800]<script>xxx" in said
    assert "\x1b" not in said
    said.encode("utf-8")


def test_ctrl_c_ends_the_answer_and_not_the_conversation(session: ChatSession, monkeypatch: pytest.MonkeyPatch):
    begin = session.engine.begin
    monkeypatch.setattr(
        session.engine, "begin", lambda tokens, _: begin(tokens, lambda *_: signal.raise_signal(signal.SIGINT))
    )
    said = transcript(session, "letters: b a sorted:", "/reset")
    assert "(stopped; it is not part of the conversation)" in said
    assert said.endswith("forgotten\n\n")
