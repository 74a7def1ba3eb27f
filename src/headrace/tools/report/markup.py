"""HTML from values: whatever is not markup already is escaped. Left out: what is on a page."""

from html import escape

_VOID = {"input", "meta", "wbr"}


class Markup(str):
    """Text that is HTML."""


def tag(name: str, /, *content: object, **attributes: object) -> Markup:
    """An element.

    Args:
        name: of the element.
        content: markup as it is, anything else as text; None: left out.
        attributes: `class_` is `class`, `aria_label` is `aria-label`; None: left out.
    """
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in _VOID:
        return Markup(f"<{name}{given}>")
    return Markup(f"<{name}{given}>{join(*content)}</{name}>")


def join(*content: object) -> Markup:
    """One after the other."""
    return Markup(
        "".join(
            part if isinstance(part, Markup) else escape(str(part))
            for part in content
            if part is not None
        )
    )
