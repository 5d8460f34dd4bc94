"""Builds HTML from elements and text. Text is escaped when the tree is written, so nothing in a history is markup."""

from collections.abc import Iterable
from xml.etree.ElementTree import Element, tostring

Content = Element | str | None


def tag(name: str, /, *content: Content | Iterable[Content], **attributes: str) -> Element:
    """`<name attributes>content</name>`; None and empty text add nothing. `class_` is written "class", "_" as "-"."""
    element = Element(name, {key.rstrip("_").replace("_", "-"): value for key, value in attributes.items()})
    for part in content:
        for child in [part] if part is None or isinstance(part, str | Element) else part:
            if isinstance(child, Element):
                element.append(child)
            elif child and len(element):
                element[-1].tail = (element[-1].tail or "") + child
            elif child:
                element.text = (element.text or "") + child
    return element


def html(element: Element) -> str:
    return tostring(element, encoding="unicode", method="html")
