"""Durations and sizes of memory as every command prints them."""

from __future__ import annotations


def duration(seconds: float) -> str:
    """`9.4 s`, `4 min 05 s` or `3 h 50 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.1f} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600:,} h {whole % 3600 // 60:02d} min"


def size(count: float) -> str:
    """Bytes as `512 MiB` or `1.25 GiB`."""
    return f"{count / 2**30:,.2f} GiB" if count >= 2**30 else f"{count / 2**20:,.0f} MiB"
