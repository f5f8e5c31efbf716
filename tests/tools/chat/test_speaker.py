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
from tinyrl.generation.hf import HfEngine
from tinyrl.generation.live import IncrementalDetokenizer
from tinyrl.rollout.components import Options
from tinyrl.tools.chat.speaker import CHAT_STEP, ChatAnswer, Speaker, load_speaker
from tinyrl.tools.chat.terminal import converse

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
def speaker(run: Path) -> Iterator[Speaker]:
    with load_speaker(policy_at(str(run), []), options=Options(device="cpu")) as speaker:
        yield speaker


def on_token(speaker: Speaker, text: str) -> tuple[str, ChatAnswer]:
    pieces: list[str] = []
    answer = speaker.say(text, lambda who, piece: pieces.append(piece))
    return "".join(pieces), answer


def test_the_pieces_are_the_answer_and_the_answer_is_the_engines(speaker: Speaker):
    said, answer = on_token(speaker, "letters: b a sorted:")
    assert said == answer.text
    plain = HfEngine(speaker.parts.roles, speaker.parts.tokenizer, speaker.settings)
    request = Request(answer.prompt.tokens, prompt_row=0)
    [[again]] = plain.sample([request], 1, seed=speaker.target.config.run.seed, step=CHAT_STEP)
    assert again.tokens == answer.completion.tokens


def test_the_start_says_something_else_with_the_same_random_numbers(speaker: Speaker):
    _, answer = on_token(speaker, "letters: q w e sorted:")
    start = speaker.compare(lambda who, piece: None)
    plain = HfEngine(speaker.parts.roles, speaker.parts.tokenizer, speaker.settings)
    request = Request(answer.prompt.tokens, prompt_row=0)
    [[alone]] = plain.sample([request], 1, role="reference", seed=speaker.target.config.run.seed, step=CHAT_STEP)
    assert alone.tokens == start.completion.tokens
    assert start.completion.tokens != answer.completion.tokens


def test_the_reward_is_that_of_the_run(speaker: Speaker):
    _, answer = on_token(speaker, "letters: b a sorted:")
    [(role, scores, why)] = speaker.rewards()
    assert (role, why) == ("policy", None)
    assert scores == {"reward": len(set(answer.text)), "variety": len(set(answer.text))}


def test_a_held_out_row_is_asked_by_its_number(speaker: Speaker):
    answer = speaker.say_row(3, lambda who, piece: None)
    assert answer.prompt.row["prompt"] == answer.prompt.text
    with pytest.raises(ValueError, match="held-out rows are 0 to"):
        speaker.say_row(10**6, lambda who, piece: None)


def test_temperature_zero_is_greedy(speaker: Speaker):
    speaker.set_temperature(0)
    assert on_token(speaker, "letters: b a sorted:")[0] == speaker("letters: b a sorted:", greedy=True)
    speaker.set_temperature(0.5)
    assert (speaker.greedy, speaker.engine.settings.temperature) == (False, 0.5)
    with pytest.raises(ValueError, match="0 \\(greedy\\) to 100"):
        speaker.set_temperature(-1)


def test_with_a_chat_template_the_conversation_goes_on_until_it_is_reset(tmp_path: Path):
    base = tiny_model(tmp_path / "base", "llama")
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(base)
    target = policy_at(str(base), ["generation.max_new_tokens=4"])
    with load_speaker(target, options=Options(device="cpu")) as speaker:
        _, first = on_token(speaker, "hi")
        assert first.prompt.text == "<user>hi<a>"
        _, second = on_token(speaker, "more")
        assert second.prompt.text == f"<user>hi<assistant>{first.text}<user>more<a>"
        speaker.reset()
        assert on_token(speaker, "hi")[1].prompt.text == "<user>hi<a>"
        with pytest.raises(ValueError, match="no start to compare with"):
            speaker.compare(lambda who, piece: None)


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
    with load_speaker(policy_at(str(tmp_path / "run"), []), options=Options(device="cpu")) as speaker:
        speakers: list[str] = []
        answer = speaker.say_row(0, lambda who, piece: speakers.append(who))
        row = 0
        while "environment" not in speakers and row < 11:
            row += 1
            answer = speaker.say_row(row, lambda who, piece: speakers.append(who))
        assert answer.episode is not None
        assert answer.text == "".join(m["content"] for m in answer.episode.transcript if m["role"] == "assistant")
        assert {m["role"] for m in answer.episode.transcript} == {"assistant", "tool"}
        [(_, scores, why)] = speaker.rewards()
        assert why is None
        assert scores["reward"] in (0.0, 1.0)
        # Its prompt typed in has the row's columns as well; of another nothing is known that could answer.
        prompt = answer.prompt.text
        typed = speaker.say(prompt, lambda who, piece: None)
        assert (typed.prompt.row, typed.prompt.index) == (answer.prompt.row, answer.prompt.index)
        with pytest.raises(ValueError, match=r"`world`.*/prompt"):
            speaker.say("question: job of nobody ?", lambda who, piece: None)


# ---- in a terminal ----


def transcript(speaker: Speaker, *lines: str) -> str:
    """What is written when these lines are typed."""
    typed, written = iter(lines), list[str]()

    def read(prompt: str) -> str:
        try:
            return next(typed)
        except StopIteration:
            raise EOFError from None

    converse(speaker, read=read, write=written.append)
    return "".join(written)


def test_commands_do_what_help_says(speaker: Speaker):
    said = transcript(
        speaker, "/reward", "/compare", "letters: b a sorted:", "/compare", "/reward", "/temperature 0",
        "/temperature x", "/prompt 1", "/prompt 0.5", "/reset", "/what", "/quit", "never",
    )  # fmt: skip
    assert said.count("nothing has been asked yet") == 2
    for expected in ("the start: ", "policy: reward ", "variety ", "greedy", "/temperature takes a number", "forgotten",
                     "/prompt takes the number of a row", "there is no /what"):  # fmt: skip
        assert expected in said


def test_what_a_model_says_is_made_safe_to_show(speaker: Speaker, monkeypatch: pytest.MonkeyPatch):
    hostile = "\x1b[2J\u202e\ud800<script>" + "x" * 100_000
    monkeypatch.setattr(Speaker, "say", lambda speaker, text, hear: hear("policy", hostile) or answer)
    answer = speaker._answer(speaker._prepared("a"), "policy", 0, greedy=True, hear=lambda who, piece: None)
    said = transcript(speaker, "hello")
    assert "[ESC][2J[U+202E][U+D800]<script>xxx" in said
    assert "\x1b" not in said
    said.encode("utf-8")


def test_ctrl_c_ends_the_answer_and_not_the_conversation(speaker: Speaker, monkeypatch: pytest.MonkeyPatch):
    original = speaker.engine._say

    def interrupted(text: str) -> None:
        signal.raise_signal(signal.SIGINT)
        original(text)

    monkeypatch.setattr(speaker.engine, "_say", interrupted)
    said = transcript(speaker, "letters: b a sorted:", "/reset")
    assert "(stopped; it is not part of the conversation)" in said
    assert said.endswith("forgotten\n\n")
