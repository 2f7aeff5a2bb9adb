"""Number formats of the report."""

import math
from typing import Any


def format_tick(value: float) -> str:
    """Format a tick label: 0.002, 5e-5, 2k, 1.5M."""
    size = abs(value)
    if 0 < size < 1e-3:
        mantissa, exponent = f"{value:.9e}".split("e")
        return f"{float(mantissa):.10g}e{int(exponent)}"
    for unit, name in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if size >= unit:
            return f"{value / unit:.10g}{name}"
    return f"{value:.10g}"


def format_value(value: Any) -> str:
    """Format a table cell: four significant digits, thousands separated; NaN, infinities and other values as text."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "inf" if value > 0 else "-inf"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return str(int(value)) if value == int(value) else f"{value:#.4g}"


def format_percent(fraction: float) -> str:
    return f"{fraction:.1%}"
