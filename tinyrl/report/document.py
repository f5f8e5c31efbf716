"""What every page of a report is made of: an HTML file that loads nothing and runs nothing, and a grid of charts in it.

Everything a run wrote (texts, names, settings) passes through text_html(), or one_line() and escape(). The content
security policy is a second defence: under it a browser runs no script and loads no address, even if one got through.
"""

from html import escape
from pathlib import Path

from tinyrl.report.panels import Panel, cells

POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


def document(title: str, body: str) -> str:
    """The whole page as text, of a title (plain text) and the HTML of its body."""
    style = Path(__file__).with_name("page.css").read_text("utf-8")
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="referrer" content="no-referrer">
<title>{escape(title)}: tinyrl report</title>
<style>
{style}</style>
</head>
<body>
{body}
</body>
</html>
"""


def charts_html(panels: list[Panel], svgs: list[list[str]], *, key: str) -> str:
    """The grid of charts with a title over and a meaning under each; `key` is the HTML of what the colours mean."""
    if not panels:
        return ""
    figures = []
    for panel, variants, cell in zip(panels, svgs, cells(len(panels)), strict=True):
        if len(variants) == 2:
            wide, narrow = (svg.removeprefix("<svg") for svg in variants)
            variants = [f'<svg class="wide"{wide}', f'<svg class="narrow"{narrow}']
        caption = f"<figcaption><b>{escape(panel.title)}</b> <span>{escape(panel.unit)}</span></figcaption>"
        meaning = f'\n<p class="meaning">{escape(panel.meaning)}</p>' if panel.meaning else ""
        figures.append(f'<figure class="span{cell.width}">{caption}\n{"".join(variants)}{meaning}</figure>\n')
    return f'<h2>How it went</h2>\n<p class="key">{key}</p>\n<div class="charts">\n{"".join(figures)}</div>'
