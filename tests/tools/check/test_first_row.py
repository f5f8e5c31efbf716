"""`tinyrl check --quick` shows the first row as the model reads it, and refuses what a start would refuse."""

import json
import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer
from typer.testing import CliRunner

from tests import running
from tests.tiny_models import TinyModels
from tests.training.rows import chat_model, loaded, talk, write_rows
from tinyrl.cli.commands import app

CHAT = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}"
GENERATION = "{% if add_generation_prompt %}<assistant>{% endif %}"
REFUSES = "{{ raise_exception('not like this') }}"


def quick(method: str, model: Path, rows: Path, *settings: str, code: int = 0, section: str = "rows") -> Any:
    words = [method, f"model.path={model}", f"task.data={rows}", *settings, "--quick", "--json"]
    done = CliRunner().invoke(app, ["check", *words])
    assert done.exit_code == code, done.output
    return json.loads(done.stdout.splitlines()[-1])[section] if code == 0 else done.output


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_model(tmp_path_factory.mktemp("model"), CHAT + GENERATION)


@pytest.fixture
def asked(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "rows.jsonl", ({"prompt": talk(f"say {c}"), "answer": c} for c in "abcdefgh"))


def test_a_prompt_has_the_tokens_of_a_start(model: Path, asked: Path) -> None:
    settings = {"task": {"name": "rows", "data": str(asked), "system_prompt": "Be <eos> brief."}}
    with closing(loaded(running.config("grpo", model, **settings))) as method:
        wanted = method.collector.train_prompts[0].tokens
    words = "task.system_prompt=Be <eos> brief."
    assert quick("grpo", model, asked, words)["tokens"] == len(wanted)


TOOLS = """
def add(a: int, b: int) -> int:
    '''Add.

    Args:
        a: One.
        b: Two.
    '''
    return a + b

def respond(prompts, transcripts, **columns):
    return ["on"] * len(prompts)
"""


def test_a_prompt_has_the_tokens_of_a_start_with_tools(asked: Path, tmp_path: Path) -> None:
    shown = "{% if tools %}{{ tools | tojson }}{% endif %}"
    model = chat_model(tmp_path / "shows", shown + CHAT + GENERATION)
    (tmp_path / "tools.py").write_text(TOOLS)
    small = {"max_observation_tokens": 4, "max_turns": 2}
    environment = {"tools": [f"{tmp_path / 'tools.py'}:add"], **small}
    settings = {"task": {"name": "rows", "data": str(asked)}, "environment": environment}
    with closing(loaded(running.config("grpo", model, **settings))) as method:
        wanted = len(method.collector.train_prompts[0].tokens)
    words = f"environment.tools=[{tmp_path / 'tools.py'}:add]"
    assert quick("grpo", model, asked, words, section="environment")["tokens"] == wanted
    assert quick("grpo", model, asked, words)["tokens"] < wanted
    function = f"environment.name={tmp_path / 'tools.py'}:respond"
    assert "tokens" not in quick("grpo", model, asked, function, section="environment")


def test_a_conversation_has_the_tokens_of_its_template(model: Path, tmp_path: Path) -> None:
    messages = [*talk("say a"), {"role": "assistant", "content": "a"}]
    rows = write_rows(tmp_path / "rows.jsonl", ({"messages": messages, "id": i} for i in range(4)))
    theirs: Any = AutoTokenizer.from_pretrained(model)
    wanted = theirs(theirs.apply_chat_template(messages, tokenize=False))["input_ids"]
    assert quick("sft", model, rows)["tokens"] == len(wanted)


def test_a_template_that_refuses_is_refused_by_the_sentence_of_a_start(
    model: Path, asked: Path, tmp_path: Path
) -> None:
    broken = shutil.copytree(model, tmp_path / "broken")
    (broken / "chat_template.jinja").write_text(REFUSES)
    with pytest.raises(ValueError, match="not like this") as caught:
        loaded(running.config("grpo", broken, task={"name": "rows", "data": str(asked)}))
    shown = quick("grpo", broken, asked, code=2)
    assert str(caught.value).splitlines()[0] in shown


def test_a_template_that_takes_too_much_is_refused(model: Path, asked: Path, tmp_path: Path) -> None:
    hungry = shutil.copytree(model, tmp_path / "hungry")
    (hungry / "chat_template.jinja").write_text("{{ 'a' * 10**9 }}")
    assert "chat_template.jinja takes" in quick("grpo", hungry, asked, code=2)


def test_a_damaged_tokenizer_is_refused(model: Path, asked: Path, tmp_path: Path) -> None:
    damaged = shutil.copytree(model, tmp_path / "damaged")
    (damaged / "tokenizer.json").write_text("{")
    assert "tokenizer.json" in quick("grpo", damaged, asked, code=2)


def test_messages_for_a_reward_model_need_no_template(tiny: TinyModels, tmp_path: Path) -> None:
    sides = {name: [{"role": "assistant", "content": name}] for name in ("chosen", "rejected")}
    rows = write_rows(tmp_path / "rows.jsonl", ({"prompt": talk(c), **sides} for c in "abcdefgh"))
    assert quick("reward", tiny("llama"), rows)["tokens"] > 0


def test_a_tokenizer_that_only_a_start_reads_is_no_fault(model: Path, asked: Path, tmp_path: Path) -> None:
    other = shutil.copytree(model, tmp_path / "other")
    (other / "tokenizer.json").unlink()
    assert quick("grpo", other, asked)["tokens"] is None
