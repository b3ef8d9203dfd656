"""Numbers as people read them, in the terminal and on the page."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

LONGEST_TEXT = 400  # characters of one setting, note or fault that a report shows


def seconds(value: float | None) -> str:
    """'850 ms', '1.42 s', '12.5 min', '3.2 h'; '–' of nothing."""
    if value is None:
        return "–"
    size = abs(value)
    if size < 0.9995e-3:
        return f"{value * 1e6:.0f} µs" if size > 0 else "0 s"
    if size < 0.9995:
        return f"{_digits(value * 1e3)} ms"
    if size < 120:
        return f"{_digits(value)} s"
    return f"{_digits(value / 60)} min" if size < 7200 else f"{_digits(value / 3600)} h"


def round_seconds(value: float) -> str:
    """As `seconds`, without zeros at the end of a fraction: for limits and axes, which are round."""
    return _without_zeros(seconds(value))


def count(value: float | None) -> str:
    """'950', '12,345', '1.23 M', '4.5 G'; small fractions keep three digits."""
    if value is None:
        return "–"
    size = abs(value)
    if size >= 1e6:
        return f"{_digits(value / 1e9)} G" if size >= 1e9 else f"{_digits(value / 1e6)} M"
    return f"{value:,.0f}" if size >= 1000 or float(value).is_integer() else _digits(value)


def round_count(value: float) -> str:
    """As `count`, without zeros at the end of a fraction."""
    return _without_zeros(count(value))


def share(value: float | None) -> str:
    """'98.3 %'; '–' of nothing."""
    if value is None:
        return "–"
    return f"{value:.0%}".replace("%", " %") if value in (0, 1) else f"{value:.1%}".replace("%", " %")


def dollars(value: float | None) -> str:
    if value is None:
        return "–"
    return f"${value:,.2f}" if abs(value) < 1000 else f"${value:,.0f}"


def text(value: Any) -> str:
    """A setting or a note in one line of bounded length."""
    plain = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    plain = " ".join(plain.split())
    return plain if len(plain) <= LONGEST_TEXT else plain[: LONGEST_TEXT - 1] + "…"


def limits(slo: dict[str, Any]) -> str:
    """'TTFT ≤ 2 s and TPOT ≤ 50 ms' of a summary's `slo`; empty where there is none."""
    names = (("TTFT", slo["ttft_ms"]), ("TPOT", slo["tpot_ms"]))
    return " and ".join(f"{name} ≤ {round_seconds(limit / 1e3)}" for name, limit in names if limit is not None)


def reasons(summary: dict[str, Any]) -> list[str]:
    """'3 × refused: the queue is full' of a summary's `reasons`."""
    return [f"{one['requests']:,} × {one['ending']}: {one['detail']}" for one in summary["reasons"]]


def load(value: float | None, native: float | None) -> str:
    """A run's load, and that of its requests' own times where it differs, as shares of saturation; empty if unknown."""
    if value is None:
        return "" if native is None else f"{share(native)} of saturation"
    same = native is None or abs(value - native) < 5e-4 * native
    return f"{share(value)} of saturation" + ("" if same else f", {share(native)} at the trace's own times")


def latency_rows(summary: dict[str, Any], titles: dict[str, str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(title, distribution) of each latency; where there are short and long prompts, TTFT of each of them too."""
    classes = summary["prompt_classes"]
    for key, title in titles.items():
        yield title, summary[key]
        if key == "ttft_s" and len(classes) > 1:
            for name, figures in classes.items():
                yield f"{title.split(' (')[0]}, {figures['requests']:,} {name} prompts", figures["ttft_s"]


def fairness(summary: dict[str, Any]) -> str:
    """How often prompts gave way and requests without room were passed; empty if neither happened."""
    words = []
    if summary["yields"]:
        words.append(
            f"long prompts gave way {summary['yields']:,} times (one of them {summary['most_yields']:,} times) and "
            f"computed {count(summary['quota_tokens'])} tokens before others in return"
        )
    if summary["overtakes"]:
        words.append(f"requests without room in the KV cache were passed {summary['overtakes']:,} times")
    return "; ".join(words)


def hits(summary: dict[str, Any]) -> str:
    """'L1 30.1 %, L2 8.2 %, L3 1 %' of a summary with lower tiers; empty without."""
    if summary["tiers"] is None:
        return ""
    return ", ".join(f"{tier.upper()} {share(rate)}" for tier, rate in summary["hit_rate"].items())


def tiers(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """(what, figures) of what the lower tiers did, in blocks; empty where there are none."""
    counts = summary["tiers"]
    if counts is None:
        return []
    rows = [
        (
            "L1 evicted",
            f"{count(counts['l1_evicted'])} blocks, {count(counts['l1_lost'])} of them without a copy below",
        ),
        ("L1 to L2", _moved(counts["saved"], counts["bytes_saved"], counts["saves_dropped"])),
        ("L2 to L1", f"{_moved(counts['loaded'], counts['bytes_loaded'])}, in {seconds(counts['load_s'])}"),
        ("L2 in use", f"{count(counts['l2_blocks'])} of {count(counts['l2_capacity'])}, {_evicted(counts, 'l2')}"),
    ]
    if counts["stored"] or counts["fetched"] or counts["store_errors"] or counts["stores_dropped"]:
        rows += [
            ("L2 to L3", _moved(counts["stored"], counts["bytes_stored"], counts["stores_dropped"])),
            ("L3 to L2", f"{_moved(counts['fetched'], counts['bytes_fetched'])}, in {seconds(counts['fetch_s'])}"),
            ("L3", f"{_evicted(counts, 'l3')}, {counts['store_errors']:,} errors"),
        ]
    mean = counts["lookup_s"] / counts["lookups"] if counts["lookups"] else None
    rows.append(("Lookups", f"{count(counts['lookups'])}, {seconds(mean)} on average, {counts['late']:,} too late"))
    left = f"{count(counts['recomputed'])} blocks computed although they were below, {count(counts['wasted'])} brought"
    rows.append(("Not used", f"{left} in vain"))
    return rows


def _moved(blocks: int, size: int, dropped: int = 0) -> str:
    lost = f", {count(dropped)} dropped" if dropped else ""
    return f"{count(blocks)} blocks, {count(size / 1e9)} GB{lost}"


def _evicted(counts: dict[str, Any], tier: str) -> str:
    return f"{count(counts[f'{tier}_evicted'])} evicted"


def _digits(value: float) -> str:
    """Three significant digits, no exponent, thousands separated."""
    size = abs(value)
    decimals = 0 if size >= 100 else 1 if size >= 10 else 2 if size >= 0.1 else 4
    return f"{value:,.{decimals}f}"


def _without_zeros(text: str) -> str:
    number, *unit = text.split(" ")
    return " ".join([number.rstrip("0").rstrip(".") if "." in number else number, *unit])
