"""URLs in settings and messages: what is an address, and masking what may be secret in one."""

import os
import re
import urllib.parse

from tinyrl.text import truncate

MASK = "***"  # replaces what may be secret in a URL
# A word is matched from its beginning only, without backtracking: else a line of 64 KB takes minutes.
_URL_LOGIN = re.compile(r"((?<!\w)\w++://)[^/\s]*@")
_URL_QUERY = re.compile(r"((?<!\w)\w++://[^\s?\"'<>]*\?)([^\s\"'<>)\]]+)")


def mask_url(text: str) -> str:
    """Mask the userinfo and the values of the query of each URL in a text."""

    def masked_query(match: re.Match[str]) -> str:
        pairs = (pair.partition("=") for pair in match[2].split("&"))
        return match[1] + "&".join(f"{name}={MASK}" if equals else MASK for name, equals, _ in pairs)

    return _URL_QUERY.sub(masked_query, _URL_LOGIN.sub(rf"\1{MASK}@", text))


def is_address(url: str) -> bool:
    """Return whether a text is an http or https address with a host."""
    try:
        parts = urllib.parse.urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is not a number, half a bracket
        return False


def resolve_url(url: str, *, setting: str) -> str:
    """Restore the masked parts of a setting's URL from the environment: generation.url from TINYRL_GENERATION_URL.

    Raises ValueError where the variable is missing or holds another address.
    """
    if MASK not in url:
        return url
    variable = f"TINYRL_{setting.upper().replace('.', '_')}"
    whole = os.environ.get(variable, "")
    if MASK in whole or mask_url(whole) != mask_url(url):
        raise ValueError(f"{setting}={truncate(url)} is recorded without secrets: set {variable} to the whole address")
    return whole
