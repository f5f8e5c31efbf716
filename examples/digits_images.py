"""Pictures of digits as rows, and a small vision-language model that reads them badly: what digits_images.sh trains.

    pip install scikit-learn pillow
    python examples/digits_images.py digits          # rows, pictures and model, written into a folder

The pictures are scikit-learn's 1,797 digits of 8 x 8, scaled up to 32 x 32, so that a patch of the tower sees strokes.
The model has SmolVLM's shape and 423k parameters. All of it, tower too, is trained here by plain transformers on labels
of which half were redrawn: it has seen what digits look like, but its samples are as noisy as its labels were. That is
what reinforcement learning can mend, with the tower frozen. rows.jsonl and eval.jsonl have the true labels;
blind.jsonl and blind.eval.jsonl are the same rows without their pictures, from which nothing can be learnt.
"""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from PIL import Image
from sklearn.datasets import load_digits
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForImageTextToText,
    Idefics3ImageProcessorPil,
    Idefics3Processor,
    PreTrainedTokenizerFast,
    SmolVLMConfig,
)

NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
QUESTION = "which digit is it?"
HELD_OUT = 500
SCALE = 4  # pixels of a picture per pixel of a digit
SIDE, PATCH, POOLED = 8 * SCALE, 8, 2  # 4 x 4 patches; 2 x 2 of them become one token
WIDTH, LAYERS, POSITIONS = 96, 2, 128
REDRAWN, LEARNING_RATE, BATCH_SIZE = 0.5, 3e-3, 64  # share of the labels; Adam
PAD, EOS = "<pad>", "<end_of_utterance>"
MARKS = ("<fake_token_around_image>", "<image>", "<global-img>")  # names that the processor writes
TEMPLATE = """\
{%- for message in messages %}{{ message['role'] + ': ' }}
{%- if message['content'] is string %}{{ message['content'] }}
{%- else %}{% for part in message['content'] %}
{%- if part['type'] == 'image' %}{{ '<image>' }}{% else %}{{ part['text'] }}{% endif %}
{%- endfor %}{% endif %}{{ '<end_of_utterance>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"""


@dataclass(frozen=True)
class Digits:
    """Pictures (N, 8, 8), values 0 to 16, and what they show, shuffled; the last HELD_OUT are held out."""

    pictures: numpy.ndarray
    labels: list[int]

    def picture(self, number: int) -> Image.Image:
        grey = (self.pictures[number] * 255 / 16).astype(numpy.uint8)
        return Image.fromarray(grey).convert("RGB").resize((SIDE, SIDE), Image.Resampling.NEAREST)


def load() -> Digits:
    found: Any = load_digits()
    order = numpy.random.default_rng(0).permutation(len(found.target))
    return Digits(found.images[order], found.target[order].tolist())


def write_rows(digits: Digits, folder: Path) -> None:
    """Write the pictures, and rows with and without them."""
    (folder / "images").mkdir(parents=True, exist_ok=True)
    rows = list[dict[str, str]]()
    for number, label in enumerate(digits.labels):
        file = f"images/{number}.png"
        digits.picture(number).save(folder / file)
        rows.append({"prompt": QUESTION, "answer": NAMES[label], "image": file})
    for name, own in (("rows.jsonl", rows[:-HELD_OUT]), ("eval.jsonl", rows[-HELD_OUT:])):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in own), encoding="utf-8")
        blind = [{"prompt": row["prompt"], "answer": row["answer"]} for row in own]
        blind_name = name.replace("rows.", "blind.").replace("eval.", "blind.eval.")
        (folder / blind_name).write_text("".join(json.dumps(row) + "\n" for row in blind), encoding="utf-8")


def make_processor() -> Any:
    """Make a tokenizer of bytes and an image processor that works without torchvision."""
    tokens = [PAD, EOS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    inner: Any = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    tokenizer: Any = PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token=EOS, pad_token=PAD, model_max_length=POSITIONS
    )
    marks = [AddedToken(mark, special=True) for mark in (EOS, *MARKS)]
    tokenizer.add_special_tokens({"additional_special_tokens": marks})
    tokenizer.chat_template = TEMPLATE
    size = {"longest_edge": SIDE}
    images = Idefics3ImageProcessorPil(size=size, max_image_size=size, do_image_splitting=False)
    places = (SIDE // PATCH // POOLED) ** 2
    return Idefics3Processor(images, tokenizer, image_seq_len=places, chat_template=TEMPLATE)


def make_model(tokenizer: Any) -> Any:
    """Make a model of SmolVLM's shape, with random weights."""
    shape = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": LAYERS}
    ends = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    text = {"model_type": "llama", **shape, **ends, "vocab_size": len(tokenizer), "max_position_embeddings": POSITIONS}
    config = SmolVLMConfig(
        text_config={**text, "num_attention_heads": 4, "num_key_value_heads": 2},  # pyright: ignore[reportArgumentType]
        vision_config={**shape, "num_attention_heads": 4, "image_size": SIDE, "patch_size": PATCH},  # pyright: ignore[reportArgumentType]
        scale_factor=POOLED,
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        pad_token_id=tokenizer.pad_token_id,  # pyright: ignore[reportCallIssue]
    )
    return AutoModelForImageTextToText.from_config(config)


def pretrain(model: Any, processor: Any, digits: Digits, *, num_steps: int) -> None:
    """Train every weight to answer as labels say of which REDRAWN were drawn again."""
    draw = numpy.random.default_rng(1)
    count = len(digits.labels) - HELD_OUT
    is_redrawn = draw.random(count) < REDRAWN
    labels = numpy.where(is_redrawn, draw.integers(10, size=count), digits.labels[:count])
    message = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": QUESTION}]}
    prompt = processor.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
    whole = processor(
        text=[f"{prompt}{NAMES[label]}{EOS}" for label in labels],
        images=[[digits.picture(number)] for number in range(count)],
        padding=True,
        padding_side="right",
        return_tensors="pt",
    )
    given = {name: whole[name] for name in ("input_ids", "attention_mask", "pixel_values")}
    prompt_length = processor(text=[prompt], images=[[digits.picture(0)]], return_tensors="pt")["input_ids"].shape[1]
    targets = given["input_ids"].masked_fill(given["attention_mask"] == 0, -100)
    targets[:, :prompt_length] = -100
    optimizer = torch.optim.Adam(model.parameters(), LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=num_steps)
    for _ in range(num_steps):
        chosen = torch.randint(count, (BATCH_SIZE,))
        own = {name: value[chosen] for name, value in given.items()}
        loss = model(**own, labels=targets[chosen]).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python examples/digits_images.py")
    parser.add_argument("out", type=Path, help="the folder")
    parser.add_argument("--num-steps", type=int, default=600, help="of training the model (%(default)s)")
    options = parser.parse_args(words)
    torch.manual_seed(0)
    digits = load()
    write_rows(digits, options.out)
    processor = make_processor()
    model = make_model(processor.tokenizer)
    pretrain(model, processor, digits, num_steps=options.num_steps)
    model.save_pretrained(options.out / "model")
    processor.save_pretrained(options.out / "model")


if __name__ == "__main__":
    main()
