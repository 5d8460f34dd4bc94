"""Formats numbers for the page: few digits, a unit, and an exponent only beyond the largest unit."""

import math

THIN = "\u202f"
"""A narrow no-break space, between a number and its unit."""


def number(value: float) -> str:
    """Writes three to four digits: 0.0213, 1.5, 1,024, 48.3 k, 1.2 M; powers of ten below 0.001 and above 10^12."""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    size = abs(value)
    if size == 0:
        return "0"
    # The bounds allow for rounding: 9999.6 is 10 k and not 10,000.
    if size < 0.000995 or size >= 9.995e11:
        return _scientific(value)
    if size < 9999.5:
        return _minus(f"{value:,.0f}" if size >= 999.5 else f"{value:.3g}")
    for unit, factor in (("k", 1e3), ("M", 1e6), ("G", 1e9)):
        if size < 999.5 * factor:
            return _minus(f"{value / factor:.3g}") + THIN + unit
    return _minus(f"{value / 1e9:.0f}") + THIN + "G"


def count(value: int) -> str:
    """Writes all digits, in groups of three."""
    return f"{value:,}"


def share(part: float) -> str:
    """Writes 0..1 as a percentage; a share above zero is never 0 %."""
    percent = 100 * part
    if 0 < percent < 0.1:
        return f"<{THIN}0.1{THIN}%"
    return (f"{percent:.1f}" if percent < 9.95 else f"{percent:.0f}") + THIN + "%"


def duration(seconds: float) -> str:
    """Writes for example: 0.42 ms, 850 ms, 3.2 s, 4 min 05 s, 2 h 05 min, 3 d 4 h."""
    if 0 < seconds < 0.00001:
        return f"<{THIN}0.01{THIN}ms"
    if seconds < 0.9995:
        return f"{1000 * seconds:{'.3g' if seconds < 0.0995 else '.0f'}}{THIN}ms"
    if seconds < 59.95:
        return f"{seconds:.3g}{THIN}s"
    rounded = round(seconds)
    minutes, hours, days = rounded // 60, rounded // 3600, rounded // 86400
    if minutes < 60:
        return f"{minutes}{THIN}min {rounded % 60:02}{THIN}s"
    if hours < 48:
        return f"{hours}{THIN}h {minutes % 60:02}{THIN}min"
    return f"{days}{THIN}d {hours % 24}{THIN}h"


def plural(amount: int, thing: str, things: str = "") -> str:
    """Writes for example: 1 step, 2 steps. `things`: the plural, if it is not formed with an s."""
    return f"{count(amount)} {thing if amount == 1 else things or thing + 's'}"


def _scientific(value: float) -> str:
    digits, _, power = f"{value:.2e}".partition("e")
    digits = digits.rstrip("0").rstrip(".")
    exponent = str(int(power)).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return _minus(f"{digits}·10{exponent}")


def _minus(text: str) -> str:
    return text.replace("-", "−")
