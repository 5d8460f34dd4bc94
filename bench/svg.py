"""Elements of the drawings in docs/."""

from collections.abc import Iterable
from xml.etree.ElementTree import Element


def tag(name: str, /, *content: Element | str | Iterable[Element], **attributes: str) -> Element:
    """Makes `<name attributes>content</name>`; a trailing "_" of an attribute is dropped, others become "-"."""
    element = Element(name, {key.rstrip("_").replace("_", "-"): value for key, value in attributes.items()})
    for part in content:
        if isinstance(part, str):
            element.text = part
        else:
            element.extend([part] if isinstance(part, Element) else part)
    return element


def text(words: str, x: float, y: float, **attributes: str) -> Element:
    return tag("text", words, x=f"{x:.1f}", y=f"{y:.1f}", **attributes)
