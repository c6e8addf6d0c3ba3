"""The module tree of the page: colour, word and sign for what is captured, and the reason for what is not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

from graphstep.coverage.sections import section

_SIGNS: Mapping[str, str] = {
    "captured": "\N{BLACK SQUARE}",
    "partly": "\N{SQUARE WITH LEFT HALF BLACK}",
    "eager": "\N{WHITE SQUARE}",
}
_OPEN_DEPTH = 2
_MIB = 2**20


def tree_section(document: Mapping[str, Any]) -> str:
    """Nested lists that open and close; modules whose parts differ are open."""
    legend = "".join(
        f'<span class="key state {state}"><span aria-hidden="true">{sign}</span> {state}</span>'
        for state, sign in _SIGNS.items()
    )
    tools = (
        '<div class="tools" id="tree-tools" hidden>'
        '<label>find <input id="tree-find" type="search" autocomplete="off"></label>'
        '<label>show <select id="tree-show"><option value="">all</option>'
        + "".join(f'<option value="{state}">{state}</option>' for state in _SIGNS)
        + "</select></label>"
        '<button type="button" data-open="1">open all</button>'
        '<button type="button" data-open="0">close all</button>'
        '<output id="tree-count"></output></div>'
    )
    parts = [f'<p class="legend">{legend}</p>', tools, '<ul class="tree">', *_lines(document["tree"], 0), "</ul>"]
    return section("tree", "Modules", parts)


def _lines(node: Mapping[str, Any], depth: int) -> Iterator[str]:
    line = _line(node)
    path, state = escape(node["path"]), escape(node["coverage"])
    yield f'<li data-path="{path}" data-state="{state}">'
    if not node["children"]:
        yield f'<div class="module {state}">{line}</div>'
    else:
        is_open = " open" if depth < _OPEN_DEPTH or state == "partly" else ""
        yield f'<details{is_open}><summary class="module {state}">{line}</summary>'
        yield "<ul>"
        for child in node["children"]:
            yield from _lines(child, depth + 1)
        yield "</ul></details>"
    yield "</li>"


def _line(node: Mapping[str, Any]) -> str:
    state = node["coverage"]
    kind = f' <span class="kind">{escape(node["kind"])}</span>' if node["kind"] != node["name"] else ""
    size = f' <span class="size">{node["num_parameters"]:,} parameters</span>' if node["num_parameters"] else ""
    region = node["region"]
    cost = ""
    if region is not None and region["is_captured"]:
        cost = (
            f' <span class="size">{region["num_operations"]} operations, pool {region["pool_bytes"] / _MIB:.2f} MiB, '
            f"{region['num_replays']} replays</span>"
        )
    return (
        f'<span class="state {escape(state)}"><span aria-hidden="true">{_SIGNS[state]}</span> {escape(state)}</span> '
        f'<b class="name">{escape(node["name"])}</b>{kind}{size}{cost} <span class="why">{escape(node["why"])}</span>'
    )
