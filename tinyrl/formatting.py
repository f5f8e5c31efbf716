"""Numbers, durations and amounts of bytes as a reader sees them."""

import math

ROUNDING_ERROR = 1e-12


def format_number(value: float | None, *, decimals: int = 3, signed: bool = False, missing: str = "-") -> str:
    """Format a result for a table: an integer as it is, else with `decimals`, or as many significant digits below 0.1;
    `missing` for None and NaN. signed: with a plus sign before a positive one.
    """
    if value is None or math.isnan(value):
        return missing
    sign = "+" if signed and value >= 0 else ""
    if isinstance(value, int):
        return f"{sign}{value}"
    return f"{sign}{value:.{decimals}g}" if 0 < abs(value) < 0.1 else f"{sign}{value:.{decimals}f}"


def format_short(value: float) -> str:
    """Format a number for a narrow line: three significant digits, whole from 1,000 on, "-" for NaN."""
    if math.isnan(value):
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def typeset_number(value: float, *, share: bool = False) -> str:
    """Format a number for the page and its charts: three digits, a real minus sign, 0 for a rounding error, a dash for
    NaN. share: as per cent with one decimal.
    """
    if not math.isfinite(value):
        return "\u2013"
    if share:
        return "< 0.1 %" if 0 < value < 0.0005 else f"{value * 100:.1f}".removesuffix(".0") + " %"
    size = abs(value)
    if size < ROUNDING_ERROR or (value == int(value) and size < 100_000):
        text = f"{int(value):,}"
    elif size < 0.001 or size >= 1e9:
        text = short_power(f"{value:.1e}")
    else:
        text = f"{value:#.3g}" if size < 99.95 else f"{value:,.0f}"
    return text.replace("-", "\u2212")


def short_power(text: str) -> str:
    """Write 5.0e-05 as 5e-5."""
    digits, _, power = text.partition("e")
    return f"{digits.removesuffix('.0')}e{int(power)}" if power else text


def format_seconds(seconds: float) -> str:
    """Format a duration: 8.40 s, 1 min 32 s, 2 h 05 min."""
    if seconds < 59.95:
        return f"{typeset_number(seconds)} s"
    if round(seconds) < 3600:
        return f"{round(seconds) // 60} min {round(seconds) % 60:02d} s"
    return f"{round(seconds / 60) // 60} h {round(seconds / 60) % 60:02d} min"


def format_clock(seconds: int) -> str:
    """Format a time left: 02:05, 1:02:05."""
    hours = f"{seconds // 3600}:" if seconds >= 3600 else ""
    return f"{hours}{seconds % 3600 // 60:02d}:{seconds % 60:02d}"


def format_bytes(count: float) -> str:
    """Format an amount of memory or disk: 1.50 GB, 0.3 MB."""
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"
