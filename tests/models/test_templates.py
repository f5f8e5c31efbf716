"""Chat templates within limits: what a run's process looks like after one of them ran against them."""

import signal

import pytest

from tests.tiny_models import tiny_tokenizer
from tinyrl.models import tokens as templates
from tinyrl.models.tokens import template_text

MESSAGES = [{"role": "user", "content": "hello"}]
LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
PLAIN = "{% for m in messages %}[{{ m.content }}]{% endfor %}{{ mood }}"


def render(template: str, **variables: object) -> str:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    return template_text(tokenizer, MESSAGES, variables=variables)


HOSTILE = [LOOP, "{{ 'x' * 10**15 }}", "{{ 9 ** (9 ** 9) }}", "{{ 1 / 0 }}"]


@pytest.mark.parametrize("template", [PLAIN, *HOSTILE])
def test_limits_are_taken_away_again(template: str, monkeypatch: pytest.MonkeyPatch):
    """Also after constants that the engine works out while it swallows every Exception."""
    monkeypatch.setattr(templates, "SECONDS", 0.3)
    before = signal.signal(signal.SIGALRM, signal.SIG_IGN)
    try:
        if template == PLAIN:
            assert render(template, mood="!") == "[hello]!"
        else:
            with pytest.raises(ValueError, match="chat template of the model refuses messages with the roles user: "):
                render(template)
        assert signal.getsignal(signal.SIGALRM) == signal.SIG_IGN
        assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    finally:
        signal.signal(signal.SIGALRM, before)


def test_text_and_templates_have_a_greatest_size(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(templates, "MOST_CHARACTERS", 50)
    assert render("{{ 'x' * 70 }}") == "x" * 70  # 50 more than four times "hello"
    with pytest.raises(ValueError, match="it makes 71 characters of them"):
        render("{{ 'x' * 71 }}")
    with pytest.raises(ValueError, match="it has 51 characters; at most 50 are read"):
        render("x" * 51)
