"""HTML escaping of texts that a model or a data set wrote."""

import html
from itertools import groupby

from tinyrl.text import Excerpt, name_unseen


def text_html(text: str | Excerpt) -> str:
    """HTML of a text: escaped, and every invisible character written as U+XXXX."""
    if isinstance(text, Excerpt):
        if not text.omitted:
            return text_html(text.head)
        note = f'<span class="cut">… {text.omitted:,} characters left out …</span>'
        return f"{text_html(text.head)}\n{note}\n{text_html(text.tail)}"
    parts = []
    for name, run in groupby(text.replace("\r\n", "\n"), name_unseen):
        characters = list(run)
        if not name:
            parts.append(html.escape("".join(characters)))
        else:
            times = f"×{len(characters)}" if len(characters) > 1 else ""
            parts.append(f'<span class="unseen">{name}{times}</span>')
    return "".join(parts)
