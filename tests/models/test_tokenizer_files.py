"""A tokenizer gives the tokens of its tokenizer.json, whatever class tokenizer_config.json names."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from tests.tiny_models import tiny_config
from tests.training.rows import loaded, row_config, trained, write_rows
from tinyrl.models.loading import load_tokenizer, save_tokenizer

TEXT = "what is 650841823 plus 2023"
DIGITS = ["65", "0", "8", "4", "1", "8", "2", "3"]  # in threes, with merges of 6 5 and 0 8: 0 and 8 are apart
SPLITS = pre_tokenizers.Split(Regex(r"\p{N}{1,3}| ?\p{L}+|."), behavior="isolated")
CLASSES = ("GPT2Tokenizer", "Qwen2Tokenizer", "CohereTokenizer", "GPTNeoXTokenizer")
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


def with_tokenizer(folder: Path, kind: str, *, named: str, split: Any = SPLITS, **config: Any) -> Path:
    """Write a tiny model beside a tokenizer of bytes with two merges of digits; `named`: the class in its config."""
    tokens = ["<pad>", "<|endoftext|>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "65", "08"]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    inner: Any = Tokenizer(models.BPE(vocabulary, merges=[("6", "5"), ("0", "8")]))
    whole = split is None
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=whole)
    inner.pre_tokenizer = last if whole else pre_tokenizers.Sequence([split, last])
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(tokens[:2])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=tokens[1], pad_token=tokens[0])
    tokenizer.chat_template = TEMPLATE
    AutoModelForCausalLM.from_config(tiny_config(kind, tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    file = folder / "tokenizer_config.json"
    values = {**json.loads(file.read_text()), "tokenizer_class": named, "model_max_length": 400, **config}
    file.write_text(json.dumps({name: value for name, value in values.items() if value is not None}))
    return folder


def digits_of(tokenizer: Any) -> list[str]:
    ids = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    return [token for token in tokenizer.convert_ids_to_tokens(ids) if token.isdigit()][: len(DIGITS)]


@pytest.mark.parametrize("named", CLASSES)
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_numbers_are_split_as_the_file_says(named: str, kind: str, tmp_path: Path) -> None:
    """Special tokens, template and lengths are those of tokenizer_config.json."""
    folder = with_tokenizer(tmp_path, kind, named=named, padding_side="left")
    assert digits_of(AutoTokenizer.from_pretrained(folder)) != DIGITS
    with pytest.warns(UserWarning, match="read from its tokenizer.json") as caught:
        tokenizer = load_tokenizer(str(folder))
    assert len(caught) == 1
    assert digits_of(tokenizer) == DIGITS
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 1)
    assert (tokenizer.model_max_length, tokenizer.padding_side) == (400, "left")
    assert tokenizer.apply_chat_template([{"role": "user", "content": TEXT}], tokenize=False) == TEXT


def test_a_class_that_reads_the_file_as_it_is_stays(tmp_path: Path) -> None:
    folder = with_tokenizer(tmp_path, "llama", named="GPT2Tokenizer", split=None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert type(load_tokenizer(str(folder))).__name__ == "GPT2Tokenizer"


def test_a_special_token_that_only_the_class_knows_is_kept(tmp_path: Path) -> None:
    """GPT-2's end of text is its EOS and BOS without being named; and so it is saved."""
    folder = with_tokenizer(tmp_path / "model", "llama", named="GPT2Tokenizer", eos_token=None)
    written = tmp_path / "written"
    written.mkdir()
    with pytest.warns(UserWarning, match="read from its tokenizer.json"):
        tokenizer = load_tokenizer(str(folder))
    save_tokenizer(tokenizer, written)
    (written / "config.json").write_bytes((folder / "config.json").read_bytes())
    for one in (tokenizer, load_tokenizer(str(written)), AutoTokenizer.from_pretrained(written)):
        assert (one.eos_token_id, one.bos_token_id, len(one)) == (1, 1, 260)


@pytest.mark.parametrize("named", CLASSES)
def test_a_saved_tokenizer_is_read_alike_by_the_library(named: str, tmp_path: Path) -> None:
    folder = with_tokenizer(tmp_path / "model", "llama", named=named)
    written = tmp_path / "written"
    written.mkdir()
    with pytest.warns(UserWarning, match="read from its tokenizer.json"):
        save_tokenizer(load_tokenizer(str(folder)), written)
    (written / "config.json").write_bytes((folder / "config.json").read_bytes())
    assert digits_of(AutoTokenizer.from_pretrained(written)) == DIGITS
    assert (written / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()


def test_a_run_learns_the_tokens_of_the_file_and_its_checkpoint_has_them(tmp_path: Path) -> None:
    folder = with_tokenizer(tmp_path / "model", "qwen3", named="Qwen2Tokenizer", chat_template=None)
    (folder / "chat_template.jinja").unlink()
    rows = write_rows(
        tmp_path / "rows.jsonl", [{"prompt": "so", "completion": TEXT}, {"prompt": "no", "completion": TEXT}]
    )
    task = {"eval_data": str(rows)}
    settings = row_config("sft", folder, rows, lora=False, task=task, run={"num_steps": 1})
    expected = [*Tokenizer.from_file(str(folder / "tokenizer.json")).encode(TEXT).ids, 1]
    with pytest.warns(UserWarning, match="read from its tokenizer.json"):
        method = loaded(settings)
    assert [row[0].responses[0] for row in method.train_rows] == [expected, expected]
    with pytest.warns(UserWarning, match="read from its tokenizer.json"):
        run = trained(settings, tmp_path)
    checkpoint = run.checkpoints / "step-000001"
    assert digits_of(load_tokenizer(str(checkpoint))) == digits_of(AutoTokenizer.from_pretrained(checkpoint)) == DIGITS
