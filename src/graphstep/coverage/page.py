"""The page: one HTML file that needs nothing else, offline, in light and dark, with and without scripts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from typing import Any, Final

from graphstep.coverage.sections import facts_section, memory_section, regions_section, times_section
from graphstep.coverage.tree_section import tree_section

_POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
"""Nothing is loaded from anywhere: the browser itself sees to it."""


def html_page(document: Mapping[str, Any]) -> str:
    """Return the page of a document, see :func:`graphstep.coverage.coverage_document`."""
    timelines = {name: document[name]["timeline"] for name in ("before", "after") if document[name]}
    timelines = {name: timeline for name, timeline in timelines.items() if timeline and timeline["tracks"]}
    title = escape(document["title"])
    sections = [
        facts_section(document),
        tree_section(document),
        times_section(document),
        _timeline_section(timelines),
        memory_section(document),
        regions_section(document),
    ]
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f'<meta http-equiv="Content-Security-Policy" content="{escape(_POLICY)}">',
            '<link rel="icon" href="data:,">',
            f"<title>{title}</title>",
            f"<style>\n{_asset('page.css')}</style>",
            "</head>",
            "<body>",
            '<a class="skip" href="#main">skip to the content</a>',
            f'<header><h1>{title}</h1><button id="theme" type="button" hidden>dark</button></header>',
            '<main id="main">',
            *sections,
            "</main>",
            f'<script type="application/json" id="timelines">{_embedded(timelines)}</script>',
            f"<script>\n{_asset('page.js')}</script>",
            "</body>",
            "</html>",
            "",
        ]
    )


def _timeline_section(timelines: Mapping[str, Any]) -> str:
    if not timelines:
        text = "<p>No step was profiled.</p>"
        return f'<section aria-labelledby="h-timeline"><h2 id="h-timeline">Timeline</h2>{text}</section>'
    names = {"before": "eager", "after": "graphed"}
    parts = [
        "<p>Launches by the host above, what the device ran below; the same scale for both. The profiler slows the "
        "host down: the times above are those of other steps.</p>"
        if any(timeline["has_device"] for timeline in timelines.values())
        else "<p>There is no device on this machine: these are the operations that the host ran itself.</p>",
        '<div class="tools" id="timeline-tools" hidden>'
        '<button type="button" data-zoom="2">zoom in</button>'
        '<button type="button" data-zoom="0.5">zoom out</button>'
        '<button type="button" data-move="-0.25">earlier</button>'
        '<button type="button" data-move="0.25">later</button>'
        '<button type="button" data-reset="1">all</button>'
        '<output id="timeline-range"></output></div>',
        "<noscript><p>The drawing needs scripts; the tables say the same in numbers.</p></noscript>",
    ]
    for name, timeline in timelines.items():
        label = f"{names[name]}: {_timeline_words(timeline)}"
        parts.append(
            f'<figure><canvas class="timeline" data-timeline="{name}" tabindex="0" role="img" '
            f'aria-label="{escape(label)}" width="1000" height="120"></canvas>'
            f"<figcaption>{escape(label)}</figcaption></figure>"
        )
        parts.append(_longest_table(names[name], timeline))
    parts.append('<p id="timeline-detail" class="detail" aria-live="polite"></p>')
    legend = "".join(
        f'<span class="key"><i class="swatch" data-category="{escape(category)}"></i>{escape(category)}</span>'
        for category in dict.fromkeys(c for timeline in timelines.values() for c in timeline["categories"])
    )
    parts.append(f'<p class="legend">{legend}</p>')
    return "\n".join(
        ['<section aria-labelledby="h-timeline">', '<h2 id="h-timeline">Timeline</h2>', *parts, "</section>"]
    )


def _timeline_words(timeline: Mapping[str, Any]) -> str:
    steps = "1 step" if timeline["num_steps"] == 1 else f"{timeline['num_steps']} steps"
    if not timeline["has_device"]:
        return f"{steps}, {timeline['num_launches']:.0f} operations a step"
    return (
        f"{steps}, {timeline['num_launches']:.0f} launches a step ({timeline['num_graph_launches']:.0f} of graphs), "
        f"{timeline['num_kernels']:.0f} kernels, device busy {timeline['busy_ms']:.2f} ms"
    )


def _longest_table(name: str, timeline: Mapping[str, Any]) -> str:
    what = "kernels" if timeline["has_device"] else "operations"
    rows: Sequence[Mapping[str, Any]] = timeline["longest"]
    body = "".join(
        f'<tr><th scope="row">{escape(row["name"])}</th><td>{row["ms"]:.3f}</td><td>{row["count"]:.1f}</td></tr>'
        for row in rows
    )
    return (
        f"<details><summary>{escape(name)}: {what} that take longest</summary>"
        f'<table><thead><tr><th scope="col">name</th><th scope="col">ms a step</th><th scope="col">calls a step</th>'
        f"</tr></thead><tbody>{body}</tbody></table></details>"
    )


def _embedded(data: Any) -> str:
    """JSON that cannot end the element it stands in, whatever names it holds."""
    text = json.dumps(data, separators=(",", ":"))  # ASCII only
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _asset(name: str) -> str:
    return files("graphstep.coverage").joinpath("assets", name).read_text(encoding="utf-8")
