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
:root { --ink: #1d2733; --soft: #5b6876; --line: #dde3ea; --paper: #ffffff; --ground: #f4f6f9; --code: #eef2f6;
  --error: #b3261e; --warning: #9a6700; --info: #33658a; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6ebf1; --soft: #9fabb8; --line: #333d49; --paper: #1c232c;
  --ground: #12171d; --code: #262f3a; --error: #ff8a80; --warning: #f2c14e; --info: #8fc1e3; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
main { max-width: 60rem; margin: 0 auto; padding: 2rem 1rem 4rem; }
h1 { font-size: 1.6rem; margin: 0; } h2 { font-size: 1.15rem; margin: 2.2rem 0 .6rem; }
p { margin: .4rem 0; } .soft { color: var(--soft); }
.card { background: var(--paper); border: 1px solid var(--line); border-radius: .6rem; padding: 1rem 1.1rem;
  margin: .8rem 0; }
.notice { border-left: .3rem solid var(--warning); }
svg { display: block; width: 100%; height: 3.4rem; border-radius: .3rem; background: var(--code); }
.ends { display: flex; justify-content: space-between; font-size: .85rem; color: var(--soft); }
table { border-collapse: collapse; width: 100%; margin-top: .9rem; font-variant-numeric: tabular-nums; }
td, th { padding: .25rem .4rem; text-align: right; border-top: 1px solid var(--line); }
td:first-child, th:first-child { text-align: left; } th { font-weight: 600; font-size: .85rem; color: var(--soft); }
.key { display: inline-block; width: .8rem; height: .8rem; border-radius: .2rem; margin-right: .5rem; }
.finding h3 { font-size: 1rem; margin: 0 0 .3rem; overflow-wrap: anywhere; }
.level { text-transform: uppercase; font-size: .72rem; letter-spacing: .06em; font-weight: 700; color: #fff;
  border-radius: 1rem; padding: .12rem .6rem; margin-right: .5rem; }
.level.error { background: #b3261e; } .level.warning { background: #9a6700; } .level.info { background: #33658a; }
.place { font-family: ui-monospace, Menlo, Consolas, monospace; font-size: .88rem; overflow-wrap: anywhere;
  color: var(--info); }
dl { display: grid; grid-template-columns: 5rem 1fr; gap: .15rem .6rem; margin: .6rem 0 0; }
dt { color: var(--soft); font-size: .88rem; } dd { margin: 0; overflow-wrap: anywhere; }
pre { background: var(--code); border-radius: .4rem; padding: .7rem .8rem; font-size: .84rem;
  white-space: pre-wrap; word-break: break-all;
  line-height: 1.4; margin: .8rem 0 0; }
.add { color: #1a7f4b; } .del { color: var(--error); }
@media (prefers-color-scheme: dark) { .add { color: #7ddba3; } }
@media (max-width: 34rem) { dl { grid-template-columns: 1fr; } dt { margin-top: .3rem; }
  td, th { padding: .25rem .2rem .25rem .7rem; font-size: .9rem; }
  td:first-child, th:first-child { padding-left: .1rem; } }
"""


def as_html(report: Mapping[str, Any]) -> str:
    """Return a report, as ``as_json`` gives it, as an HTML page.

    Everything that comes from the user's program is escaped.
    """
    findings = "".join(_finding(each) for each in report["findings"])
    if not findings:
        nothing = "Nothing to mend was found." if report["watched"] else "No step was watched."
        findings = f'<p class="card">{nothing}</p>'
    notices = [report["short"], *(f"{note[:1].upper()}{note[1:]}." for note in report["notes"])]
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>lightning-turbo doctor</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<main>\n"
        f'<h1>lightning-turbo doctor</h1>\n<p class="soft">{escape(report["summary"])}, '
        f"precision {escape(report['precision'])}</p>\n"
        + "".join(f'<p class="card notice">{escape(notice)}</p>\n' for notice in notices if notice)
        + (_step(report) if report["timeline"] else "")
        + f"<h2>Findings</h2>\n{findings}\n</main>\n</body>\n</html>\n"
    )


def _step(report: Mapping[str, Any]) -> str:
    """The time line of the step of median length, and the table of phases."""
    total = sum(segment["seconds"] for segment in report["timeline"]) or 1.0
    bars = []
    for segment in report["timeline"]:
        x, width = 1000 * segment["start"] / total, 1000 * segment["seconds"] / total
        title = f"{segment['action'] or 'between actions'}: {segment['seconds'] * 1e3:.3f} ms"
        bars.append(
            f'<rect x="{x:.2f}" y="0" width="{max(width, 0.3):.2f}" height="100" fill="{_COLOURS[segment["phase"]]}">'
            f"<title>{escape(title)}</title></rect>"
        )
    rows = []
    for each in report["phases"]:
        share = each["seconds"] / report["step_seconds"] if report["step_seconds"] else 0.0
        rows.append(
            f'<tr><td><span class="key" style="background:{_COLOURS[each["phase"]]}"></span>{escape(each["name"])}</td>'
            f"<td>{each['seconds'] * 1e3:.3f}</td><td>{share:.1%}</td></tr>"
        )
    return (
        "<h2>One step</h2>\n"
        '<div class="card"><svg viewBox="0 0 1000 100" preserveAspectRatio="none" role="img" '
        f'aria-label="Time line of the step of median length">{"".join(bars)}</svg>\n'
        f'<div class="ends"><span>0</span><span>{total * 1e3:.3f} ms</span></div>\n'
        f"<table><tr><th>Phase, median of {report['timed']} steps</th><th>ms</th><th>share</th></tr>"
        f"{''.join(rows)}</table></div>\n"
    )


def _finding(each: Mapping[str, Any]) -> str:
    rows = [("Cost", each["cost"]), ("Mended", each["mended"]), ("Remedy", each["remedy"]), ("Card", each["card"])]
    lines = "".join(f"<dt>{label}</dt><dd>{escape(text)}</dd>" for label, text in rows if text)
    where = f'<p class="place">{escape(each["place"])}</p>' if each["place"] else ""
    return (
        f'<article class="card finding"><h3><span class="level {each["level"]}">{each["level"]}</span>'
        f"{escape(each['what'])}</h3>{where}<dl>{lines}</dl>{_diff(each['diff'])}</article>\n"
    )


def _diff(text: str) -> str:
    if not text:
        return ""
    kinds = {"+": "add", "-": "del"}
    lines = []
    for line in text.splitlines():
        kind = kinds.get(line[:1]) if not line.startswith(("+++", "---")) else None
        lines.append(f'<span class="{kind}">{escape(line)}</span>' if kind else escape(line))
    return f"<pre>{chr(10).join(lines)}</pre>"
