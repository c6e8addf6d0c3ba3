"""Parts of the page that are lists and tables: the run, times, memory, regions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from graphstep.coverage.tree import WHOLE_MODEL

_MIB = 2**20


def section(name: str, heading: str, parts: Iterable[str]) -> str:
    """A part of the page under a heading."""
    body = "\n".join(parts)
    return f'<section aria-labelledby="h-{name}">\n<h2 id="h-{name}">{escape(heading)}</h2>\n{body}\n</section>'


def table(headings: Sequence[str], rows: Iterable[Sequence[str]], *, caption: str = "", kind: str = "numbers") -> str:
    """A table whose first column names its rows; of the kind ``reasons`` the last one is text. Texts are escaped."""
    head = "".join(f'<th scope="col">{escape(text)}</th>' for text in headings)
    body = "".join(
        f'<tr><th scope="row">{escape(first)}</th>' + "".join(f"<td>{escape(text)}</td>" for text in others) + "</tr>"
        for first, *others in rows
    )
    title = f"<caption>{escape(caption)}</caption>" if caption else ""
    parts = f"{title}<thead><tr>{head}</tr></thead><tbody>{body}</tbody>"
    return f'<div class="wide"><table class="{kind}">{parts}</table></div>'


def facts_section(document: Mapping[str, Any]) -> str:
    """The run in a few lines."""
    report, innermost = document["report"], document["innermost"]
    covered = report["coverage"]
    facts = [
        ("engine", report["engine"]),
        ("recordings", f"{report['num_recordings']}, captured in {report['capture_seconds']:.2f} s"),
        ("regions", f"{covered['num_captured']} of {covered['num_regions']} captured"),
        ("innermost modules", f"{innermost['captured']} of {sum(innermost.values())} captured"),
        *((fact["name"], fact["value"]) for fact in document["facts"]),
    ]
    items = "".join(f"<dt>{escape(name)}</dt><dd>{escape(str(value))}</dd>" for name, value in facts)
    return section("run", "Run", [f"<dl>{items}</dl>"])


def times_section(document: Mapping[str, Any]) -> str:
    """A step before and after."""
    found = {name: document[key] for name, key in (("eager", "before"), ("graphed", "after")) if document[key]}
    if not found:
        return section("times", "Time of a step", ["<p>Not measured.</p>"])
    longest = max((each["step_ms"] or 0.0 for each in found.values()), default=0.0)
    parts = []
    for name, each in found.items():
        if each["step_ms"] is not None and longest > 0:
            share = 100 * each["step_ms"] / longest
            text = f"{name}: {each['step_ms']:.2f} ms"
            parts.append(
                f'<div class="bar"><span class="fill {name}" style="width:{share:.1f}%"></span>'
                f"<span>{escape(text)}</span></div>"
            )
    both = [document[key]["step_ms"] for key in ("before", "after") if document[key]]
    if document["report"]["engine"] == "tape":
        parts.append("<p>The tape of the CPU checks captures; it does not speed steps up.</p>")
    elif len(both) == 2 and all(both):
        parts.append(f"<p>{both[0] / both[1]:.2f} times as fast as eager.</p>")
    parts.append(table(("", *found), _time_rows(list(found.values())), caption="one step"))
    return section("times", "Time of a step", parts)


def _time_rows(measurements: Sequence[Mapping[str, Any]]) -> Iterable[list[str]]:
    timelines = [each["timeline"] or {} for each in measurements]
    has_device = any(timeline.get("has_device") for timeline in timelines)
    yield ["step, ms", *(_number(each["step_ms"]) for each in measurements)]
    if not has_device:
        yield ["operations of the host", *(_number(each.get("num_launches"), 0) for each in timelines)]
        return
    if any(each["host_ms"] is not None for each in measurements):
        yield ["of it, the host issues work, ms", *(_number(each["host_ms"]) for each in measurements)]
    yield ["device busy, ms (profiled)", *(_number(each.get("busy_ms")) for each in timelines)]
    idle = [
        1 - timeline["busy_ms"] / each["step_ms"] if timeline.get("busy_ms") and each["step_ms"] else None
        for each, timeline in zip(measurements, timelines, strict=True)
    ]
    yield ["device idle", *("not measured" if share is None else f"{max(0.0, share):.0%}" for share in idle)]
    yield ["launches", *(_number(each.get("num_launches"), 0) for each in timelines)]
    yield ["of them graphs", *(_number(each.get("num_graph_launches"), 0) for each in timelines)]
    yield ["kernels", *(_number(each.get("num_kernels"), 0) for each in timelines)]


def memory_section(document: Mapping[str, Any]) -> str:
    """Pools, static inputs, workspaces; weights and gradients beside them, to compare."""
    rows = document["memory"]
    largest = max((row["bytes"] for row in rows), default=0)
    bars = [
        f'<div class="bar"><span class="fill {escape(row["kind"])}" style="width:{100 * row["bytes"] / largest:.1f}%">'
        f"</span><span>{escape(row['name'])}: {row['bytes'] / _MIB:.2f} MiB</span></div>"
        for row in rows
        if largest > 0
    ]
    whole = sum(row["bytes"] for row in rows if row["kind"] in ("pool", "static", "workspace"))
    text = f"<p>Graphs hold {whole / _MIB:.2f} MiB: pools, static inputs and workspaces of libraries.</p>"
    return section("memory", "Memory", [text, *bars])


def regions_section(document: Mapping[str, Any]) -> str:
    """Every region with its numbers, then why calls were eager and what to do about it."""
    report = document["report"]
    headings = ("region", "kind", "captured", "recordings", "operations", "pool MiB", "static MiB", "replays", "eager")
    rows = (
        [
            region["name"] or WHOLE_MODEL,
            region["kind"],
            "yes" if region["is_captured"] else "no",
            str(region["num_recordings"]),
            str(region["num_operations"]),
            f"{region['pool_bytes'] / _MIB:.2f}",
            f"{region['static_bytes'] / _MIB:.2f}",
            str(region["num_replays"]),
            _eager_words(region),
        ]
        for region in report["regions"]
    )
    parts = [table(headings, rows, kind="reasons")] if report["regions"] else ["<p>There are no regions.</p>"]
    advice = {
        each["reason"]: each["advice"]
        for region in report["regions"]
        for each in region["eager_reasons"]
        if each["advice"]
    }
    if advice:
        parts.append("<h3>What to do</h3>")
        items = "".join(f"<dt>{escape(reason)}</dt><dd>{escape(text)}</dd>" for reason, text in advice.items())
        parts.append(f"<dl>{items}</dl>")
    return section("regions", "Regions", parts)


def _eager_words(region: Mapping[str, Any]) -> str:
    calls = ", ".join(f"{count} {reason}" for reason, count in region["eager_calls"].items())
    last = "; ".join(filter(None, [*region["last_mismatch"], region["last_detail"]]))
    texts = [region["why_not_captured"], f"{calls} (last: {last})" if last else calls]
    return "; ".join(filter(None, texts)) or "none"


def _number(value: float | None, digits: int = 2) -> str:
    return "not measured" if value is None else f"{value:.{digits}f}"
