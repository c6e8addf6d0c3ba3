"""A strict reader of HTML: every element is closed, in order, and what refers to another one finds it."""

from __future__ import annotations

from collections import Counter
from html.parser import HTMLParser

VOID = frozenset({"meta", "link", "br", "hr", "img", "input"})
REFERENCES = ("aria-labelledby", "aria-describedby", "for")


class StrictReader(HTMLParser):
    """Collects elements and complains about what browsers would silently mend."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.faults: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self.has_doctype = False

    @classmethod
    def read(cls, text: str) -> StrictReader:
        reader = cls()
        reader.feed(text)
        reader.close()
        reader.faults += [f"<{tag}> is never closed" for tag in reader.open]
        ids = [attributes["id"] for _, attributes in reader.elements if "id" in attributes]
        reader.faults += [f"id {name} is there {count} times" for name, count in Counter(ids).items() if count > 1]
        for tag, attributes in reader.elements:
            for name in REFERENCES:
                if name in attributes and attributes[name] not in ids:
                    reader.faults.append(f"<{tag} {name}={attributes[name]}> refers to nothing")
            if tag == "a" and str(attributes.get("href", "")).removeprefix("#") not in ids:
                reader.faults.append(f"link to {attributes.get('href')}")
        return reader

    def handle_decl(self, decl: str) -> None:
        self.has_doctype = decl.lower() == "doctype html"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = [name for name, _ in attrs]
        if len(names) != len(set(names)):
            self.faults.append(f"<{tag}> has an attribute twice")
        self.elements.append((tag, dict(attrs)))
        if tag == "li" and self.open[-1:] not in (["ul"], ["ol"]):
            self.faults.append("<li> outside of a list")
        if tag == "summary" and self.open[-1:] != ["details"]:
            self.faults.append("<summary> outside of <details>")
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if self.open[-1:] != [tag]:
            self.faults.append(f"</{tag}> closes <{self.open[-1] if self.open else ''}>")
        else:
            self.open.pop()

    def handle_data(self, data: str) -> None:
        if data.strip():
            self.texts.append((self.open[-1] if self.open else "", data))

    def unknown_decl(self, data: str) -> None:
        self.faults.append(f"declaration {data}")

    def of(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]
