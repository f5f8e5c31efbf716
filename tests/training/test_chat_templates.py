"""Chat templates: messages in rewards, one token that ends what is sampled and learnt; faults of models."""

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests import running
from tests.tiny_models import EOS
from tests.training.rows import chat_model, loaded, talk, trained, write_rows
from tinyrl.config.schema import Config
from tinyrl.evaluation.targets import policy_at
from tinyrl.generation.engine import eos_token_ids
from tinyrl.process.launched import Options
from tinyrl.rollout.load import load_policy
from tinyrl.runs.resolve import config_of
from tinyrl.tools.chat import ChatSession
from tinyrl.tools.check.loaded import check_model
from tinyrl.tools.export import export
from tinyrl.training.rows import RowMethod

THINKS = (
    "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] <think>\n{% if effort is defined %}{{ effort }} {% endif %}{% endif %}"
)


@pytest.fixture(scope="module")
def chatty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_model(tmp_path_factory.mktemp("model"), THINKS, "qwen3")


def test_messages_reach_the_reward_as_messages(chatty: Path, tmp_path: Path) -> None:
    """TRL's forms: prompts as the data has them, completions as messages, the opened <think> put back in front."""
    data = write_rows(tmp_path / "rows.jsonl", ({"prompt": talk(f"say {c}"), "target": c} for c in "abcdefgh"))
    (tmp_path / "rewards.py").write_text(
        "def form(prompts, completions, target, completion_ids, **columns):\n"
        "    assert all(p[0]['content'] == f'say {t}' for p, t in zip(prompts, target)), prompts\n"
        "    assert all(c[0]['role'] == 'assistant' and c[0]['content'].startswith('<think>') for c in completions)\n"
        "    assert all(isinstance(i, int) for ids in completion_ids for i in ids)\n"
        "    return [float(len(ids)) for ids in completion_ids]\n"
    )
    task, reward = {"name": "rows", "data": str(data)}, {"functions": [{"use": f"{tmp_path / 'rewards.py'}:form"}]}
    run = trained(running.config("grpo", chatty, task=task, reward=reward, run={"num_steps": 1}), tmp_path)
    assert running.metrics(run)[1]["reward/dropped"] == 0
    prompts = [json.loads(line)["prompt"] for line in run.samples.read_text().splitlines()]
    assert all(p.startswith("[user] say ") and p.endswith("[assistant] <think>\n") for p in prompts)


def test_a_column_that_no_prompt_shows_is_named_at_the_start(chatty: Path, tmp_path: Path) -> None:
    for more, count in (({"system": "short"}, 1), ({}, 0)):
        data = write_rows(tmp_path / "rows.jsonl", ({"prompt": c, "answer": c, **more} for c in "abcdefgh"))
        method = loaded(running.config("grpo", chatty, task={"name": "rows", "data": str(data)}))
        with closing(method):
            assert len([note for note in method.check() if "column `system`" in note]) == count


TURN_END = "<|im_end|>"
WORDS = ("<|im_start|>", TURN_END, "system", "user", "assistant", "tool", *"abcdefgh")
# As Qwen2.5's, whose base models have another EOS than this end of a turn.
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CPU = Options(device="cpu")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose turns end with another token than its EOS."""
    folder = chat_model(tmp_path_factory.mktemp("base"), TEMPLATE, vocabulary=WORDS)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", TURN_END]})
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Words are answered with the same two; a file of messages, and text.jsonl of texts and pairs."""
    folder = tmp_path_factory.mktemp("rows")
    asked = [f"{one} {other}" for one in "abcdefgh" for other in "abcd"]
    given = {"completion": "e f", "rejected": "h h h", "answer": "e"}
    write_rows(folder / "text.jsonl", ({"prompt": words, "chosen": words, **given} for words in asked))
    return write_rows(folder / "rows.jsonl", ({"messages": talk(words, "e f")} for words in asked))


def settings(method: str, model: Path, data: Path, **sections: Any) -> Config:
    rows = {"name": "rows", "data": str(data), "max_samples": None}
    return running.config(method, model, **{**sections, "task": {**rows, **sections.get("task", {})}})


def texts_of(trainer: RowMethod) -> list[list[int]]:
    return [text for row in trainer.train_rows for one in row for text in one.texts]


def end_of(model: Path) -> int:
    return AutoTokenizer.from_pretrained(model).convert_tokens_to_ids(TURN_END)


@pytest.mark.slow  # Fast: test_one_token_ends_what_is_sampled_and_learnt.
def test_a_policy_that_learnt_from_chat_stops(base: Path, rows: Path, tmp_path: Path) -> None:
    """In training and evaluation, in the chat and in the exported model."""
    often = {"num_steps": 60, "eval_every": 0, "save_every": 60}
    taught = trained(settings("sft", base, rows, optim={"learning_rate": 1e-2}, run=often), tmp_path, name="sft")
    play = settings(
        "grpo", base, rows.with_name("text.jsonl"), optim={"learning_rate": 1e-5},
        generation={"max_new_tokens": 12, "temperature": 0.5}, run={"num_steps": 1, "eval_every": 1},
    )  # fmt: skip
    play = play.with_setting("model.adapter", str(taught.checkpoints / "step-000060"))
    run = trained(play, tmp_path, name="grpo")
    lines = running.metrics(run)
    assert lines[1]["completion/truncated"] == 0.0
    assert {line["eval/truncated"] for line in lines} == {0.0}
    with ChatSession(policy_at(str(run.path), ["generation.max_new_tokens=12"]), options=CPU) as speaker:
        assert speaker.say("a", lambda who, text: None).sample.response[-1] == end_of(base)
    exported = AutoModelForCausalLM.from_pretrained(export(str(run.path), merge=True).folder)
    ends = {AutoTokenizer.from_pretrained(base).convert_tokens_to_ids(t) for t in (EOS, TURN_END)}
    assert {*exported.generation_config.eos_token_id} == ends


@pytest.mark.wide
@pytest.mark.parametrize("chat", ["auto", False])
def test_one_token_ends_what_is_sampled_and_learnt(chat: Any, base: Path, rows: Path) -> None:
    """Answers that are text, to prompts that the template writes or does not; messages go on ending as it ends them."""
    text = {"task": {"data": str(rows.with_name("text.jsonl")), "chat": chat}}
    policy = load_policy(settings("grpo", base, rows, **text), options=CPU)
    assert eos_token_ids(policy, policy.tokenizer) == {1, *([] if chat is False else [end_of(base)])}
    methods = [loaded(settings(method, base, rows, **text)) for method in ("sft", "dpo", "reward")]
    if chat == "auto":
        methods.append(loaded(settings("sft", base, rows)))
    ends = {text[-1] for method in methods for text in texts_of(method)}
    assert ends == {end_of(base) if chat == "auto" else 1}


SPEAKS = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}END{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def test_a_turn_that_ends_with_no_end_token_is_found(tmp_path: Path) -> None:
    for name, template, faults in (
        ("no end", SPEAKS, ["model: chat template"]),
        ("end", SPEAKS.replace("END", "<eos>"), []),
    ):
        folder = chat_model(tmp_path / name, template)
        settings = {"method": "grpo", "model": {"path": str(folder)}, "task": {"name": "sort"}}
        method = loaded(config_of(settings))
        assert [one.name for one in check_model(method, []).findings] == faults
        method.close()
