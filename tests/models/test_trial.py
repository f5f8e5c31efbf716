"""Templates and tokenizers of other people are tried in a process with limits before they are used."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.tiny_models import TinyModels
from tinyrl.models import trial
from tinyrl.models.folder_tokenizer import FolderTokenizer
from tinyrl.models.loading import load_tokenizer

MANY = "range(99999)"
ENDLESS = f"{{% for a in {MANY} %}}{{% for b in {MANY} %}}{{% for c in {MANY} %}}{'{% endfor %}' * 3}"
DOUBLES = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
ASKED = {"role": "user", "content": "hi <b>\n"}
NAMED_TOOL = [{"type": "function", "function": {"name": "é"}}]


def with_template(folder: Path, template: str) -> Path:
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    return folder


def with_parts(folder: Path, **parts: Any) -> Path:
    """Replace parts of tokenizer.json."""
    file = folder / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | parts))
    return folder


@pytest.fixture
def folder(tiny: TinyModels, tmp_path: Path) -> Path:
    return shutil.copytree(tiny("llama"), tmp_path / "model")


@pytest.fixture
def only_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "CPU_S", 1)


@pytest.mark.parametrize(
    ("template", "wanted"),
    [
        (ENDLESS, "takes more than 1 s"),
        ("{{ 'a' * 2000000 }}", "2,000,000 characters"),
        ("{% if tools %}{{ 'a' * 10**9 }}{% endif %}", "memory"),
        ("{% if messages[0].role == 'system' %}{{ 'a' * 10**9 }}{% endif %}", "memory"),
        pytest.param("{{ 'a' * 10**9 }}", "memory", marks=pytest.mark.wide),
    ],
)
def test_a_template_that_takes_too_much_is_refused(
    template: str, wanted: str, folder: Path, only_a_second: None
) -> None:
    with pytest.raises(ValueError, match=rf"chat_template\.jinja .*{wanted}"):
        load_tokenizer(str(with_template(folder, template)))


def test_a_template_of_tokenizer_config_is_tried(folder: Path) -> None:
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": "{{ 'a' * 10**9 }}"}))
    with pytest.raises(ValueError, match=r"tokenizer_config\.json takes .*memory"):
        load_tokenizer(str(folder))


def test_a_template_of_another_name_is_tried(folder: Path) -> None:
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "rag.jinja").write_text("{{ 'a' * 10**9 }}")
    with pytest.raises(ValueError, match=r"additional_chat_templates/rag\.jinja takes"):
        load_tokenizer(str(with_template(folder, "{{ messages }}")))


@pytest.mark.wide
@pytest.mark.parametrize(
    "parts",
    [
        {"normalizer": {"type": "Sequence", "normalizers": [DOUBLES] * 60}},
        {"decoder": {"type": "Sequence", "decoders": [DOUBLES] * 60}},
    ],
)
def test_a_tokenizer_that_never_ends_is_refused(parts: dict[str, Any], folder: Path, only_a_second: None) -> None:
    with pytest.raises(ValueError, match=r"tokenizer\.json takes more than"):
        load_tokenizer(str(with_parts(folder, **parts)))


def test_a_tokenizer_that_multiplies_a_text_is_refused(folder: Path) -> None:
    with_parts(folder, normalizer={"type": "Sequence", "normalizers": [DOUBLES] * 12})
    with pytest.raises(ValueError, match=r"tokenizer\.json makes .* tokens of"):
        load_tokenizer(str(folder))


@pytest.mark.parametrize("listed", [False, True])
def test_a_tokenizer_with_a_long_vocabulary_is_tried(listed: bool, folder: Path) -> None:
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    more = {f"a{i:06}": 258 + i for i in range(60_000)}
    model["vocab"] |= more
    if listed:
        model = {"type": "Unigram", "unk_id": 0, "vocab": [[token, -1.0] for token in model["vocab"]]}
    with_parts(folder, model=model, normalizer={"type": "Sequence", "normalizers": [DOUBLES] * 12})
    assert (folder / "tokenizer.json").stat().st_size > trial.LONG_FILE
    with pytest.raises(ValueError, match=r"tokenizer\.json makes .* tokens of"):
        trial.try_folder(folder)


@pytest.mark.parametrize(
    "template", ["{{ raise_exception('no system message') }}", "{% if %}", "{{ messages[9].x.y }}"]
)
def test_a_template_that_refuses_is_no_finding_of_the_trial(template: str, folder: Path) -> None:
    assert load_tokenizer(str(with_template(folder, template))).chat_template == template


def test_the_same_files_are_tried_once(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_template(folder, "{{ messages }} once")
    trial.try_folder(folder)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "nothing"))
    trial.try_folder(folder)
    with pytest.raises(FileNotFoundError):
        trial.try_folder(with_template(folder, "{{ messages }} twice"))


def test_an_embedded_model_is_not_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "nothing"))
    assert load_tokenizer("starter").eos_token_id is not None


def test_the_trial_loads_no_library_of_models() -> None:
    code = "import sys, tinyrl.models.trial; print(*{m.partition('.')[0] for m in sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "transformers", "pydantic", "numpy"} & {*done.stdout.split()}


# ---- a tokenizer without transformers, beside that of transformers ----


@pytest.mark.parametrize(
    "template",
    [
        "{{ eos_token }}{% for m in messages %}\n    {% if loop.first %}[{{ m.role }}]{% endif %}\n{{ m }}{% endfor %}",
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% break %}{% endfor %}",
        "{{ messages|tojson }}{{ tools|tojson(indent=2) }}{{ messages|tojson(ensure_ascii=true, sort_keys=true) }}",
        "{% set n = namespace(self=1) %}{% for m in messages %}{% set n.self = n.self + 1 %}{% endfor %}{{ n.self }}",
        "{{ dict(a=1).a }}{{ dict.fromkeys('ab').keys()|list }}{{ strftime_now('%Y') }}{{ thinking }}",
        "{% if add_generation_prompt %}GO{% endif %}{{ documents is none }}{{ messages[0].content }} {{ pad_token }}",
    ],
)
def test_templates_are_rendered_as_transformers_renders_them(template: str, folder: Path) -> None:
    with_template(folder, template)
    theirs: Any = AutoTokenizer.from_pretrained(folder)
    ours = FolderTokenizer(folder)
    how: dict[str, Any] = {"tools": NAMED_TOOL, "add_generation_prompt": True, "thinking": "on", "tokenize": False}
    wanted = theirs.apply_chat_template([ASKED], **how)
    assert ours.apply_chat_template([ASKED], **how) == wanted != ""
    assert ours.apply_chat_template([[ASKED]], **how) == [wanted]


@pytest.mark.parametrize("end", ["<end>", ""])
@pytest.mark.parametrize("content", ["begun", "begun "])
@pytest.mark.parametrize("written", ["m.content", "m.content|trim"])
def test_a_message_is_continued_as_transformers_does(written: str, content: str, end: str, folder: Path) -> None:
    with_template(folder, f"{{% for m in messages %}}<{{{{ m.role }}}}>{{{{ {written} }}}}{end}{{% endfor %}}")
    theirs: Any = AutoTokenizer.from_pretrained(folder)
    messages = [ASKED, {"role": "assistant", "content": content}]
    how: dict[str, Any] = {"continue_final_message": True, "tokenize": False}
    assert FolderTokenizer(folder).apply_chat_template(messages, **how) == theirs.apply_chat_template(messages, **how)


@pytest.mark.parametrize(
    "template", ["{{ namespace(_x=1) }}", "{{ dict.__class__.mro() }}", "{{ messages.append(1) }}"]
)
def test_a_template_does_not_leave_the_sandbox(template: str, folder: Path) -> None:
    tokenizer = FolderTokenizer(with_template(folder, template))
    with pytest.raises(Exception, match=r"no attribute|unsafe|Access|not safely"):
        tokenizer.apply_chat_template([ASKED])


def test_tokens_are_those_of_transformers(folder: Path) -> None:
    theirs: Any = AutoTokenizer.from_pretrained(folder)
    ours = FolderTokenizer(folder)
    texts = ["hello <eos>", "naïve"]
    assert ours(texts)["input_ids"] == theirs(texts)["input_ids"]
    assert ours.decode(ours("hé")["input_ids"]) == theirs.decode(theirs("hé")["input_ids"])
    assert ours.get_vocab() == theirs.get_vocab()
    assert {i: str(token) for i, token in ours.added_tokens_decoder.items()} == {
        i: str(token) for i, token in theirs.added_tokens_decoder.items()
    }
