"""The end of a turn where it is not the tokenizer's EOS: the same token is learnt, sampled, judged and exported."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests import running
from tests.tiny_models import EOS, tiny_model
from tinyrl.config.schema import Config
from tinyrl.config.sections import RewardConfig
from tinyrl.evaluation.compare import evaluate_target
from tinyrl.evaluation.targets import Asked, policy_at
from tinyrl.generation.engine import eos_token_ids
from tinyrl.generation.turns import EpisodeRunner, show_episode
from tinyrl.models.policy import Policy
from tinyrl.rollout.load import load_collector, load_method, load_policy
from tinyrl.runs.launched import Options
from tinyrl.tasks.prompts import token_ids
from tinyrl.tools.chat import ChatSession
from tinyrl.tools.export import export
from tinyrl.training.rows import RowMethod

TURN_END = "<|im_end|>"
WORDS = ("<|im_start|>", TURN_END, "system", "user", "assistant", "tool", *"abcdefgh")
# As Qwen2.5's, whose base models have another EOS than this end of a turn.
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CPU = Options(device="cpu")


def chat_model(folder: Path, *, eos: str) -> Path:
    """The same weights, template and generation configuration, and one of two EOS tokens."""
    tiny_model(folder, "llama", vocabulary=WORDS)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", TURN_END]})
    tokenizer.eos_token, tokenizer.chat_template = eos, TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose turns end with another token than its EOS."""
    return chat_model(tmp_path_factory.mktemp("base"), eos=EOS)


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Words are answered with the same two; a file of messages, and text.jsonl of texts and pairs."""
    folder = tmp_path_factory.mktemp("rows")
    asked = [f"{one} {other}" for one in "abcdefgh" for other in "abcd"]
    answer = {"role": "assistant", "content": "e f"}
    chats = [{"messages": [{"role": "user", "content": words}, answer]} for words in asked]
    given = {"completion": "e f", "rejected": "h h h", "answer": "e"}
    texts = [{"prompt": words, "chosen": words, **given} for words in asked]
    for name, lines in (("rows", chats), ("text", texts)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder / "rows.jsonl"


def settings(method: str, model: Path, data: Path, **sections: Any) -> Config:
    rows = {"name": "rows", "data": str(data), "max_samples": None}
    return running.config(method, model, **{**sections, "task": {**rows, **sections.get("task", {})}})


def texts_of(trainer: RowMethod) -> list[list[int]]:
    return [text for row in trainer.train_rows for one in row for text in one.texts]


def end_of(model: Path) -> int:
    return AutoTokenizer.from_pretrained(model).convert_tokens_to_ids(TURN_END)


def test_a_policy_that_learnt_from_chat_stops(base: Path, rows: Path, tmp_path: Path) -> None:
    """In training and evaluation, in the chat and in the exported model, with every engine of this process."""
    learn = settings(
        "sft", base, rows, optim={"learning_rate": 1e-2}, run={"num_steps": 60, "eval_every": 0, "save_every": 60}
    )
    code, taught, _ = running.train(learn, tmp_path, name="sft")
    assert code == 0
    adapter = taught.checkpoints / "step-000060"
    for engine in ("fused", "hf"):
        play = settings(
            "grpo", base, rows.with_name("text.jsonl"),
            optim={"learning_rate": 1e-5},
            generation={"max_new_tokens": 12, "engine": engine, "temperature": 0.5},
            run={"num_steps": 1, "eval_every": 1},
        )  # fmt: skip
        play.model.adapter = str(adapter)
        code, run, _ = running.train(play, tmp_path, name=engine)
        assert code == 0
        lines = running.metrics(run)
        assert [line["completion/truncated"] for line in lines if "completion/truncated" in line] == [0.0]
        assert {line["eval/truncated"] for line in lines} == {0.0}
    found = evaluate_target(str(tmp_path / "fused"), Asked(num_prompts=8), vs="start", options=CPU)
    assert found["truncated"] == found["other"]["truncated"] == 0.0
    with ChatSession(policy_at(str(tmp_path / "fused"), ["generation.max_new_tokens=12"]), options=CPU) as speaker:
        assert speaker.say("a", lambda who, text: None).completion.tokens[-1] == end_of(base)
    listed = AutoModelForCausalLM.from_pretrained(
        export(str(tmp_path / "fused"), merge=True).folder
    ).generation_config.eos_token_id
    assert set(listed) == {AutoTokenizer.from_pretrained(base).convert_tokens_to_ids(t) for t in (EOS, TURN_END)}


@pytest.mark.parametrize("chat", ["auto", False])
def test_completions_end_at_the_end_of_a_turn_where_prompts_are_chat(chat: Any, base: Path, rows: Path) -> None:
    config = settings("grpo", base, rows, task={"chat": chat})
    parts = load_policy(config, options=CPU)
    assert eos_token_ids(parts, parts.tokenizer) == {1, *([] if chat is False else [end_of(base)])}


@pytest.mark.parametrize("chat", ["auto", False])
def test_one_token_ends_what_is_learnt(chat: Any, base: Path, rows: Path) -> None:
    """Answers that are text, to prompts that the template writes or does not; messages go on ending as it ends them."""
    text = {"task": {"data": str(rows.with_name("text.jsonl")), "chat": chat}}
    end = end_of(base) if chat == "auto" else 1
    examples = load_method(settings("sft", base, rows, **text), options=CPU)
    pairs = load_method(settings("dpo", base, rows, **text), options=CPU)
    judged = load_method(settings("reward", base, rows, **text), options=CPU)
    assert {text[-1] for each in (examples, pairs, judged) for text in texts_of(each)} == {end}
    if chat == "auto":
        spoken = load_method(settings("sft", base, rows), options=CPU)
        assert {text[-1] for text in texts_of(spoken)} == {end}


@pytest.mark.parametrize("form", [{}, {"chat": False}], ids=["chat", "text"])
def test_ppo_shows_a_reward_adapter_the_end_it_learnt(
    form: dict[str, Any], base: Path, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever ended a completion: the end of the turn, EOS, a stop string, or the limit of tokens."""
    text = {"data": str(rows.with_name("text.jsonl"))}
    learn = settings("reward", base, rows, task={**text, **form}, run={"num_steps": 1, "eval_every": 0})
    code, made, _ = running.train(learn, tmp_path, name="reward")
    assert code == 0
    learnt = texts_of(load_method(learn, options=CPU))
    ppo = settings("ppo", base, rows, task=text)
    ppo.reward = RewardConfig(model=str(made.checkpoints / "step-000001"))
    parts = load_collector(ppo, options=CPU)
    read: list[list[int]] = []
    batch_of = Policy.batch

    def noted(roles: Policy, prompts: list[list[int]], responses: list[list[int]], *rest: Any, **options: Any):
        read.extend(p + r for p, r in zip(prompts, responses, strict=True))
        return batch_of(roles, prompts, responses, *rest, **options)

    monkeypatch.setattr(Policy, "batch", noted)
    prompts = parts.train_prompts
    for end in ([end_of(base)], [1], []):
        for side in ("chosen", "rejected"):
            said = [[*token_ids(parts.policy.tokenizer, str(prompt.row[side])), *end] for prompt in prompts]
            parts.scorer(prompts, said)
        assert sorted(read) == sorted(learnt)
        read.clear()
    parts.scorer.check_gold(prompts[:1])
    assert {tokens[-1] for tokens in read} == {text[-1] for text in learnt}
    parts.close()


def test_episodes_go_on_behind_the_end_of_a_turn(base: Path, rows: Path, tmp_path: Path) -> None:
    """What is read then is what the template writes behind it, also where another EOS has ended the turn."""
    (tmp_path / "game.py").write_text("def respond(prompts, transcripts):\n    return ['g' for _ in prompts]\n")
    config = settings(
        "grpo",
        base,
        rows.with_name("text.jsonl"),
        environment={"name": f"{tmp_path / 'game.py'}:respond", "max_observation_tokens": 4},
    )
    parts = load_collector(config, options=CPU)
    assert isinstance(parts.runner, EpisodeRunner)
    prompt, runner, tokenizer = parts.train_prompts[0], parts.runner, parts.policy.tokenizer
    assert runner.observations.end == end_of(base)
    for end in (end_of(base), 1):
        turn = [*token_ids(tokenizer, "e f"), end]
        answer = runner.observations("g", ended_at=end).tokens
        said = [("user", prompt.prompt), ("assistant", "e f"), ("tool", "g")]
        messages = [{"role": role, "content": text} for role, text in said]
        whole = str(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))
        written = [*prompt.tokens, *turn, *answer]
        assert [end_of(base) if token == 1 else token for token in written] == token_ids(tokenizer, whole)
    shown = "\n".join(show_episode(runner, prompt, parts.task, stop=[]))
    assert TURN_END in shown
    assert EOS not in shown
    parts.close()
