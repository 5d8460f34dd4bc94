"""Builds the page's HTML. Text is escaped when the tree is written, so nothing in a history is markup."""

from collections.abc import Iterable, Sequence
from xml.etree.ElementTree import Element, tostring

Content = Element | str | None


def tag(name: str, /, *content: Content | Iterable[Content], **attributes: str) -> Element:
    """Makes `<name attributes>content</name>`. None and empty text add nothing; `class_` becomes "class", "_" "-"."""
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


def section(name: str, title: str, *content: Content) -> Element:
    return tag("section", tag("h2", title), content, id=name)


def key(kind: str, text: str) -> Element:
    """Makes one entry of a legend."""
    return tag("span", text, class_=f"key {kind}")


def pair(name: str, *value: Content) -> Element:
    return tag("tr", tag("th", name, scope="row"), tag("td", value))


def aside(text: str) -> Element | None:
    """Makes a remark in a weaker colour; None for an empty text."""
    return tag("span", text, class_="where") if text else None


def figure(caption: str, drawing: Element, *more: Content) -> Element:
    return tag("figure", tag("figcaption", caption), more, drawing)


def lines_of(text: str, label: str, kind: str = "") -> Element:
    """Shows lines as they were printed. The keyboard can scroll them; `label` names them for screen readers."""
    return tag("pre", text, class_=f"lines {kind}".rstrip(), tabindex="0", role="region", aria_label=label)


def table(
    heads: Sequence[str],
    rows: Sequence[Element],
    right: Sequence[int] = (),
    apart: Sequence[int] = (),
    wide: Sequence[int] = (),
    class_: str = "",
) -> Element:
    """Makes a table. `right`, `apart`, `wide`: the indices of the columns with these classes."""
    columns = {"right": right, "apart": apart, "wide": wide}
    classes = [" ".join(name for name, indices in columns.items() if at in indices) for at in range(len(heads))]
    cells = (
        tag("th", head, scope="col", **({"class": kind} if kind else {})) if head else tag("td")
        for head, kind in zip(heads, classes, strict=True)
    )
    return tag("table", tag("thead", tag("tr", cells)), tag("tbody", rows), **({"class": class_} if class_ else {}))
