"""Faults of a built site, found in its files alone: one line each, non-zero status when there is one.

    python tools/check_site.py FOLDER

Links and their anchors, pictures, alternative texts, headings, names, leftovers of LaTeX, and
whatever a browser would fetch from elsewhere. What only a browser can tell is in browse_site.py.
"""

import re
import sys
from pathlib import Path
from urllib.parse import unquote

from bs4 import BeautifulSoup

EXTERNAL = re.compile(r"[a-z][a-z0-9+.-]*:|//", re.IGNORECASE)
FETCHES = {"img": "src", "script": "src", "iframe": "src", "source": "src", "link": "href"}
FETCHES |= {"video": "src", "audio": "src", "object": "data", "embed": "src"}
LATEX = re.compile(r"\$[^$\d\s][^$]*\$|\\(?:[a-zA-Z]{3,}|[\[\](){}])")
LEAST = 20  # characters of an alternative text


def pages_of(folder):
    return {
        p.name: BeautifulSoup(p.read_text(encoding="utf-8"), "html.parser")
        for p in sorted(Path(folder).glob("*.html"))
    }


def headings(soup):
    levels = [int(tag.name[1]) for tag in soup.find_all(re.compile("^h[1-6]$"))]
    if levels.count(1) != 1:
        yield f"{levels.count(1)} headings of level 1, not one"
    for before, after in zip(levels, levels[1:]):
        if after > before + 1:
            yield f"a heading of level {after} follows one of level {before}"


def links(folder, name, soup, ids):
    for tag in soup.find_all("a", href=True):
        href = tag["href"]
        if EXTERNAL.match(href):
            continue
        path, _, anchor = unquote(href).partition("#")
        path = path or name
        if path not in ids and not (folder / path).is_file():
            yield f"broken link: {href}"
        elif anchor and path in ids and anchor not in ids[path]:
            yield f"no such place: {href}"
        if not tag.get_text().strip():
            yield f"a link without words: {href}"


def problems(folder):
    """One line for each fault of the site in `folder`."""
    folder = Path(folder)
    pages = pages_of(folder)
    if "index.html" not in pages:
        yield "there is no index.html"
    ids = {name: {tag["id"] for tag in soup.find_all(id=True)} for name, soup in pages.items()}
    reached = {"index.html"}
    for name, soup in pages.items():
        found = [*headings(soup), *links(folder, name, soup, ids)]
        reached |= {a["href"].partition("#")[0] for a in soup.find_all("a", href=True)}
        every = [tag["id"] for tag in soup.find_all(id=True)]
        found += [f"the id {i} twice" for i in sorted({i for i in every if every.count(i) > 1})]
        if not soup.html.get("lang") or not soup.title or not soup.title.get_text().strip():
            found.append("no language or no title")
        if not soup.find("meta", attrs={"name": "viewport"}):
            found.append("no viewport: unreadable on a phone")
        for tag in soup.find_all("img"):
            src = tag.get("src", "")
            if not EXTERNAL.match(src) and not (folder / unquote(src)).is_file():
                found.append(f"missing picture: {src}")
            if len(tag.get("alt", "")) < LEAST or "No description" in tag["alt"]:
                found.append(f"no alternative text: {src[:60]}")
        for tag in soup.find_all(list(FETCHES)):
            source = tag.get(FETCHES[tag.name], "")
            if EXTERNAL.match(source) and not source.startswith("data:"):
                found.append(f"fetched from elsewhere: {source}")
        styles = [str(tag.get("style")) for tag in soup.find_all(style=True)]
        styles += [tag.get_text() for tag in soup.find_all("style")]
        found += [f"a style fetches: {s[:60]}" for s in styles if re.search(r"url\(|@import", s)]
        if soup.find("merror"):
            found.append("mathematics that was not understood")
        for tag in soup(["pre", "code", "script", "style", "math"]):
            for left in re.findall(r"\\[a-zA-Z]+", tag.get_text()) if tag.name == "math" else []:
                found.append(f"LaTeX left in mathematics: {left}")
            tag.decompose()
        if left := LATEX.search(soup.get_text(" ")):
            found.append(f"LaTeX left in the text: {left[0][:60]}")
        yield from (f"{name}: {fault}" for fault in dict.fromkeys(found))
    yield from (f"{name}: no page links to it" for name in sorted(pages.keys() - reached))
    for path in sorted(folder.glob("*.css")):
        if re.search(r"url\((?!data:)|@import", path.read_text(encoding="utf-8")):
            yield f"{path.name}: a style fetches something"


def main():
    if len(sys.argv) != 2 or not Path(sys.argv[1]).is_dir():
        sys.exit("usage: python tools/check_site.py FOLDER")
    faults = list(problems(sys.argv[1]))
    print(*faults, sep="\n", end="\n" if faults else "")
    if faults:
        sys.exit(f"check_site: {len(faults)} faults")


if __name__ == "__main__":
    main()
