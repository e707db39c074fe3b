"""Builds the page as one HTML file, with its modules joined into one script, style, icon and data.

The file's `Content-Security-Policy` has the hashes of that script and that style, so nothing else
runs or is loaded, whatever the data contains.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import quote

STATIC = Path(__file__).parent / "static"
_ENTRY = "main.js"
PAGE_DATA = b'<script type="application/json" id="data">'
"""What stands before the data of a page in one file."""
_ICON = '<link rel="icon" href="static/icon.svg">'
_STYLE = '<link rel="stylesheet" href="static/style.css">'
_SCRIPT = f'<script type="module" src="static/{_ENTRY}"></script>'
_IMPORT = re.compile(
    r'^import\s+(?:\{(?P<names>[^}]*)\}|\*\s+as\s+(?P<all>\w+))\s+from\s+"\./(?P<file>[^"]+)";$',
    re.MULTILINE,
)
_EXPORT = re.compile(r"^export (?=(?:async )?(?:function|const|class) (?P<name>\w+))", re.MULTILINE)
_LEFT = re.compile(r"^\s*(?:import|export)\b.*|\bimport\s*[.(].*", re.MULTILINE)
_ENDS_SCRIPT = re.compile(r"</script|<!--|<script", re.IGNORECASE)


def page_with(data: bytes) -> str:
    """Return the page as one HTML file with `data`, which is JSON, inside."""
    sources = {path.name: path.read_text(encoding="utf-8") for path in STATIC.glob("*.js")}
    script = join_modules(sources, _ENTRY)
    style = (STATIC / "style.css").read_text(encoding="utf-8")
    icon = quote((STATIC / "icon.svg").read_text(encoding="utf-8").strip())
    # "<!--<script" in a script would make HTML look for two ends.
    if _ENDS_SCRIPT.search(script) or "</style" in style.lower():
        raise ValueError("the page's own script or style has a tag that would end it in HTML.")
    policy = "; ".join(
        (
            "default-src 'none'",
            f"script-src '{_hash(script)}'",
            f"style-src '{_hash(style)}'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
            "require-trusted-types-for 'script'",
            "trusted-types 'none'",
        )
    )
    page = (STATIC / "index.html").read_text(encoding="utf-8")
    for wanted, instead in (
        (_ICON, f'<link rel="icon" href="data:image/svg+xml,{icon}">'),
        (_STYLE, f"<style>{style}</style>"),
        (_SCRIPT, f'<script type="module">{script}</script>'),
        (
            '<meta charset="utf-8">',
            '<meta charset="utf-8">\n'
            f'    <meta http-equiv="Content-Security-Policy" content="{policy}">',
        ),
        (
            "  </body>",
            f"    {PAGE_DATA.decode()}{escaped(data)}</script>\n  </body>",
        ),
    ):
        before, found, after = page.partition(wanted)
        if not found:
            raise ValueError(f"index.html has no {wanted!r}, so the page cannot be one file.")
        page = before + instead + after
    return page


def escaped(data: bytes) -> str:
    r"""Return the same JSON with escapes, so that nothing in it ends a `<script>` element.

    >>> escaped(b'["</script><!--", "a & b"]')
    '["\\u003c/script\\u003e\\u003c!--", "a \\u0026 b"]'
    """
    text = data.decode()
    # HTML ends a script at "</script" wherever it occurs; JSON has these escapes. The last two
    # characters end a line in JavaScript, but not in JSON.
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def join_modules(sources: Mapping[str, str], entry: str) -> str:
    """Return modules as one script, in which each is a function that returns its exports.

    Modules import from files in the same folder, by name or all (`import * as`), and export
    functions, constants and classes where they are defined.

    Raises:
        ValueError: a file is missing, imports are circular, or an import or export has a different
            form.
    """
    joined: dict[str, str] = {}
    open_: list[str] = []

    def join(name: str) -> None:
        if name in joined:
            return
        if name in open_:
            raise ValueError(f"modules import each other: {' > '.join([*open_, name])}.")
        if name not in sources:
            raise ValueError(f"{open_[-1] if open_ else 'the page'} imports {name}: no such file.")
        open_.append(name)
        for found in _IMPORT.finditer(sources[name]):
            join(found["file"])
        open_.pop()
        joined[name] = _as_function(name, sources[name])

    join(entry)
    if len({_variable(name) for name in joined}) != len(joined):
        raise ValueError(f"two modules have one name: {', '.join(joined)}.")
    return "".join(joined.values())


def _as_function(name: str, source: str) -> str:
    # A function keeps the names of a module private, as in a module. Modules themselves would need
    # a server, since browsers do not load them from disk.
    exported = [found["name"] for found in _EXPORT.finditer(source)]
    body = _IMPORT.sub(_import, _EXPORT.sub("", source))
    left = _LEFT.search(body)
    if left is not None:
        raise ValueError(f"{name}: {left[0].strip()!r} is of a form that cannot be joined.")
    given = f"return {{ {', '.join(exported)} }};\n" if exported else ""
    return f"const {_variable(name)} = (() => {{\n{body}{given}}})();\n"


def _import(match: re.Match[str]) -> str:
    source = _variable(match["file"])
    if match["all"]:
        return f"const {match['all']} = {source};"
    names = " ".join(match["names"].split()).replace(" as ", ": ")
    return f"const {{ {names} }} = {source};"


def _variable(name: str) -> str:
    return "module_" + re.sub(r"\W", "_", name)


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
