"""Images of requests, sent by the real clients to a small vision-language model."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.endpoint.test_endpoint import post
from tests.images import BLUE, RED, cut_jpeg, image_file, png
from tests.tiny_vision import tiny_vision
from tinyrl.data.image_files import ImageFiles
from tinyrl.endpoint import request_images
from tinyrl.endpoint.dialect import Refused
from tinyrl.endpoint.endpoint import Endpoint
from tinyrl.endpoint.request_images import ImageShelf, RequestImages, image_places
from tinyrl.endpoint.server import Listening
from tinyrl.evaluation.targets import policy_at
from tinyrl.generation.scoring import logprobs_of_text
from tinyrl.process.launched import Options
from tinyrl.tasks.prompts import render_prompt
from tinyrl.tools.serve import served

SIZE = (32, 32)
MODEL = "smolvlm"


def encoded(color: tuple[int, int, int]) -> str:
    return base64.b64encode(png(color, SIZE)).decode()


def url(color: tuple[int, int, int]) -> str:
    return f"data:image/png;base64,{encoded(color)}"


def image_part(address: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": address}}


def answer(client: openai.OpenAI, color: tuple[int, int, int], **options: Any) -> Any:
    """The greedy answer to a question about an image of one colour."""
    ask: Any = client.chat.completions.create
    content = [image_part(url(color)), {"type": "text", "text": "what?"}]
    messages = [{"role": "user", "content": content}]
    [choice] = ask(model=MODEL, messages=messages, max_tokens=6, temperature=0.0, **options).choices
    return choice


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    folder = tiny_vision(MODEL, tmp_path_factory.mktemp("served") / MODEL)
    target = policy_at(str(folder), ["model.with_images=true"])
    with served(target, options=Options(device="cpu"), max_rows=2) as found:
        yield found


@pytest.fixture(scope="module")
def listening(endpoint: Endpoint) -> Iterator[Listening]:
    found = Listening(endpoint)
    yield found
    found.stop()


@pytest.fixture(scope="module")
def client(listening: Listening) -> openai.OpenAI:
    return openai.OpenAI(base_url=listening.url, api_key="none", max_retries=0)


@pytest.mark.parametrize("likeliest", [None, 2], ids=["sampled", "likeliest"])
def test_a_chat_reads_an_image_as_a_row_does(
    likeliest: int | None, client: openai.OpenAI, endpoint: Endpoint, tmp_path: Path
) -> None:
    """By its log-probabilities, of sampling and of a forward pass, beside those of a row's prompt."""
    policy = endpoint.scheduler.engine.policy
    image = ImageFiles(base=tmp_path).image_of(str(image_file(tmp_path / "a.png", RED, SIZE)))
    message = {"role": "user", "content": "\ufffcwhat?", "images": [image.entry]}
    prompt = render_prompt(policy.tokenizer, [message], images=policy.image_expander).tokens
    choice = answer(client, RED, logprobs=True, top_logprobs=likeliest, extra_body={"return_token_ids": True})
    tokens = choice.model_extra["token_ids"]
    expected, _ = logprobs_of_text(policy, [*prompt, *tokens], role="base", temperature=1.0)
    listed = [one.logprob for one in choice.logprobs.content]
    assert listed == pytest.approx(expected[len(prompt) :], abs=1e-4)


def test_equal_texts_with_other_images_are_other_prompts(client: openai.OpenAI) -> None:
    """Also behind one another, where the first is in the cache."""
    first = answer(client, RED).message.content
    other = answer(client, BLUE).message.content
    assert answer(client, RED).message.content == first
    assert other != first


def test_three_dialects_show_the_same_image(client: openai.OpenAI, listening: Listening) -> None:
    import anthropic  # a second of CPU time, so only where it is needed

    expected = answer(client, RED).message.content
    items: Any = [{"type": "input_image", "detail": "auto", "image_url": url(RED)}]
    items += [{"type": "input_text", "text": "what?"}]
    asked: Any = {"model": MODEL, "input": [{"role": "user", "content": items}], "temperature": 0.0}
    assert client.responses.create(**asked, max_output_tokens=6).output_text == expected
    source = {"type": "base64", "media_type": "image/png", "data": encoded(RED)}
    blocks = [{"type": "image", "source": source}, {"type": "text", "text": "what?"}]
    claude = anthropic.Anthropic(base_url=listening.url.removesuffix("/v1"), api_key="none", max_retries=0)
    asked = {"model": MODEL, "messages": [{"role": "user", "content": blocks}], "max_tokens": 6}
    [block] = claude.messages.create(**asked, extra_body={"temperature": 0.0}).content
    assert block.type == "text"
    assert block.text == expected


def test_the_tokens_of_a_prompt_are_those_of_the_model(client: openai.OpenAI, endpoint: Endpoint) -> None:
    choice = answer(client, RED, extra_body={"return_token_ids": True})
    assert endpoint.expander is not None
    assert choice.model_extra["prompt_token_ids"].count(endpoint.expander.placeholder) == 4
    assert max(choice.model_extra["prompt_token_ids"]) < endpoint.scheduler.vocabulary


def refused(listening: Listening, path: str = "chat/completions", **asked: Any) -> str:
    """The error of a request that is refused."""
    code, found = post(f"{listening.url}/{path}", json.dumps({"model": MODEL, "max_tokens": 2, **asked}).encode(), {})
    assert code == 400
    return json.dumps(found)


@pytest.mark.parametrize("address", ["http://127.0.0.1:9/x.png", "{file}", "file://{file}"])
def test_nothing_but_a_data_url_is_read(address: str, listening: Listening, tmp_path: Path) -> None:
    """No address is fetched, and no file of the server's is opened."""
    address = address.format(file=image_file(tmp_path / "a.png"))
    for part in (image_part(address), {"type": "image", "path": address}):
        assert "data URL" in refused(listening, messages=[{"role": "user", "content": [part]}])
    block = {"type": "image", "source": {"type": "url", "url": address}}
    assert "data URL" in refused(listening, "messages", messages=[{"role": "user", "content": [block]}])


def test_a_file_in_the_form_of_rows_is_not_read(listening: Listening, tmp_path: Path) -> None:
    image = ImageFiles(base=tmp_path).image_of(str(image_file(tmp_path / "a.png")))
    message = {"role": "user", "content": "\ufffc", "images": [image.entry]}
    assert "data URL" in refused(listening, messages=[message])


def test_ids_of_images_among_tokens_are_refused(listening: Listening) -> None:
    assert "tokens" in refused(listening, "completions", prompt=[5, 1 << 62])


CUT = f"data:image/jpeg;base64,{base64.b64encode(cut_jpeg()).decode()}"
WHOLE = {"role": "user", "content": [image_part(url(RED)), {"type": "text", "text": "what?"}]}
SOURCE = {"type": "base64", "media_type": "image/jpeg", "data": CUT.partition(",")[2]}


@pytest.mark.parametrize(("path", "asked", "place"), [
    ("chat/completions", {"messages": [WHOLE, {"role": "user", "content": [{"type": "text", "text": "and?"},
                                                                           image_part(CUT)]}]},
     "messages[1].content[1]"),
    ("messages", {"system": "look", "messages": [{"role": "user", "content": [{"type": "image", "source": SOURCE}]}]},
     "messages[0].content[0]"),
    ("responses", {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": CUT}]}],
                   "max_tokens": None}, "input[0].content[0]"),
    ("chat/completions", {"messages": [{"role": "user", "content": [image_part("data:image/png;base64,AAAA")]}]},
     "messages[0].content[0]"),
    ("chat/completions", {"messages": [{"role": "user", "content": [image_part("data:image/png;base64,?")]}]},
     "messages[0].content[0]"),
])  # fmt: skip
def test_an_image_that_cannot_be_read_is_named_by_its_part(
    path: str, asked: dict[str, Any], place: str, listening: Listening
) -> None:
    """And by no file of the server's."""
    error = refused(listening, path, **asked)
    assert f"the image at {place} " in error
    assert "tinyrl-images" not in error


def test_places_of_images_are_those_of_parts_and_of_results() -> None:
    image = {"type": "image", "source": {}}
    result = {"type": "tool_result", "content": [{"type": "text", "text": "a"}, image]}
    call = {"type": "tool_use", "input": {"content": [image]}}
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": [call]},
                {"role": "user", "content": [result, image]}]  # fmt: skip
    assert image_places({"messages": messages}) == ["messages[2].content[0].content[1]", "messages[2].content[1]"]
    output = {"type": "function_call_output", "output": [{"type": "input_image"}]}
    assert image_places({"input": [output], "messages": None}) == ["input[0].output[0]"]


@pytest.mark.parametrize(("name", "most"), [("MOST_IMAGES", 1), ("MOST_PIXELS", 2000)])
def test_images_of_a_request_are_bounded(
    name: str, most: int, listening: Listening, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_images, name, most)
    content = [image_part(url(RED)), image_part(url(BLUE))]
    assert "request" in refused(listening, messages=[{"role": "user", "content": content}])


# ---- the shelf ----


@pytest.fixture
def shelf(endpoint: Endpoint) -> Iterator[ImageShelf]:
    assert endpoint.expander is not None
    found = ImageShelf(endpoint.expander)
    yield found
    found.close()


def test_images_of_earlier_requests_are_forgotten(shelf: ImageShelf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_images, "MOST_KEPT", 1)
    images = [shelf.hold(png((number, 0, 0))) for number in range(3)]
    for image in images:
        shelf.expander.expansion(image)
        shelf.release([image])
    known = [image.key in shelf.expander.images for image in images]
    assert known == [False, False, True]
    assert [Path(image.path).exists() for image in images] == known


def test_an_image_stays_while_another_request_holds_it(shelf: ImageShelf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_images, "MOST_KEPT", 0)
    image, same = (shelf.hold(png((7, 7, 7))) for _ in range(2))
    shelf.release([image])
    assert Path(same.path).exists()
    shelf.release([same])
    assert not Path(same.path).exists()


def test_bytes_of_images_under_way_are_bounded(shelf: ImageShelf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_images, "MOST_BYTES", len(png(RED, SIZE)) + 1)
    held = RequestImages(shelf.hold)
    held.image_of(url(RED))
    with pytest.raises(Refused, match="bytes"):
        held.image_of(url(BLUE))
    shelf.release(held.found)
    assert held.image_of(url(BLUE))


def test_a_request_that_has_been_answered_holds_nothing(
    client: openai.OpenAI, endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_images, "MOST_KEPT", 0)
    assert endpoint.shelf is not None
    answer(client, RED)
    answer(client, BLUE, stream=False)
    assert len(endpoint.shelf) <= 1  # of the last one, whose end the client may see first
