"""The report as one HTML page that needs nothing else: no script, no font, no picture from elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

__all__ = ["as_html"]

_COLOURS = {
    "data": "#d1495b",
    "copy": "#edae49",
    "forward": "#5aa9d6",
    "backward": "#2b6ea6",
    "optimizer": "#3d8b6e",
    "hooks": "#8d7ba8",
    "logging": "#9aa5b1",
}

_STYLE = """
:root { --ink: #1d2733; --soft: #5b6876; --line: #dde3ea; --paper: #ffffff; --ground: #f4f6f9; --info: #33658a; }
body { margin: 0; background: var(--ground); color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }
main { max-width: 60rem; margin: 0 auto; padding: 2rem 1rem 4rem; }
h1 { font-size: 1.6rem; margin: 0; } h2 { font-size: 1.15rem; margin: 2.2rem 0 .6rem; }
p { margin: .4rem 0; } .soft { color: var(--soft); } .verdict { font-size: 1.15rem; font-weight: 600; }
.card { background: var(--paper); border: 1px solid var(--line); border-radius: .6rem; padding: 1rem; margin: .8rem 0; }
svg { display: block; width: 100%; height: 3.4rem; background: var(--ground); }
.ends { display: flex; justify-content: space-between; font-size: .85rem; color: var(--soft); }
table { border-collapse: collapse; width: 100%; margin-top: .9rem; font-variant-numeric: tabular-nums; }
td, th { padding: .25rem .4rem; text-align: right; border-top: 1px solid var(--line); }
td:first-child, th:first-child { text-align: left; }
.key { display: inline-block; width: .8rem; height: .8rem; margin-right: .5rem; }
h3 { font-size: 1rem; margin: 0 0 .3rem; overflow-wrap: anywhere; }
.level { text-transform: uppercase; font-size: .72rem; font-weight: 700; color: #fff; border-radius: 1rem;
  padding: .12rem .6rem; margin-right: .5rem; }
.level.error { background: #b3261e; } .level.warning { background: #9a6700; } .level.info { background: #33658a; }
.place { font-family: ui-monospace, monospace; font-size: .88rem; overflow-wrap: anywhere; color: var(--info); }
dl { display: grid; grid-template-columns: 5rem 1fr; gap: .15rem .6rem; margin: .6rem 0 0; }
dt { color: var(--soft); font-size: .88rem; } dd { margin: 0; overflow-wrap: anywhere; }
"""


def as_html(report: Mapping[str, Any]) -> str:
    """Return a report, as ``as_json`` gives it, as an HTML page.

    Everything that comes from the user's program is escaped.
    """
    nothing = "Nothing to change was found." if report["watched"] else "No step was watched."
    notices = [report["short"], *(f"{note[:1].upper()}{note[1:]}." for note in report["notes"])]
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>lightning-turbo doctor</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<main>\n"
        f'<h1>lightning-turbo doctor</h1>\n<p class="verdict">{escape(report["verdict"])}</p>\n'
        f'<p class="soft">{escape(report["summary"])}, precision {escape(report["precision"])}</p>\n'
        + "".join(f'<p class="card">{escape(notice)}</p>\n' for notice in filter(None, notices))
        + _step(report) * bool(report["timeline"])
        + "<h2>Findings</h2>\n"
        + ("".join(map(_finding, report["findings"])) or f'<p class="card">{nothing}</p>')
        + "\n</main>\n</body>\n</html>\n"
    )


def _step(report: Mapping[str, Any]) -> str:
    """Return the picture of the mean step, and the table of its phases: both add up to the same total."""
    total = report["step_seconds"] or 1.0
    bars = "".join(
        f'<rect x="{1000 * each["start"] / total:.2f}" y="0" width="{1000 * each["seconds"] / total:.2f}" height="100" '
        f'fill="{_COLOURS[each["phase"]]}"><title>{escape(each["action"] or "between actions")}: '
        f"{each['seconds'] * 1e3:.3f} ms</title></rect>"
        for each in report["timeline"]
    )
    rows = "".join(
        f'<tr><td><span class="key" style="background:{_COLOURS[each["phase"]]}"></span>{escape(each["name"])}</td>'
        f"<td>{each['seconds'] * 1e3:.3f}</td><td>{each['seconds'] / total:.1%}</td></tr>"
        for each in report["phases"]
    )
    return (
        f'<h2>One step</h2>\n<div class="card"><svg viewBox="0 0 1000 100" preserveAspectRatio="none" role="img" '
        f'aria-label="The mean step, by phase">{bars}</svg>\n'
        f'<div class="ends"><span>0</span><span>{total * 1e3:.3f} ms</span></div>\n'
        f"<table><tr><th>Phase, mean of {report['timed']} steps</th><th>ms</th><th>share</th></tr>{rows}</table>"
        "</div>\n"
    )


def _finding(each: Mapping[str, Any]) -> str:
    rows = {"Cost": each["cost"], "Remedy": each["remedy"], "Card": each["card"]}
    lines = "".join(f"<dt>{label}</dt><dd>{escape(text)}</dd>" for label, text in rows.items())
    where = f"{each['count']} places: " * (each["count"] > 1) + "; ".join(each["places"])
    return (
        f'<article class="card"><h3><span class="level {each["level"]}">{each["level"]}</span>'
        f'{escape(each["what"])}</h3><p class="place">{escape(where)}</p><dl>{lines}</dl></article>\n'
    )
