"""The executed notebooks, the results and the pages of the repository as one static site.

    python tools/make_site.py RUN FOLDER

Every notebook of notebooks/ has a page: as build/RUN/notebooks holds it, or else as it is committed.
Pages that they link to come along, other files of the repository that they link to are copied. What
a page shows lies in FOLDER: nothing is fetched from elsewhere, mathematics is MathML. The variable
REPOSITORY (owner/name on GitHub) adds links to Binder and Colab.
"""

import base64
import html
import json
import os
import re
import shutil
import struct
import sys
from pathlib import Path
from unicodedata import category

import latex2mathml.converter
import nbformat
import publish
from bs4 import BeautifulSoup
from nbconvert.exporters import HTMLExporter
from nbconvert.filters.markdown_mistune import IPythonRenderer, MarkdownWithMath
from parameters import ROOT, all_declared

import lmd_utils as lmd

PAGES = ("README.md", "notebooks/README.md", "figures/FIGURES.md", "data/DATASETS.md")
PAGES += ("CHANGELOG.md", "CONTRIBUTING.md")  # those that are there
ALTERNATIVE = re.compile(r"\*Alternative text:(?:\*[ \t]*(.+)|[ \t]*([^*]+)\*)")
SAVED = re.compile(r'\bsave(?:_figure)?\([^"\n]*?,\s*f?"([^"]+)"\)')
EXTERNAL = re.compile(r"[a-z][a-z0-9+.-]*:|//", re.IGNORECASE)
PRIORITY = ["text/html", "image/svg+xml", "image/png", "image/jpeg", "text/markdown", "text/plain"]


def slug(text):
    """The id of a heading, as GitHub makes it."""
    kept = (
        c for c in text.strip().lower() if c in "-_ " or category(c)[0] in "LM" or c.isdecimal()
    )
    return "".join(kept).replace(" ", "-")


# --- Markdown ------------------------------------------------------------------------------------


class Renderer(IPythonRenderer):
    """nbconvert's, with mathematics as MathML."""

    def block_math(self, body):
        formula = latex2mathml.converter.convert(body.strip(), display="block")
        return (
            f'<span class="formula" tabindex="0">{formula}</span>'  # scrolls where it is too wide
        )

    def inline_math(self, body):
        formula = latex2mathml.converter.convert(body.strip())
        return f'<span class="long" tabindex="0">{formula}</span>' if len(body) > 60 else formula

    def latex_environment(self, name, body):
        return self.block_math(f"\\begin{{{name}}}{body}\\end{{{name}}}")


def render(source):
    return MarkdownWithMath(Renderer(escape=False, exclude_anchor_links=True)).render(source)


def exporter():
    """Gives the body of a notebook's page, and in its resources the style of highlighted code."""
    made = HTMLExporter(
        template_name="basic", config={"NbConvertBase": {"display_data_priority": PRIORITY}}
    )
    made.register_filter("markdown2html", render)
    return made


# --- alternative texts ---------------------------------------------------------------------------


def described(cells, figures):
    """Put an alternative text into the metadata of every picture; yield the ids of cells without.

    It is that of FIGURES.md for a figure whose name the cell saves, or else the next one that the
    text around the cell gives.
    """
    for at, cell in enumerate(cells):
        pictures = [o for o in cell.get("outputs", []) if "image/png" in o.get("data", {})]
        if not pictures:
            continue
        printed = "".join(o.get("text", "") for o in cell["outputs"])
        absent = set(re.findall(r"No figure `([^`]+)`", printed))
        saved = [re.sub(r"\{T:03d\}", "<T>", n) for n in SAVED.findall(cell.source)]
        names = [n for n in dict.fromkeys(saved) if n in figures and n not in absent]
        texts = [figures[n]["Alternative text"] for n in names] or nearby(cells, at)
        for i, picture in enumerate(pictures):
            if not texts:
                yield cell.get("id", str(at))
                continue
            alt = publish.plain(texts[min(i, len(texts) - 1)])
            metadata = picture.setdefault("metadata", nbformat.NotebookNode())
            metadata["image/png"] = nbformat.NotebookNode(alt=alt)


def nearby(cells, at):
    """Alternative texts in the Markdown after the cell `at`, or before it, up to the next picture."""
    for steps in (cells[at + 1 :], cells[at - 1 :: -1] if at else []):
        found = []
        for cell in steps:
            if any("image/png" in o.get("data", {}) for o in cell.get("outputs", [])):
                break
            if cell.cell_type == "markdown":
                found += [(a or b).strip() for a, b in ALTERNATIVE.findall(cell.source)]
        if found:
            return found
    return []


# --- the site ------------------------------------------------------------------------------------


class Site:
    """Pages of one folder; `files` and `todo` are what they have linked to so far."""

    def __init__(self, run, folder):
        self.run, self.folder, self.index, self.faults = run, Path(folder), [], []
        self.figures, self.repository = publish.listed(), os.environ.get("REPOSITORY", "").strip()
        self.exporter, self.style = exporter(), []
        self.notebooks = sorted((ROOT / "notebooks").glob("[0-9A][0-9]*.ipynb"))
        self.default = all_declared()[1]["profile"]
        self.pages = {p.relative_to(ROOT).as_posix(): f"{p.stem}.html" for p in self.notebooks}
        self.todo = [name for name in PAGES if (ROOT / name).is_file()]
        for name in self.todo:
            self.page_of(name)

    def page_of(self, name):
        """The page of a Markdown file of the repository."""
        return self.pages.setdefault(name, name.removesuffix(".md").replace("/", "-") + ".html")

    def target(self, href, source):
        """Where a link of the file `source` leads within the site; None for nowhere."""
        path, _, anchor = href.partition("#")
        if not path:
            return f"#{anchor}"
        file = Path(os.path.normpath(ROOT / Path(source).parent / path))
        name = os.path.relpath(file, ROOT).replace(os.sep, "/")
        anchor = f"#{anchor}" * bool(anchor)
        if name.startswith("..") or file.is_dir():
            return None
        if file.suffix == ".md" and file.is_file() and name not in self.pages:
            self.todo.append(name)
            self.page_of(name)
        if name in self.pages:
            return self.pages[name] + anchor
        if file.is_file():
            kept = self.folder / "files" / name
            kept.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, kept)
            return f"files/{name}"
        self.faults.append(f"{source}: {href} does not exist")
        return None

    def finish(self, body, source, page):
        """Links, pictures, tables and headings of a page's body; (html, [(level, id, text)], its soup)."""
        soup = BeautifulSoup(body, "html.parser")
        for picture in soup.find_all("img"):
            self.picture(picture, source, page)
        for link in soup.find_all("a", href=True):
            if not EXTERNAL.match(link["href"]):
                link["href"] = self.target(link["href"], source)
                if link["href"] is None:
                    link.unwrap()
        for style in soup.find_all("style"):
            style.decompose()
        for table in soup.find_all("table"):
            del table["border"]
            box = soup.new_tag("div", attrs={"class": "wide", "tabindex": "0", "role": "region"})
            box["aria-label"] = "table"
            table.wrap(box)
        for block in soup.find_all("pre"):
            block["tabindex"] = "0"
        headings, seen = [], {}
        for heading in soup.find_all(re.compile("^h[1-6]$")):
            text = heading.get_text()
            name = slug(text)
            seen[name] = seen.get(name, -1) + 1
            heading["id"] = name + f"-{seen[name]}" * bool(seen[name])
            headings.append((int(heading.name[1]), heading["id"], text))
        ids = {heading[1] for heading in headings}
        for link in soup.find_all("a", href=re.compile("^#")):
            if link["href"][1:] not in ids and slug(link["href"][1:]) in ids:
                link["href"] = "#" + slug(link["href"][1:])
        return str(soup), headings, soup

    def picture(self, picture, source, page):
        """A picture of a page: its file in the site, its size, lazily loaded."""
        src = picture["src"]
        if src.startswith("data:image/png;base64,"):
            data = base64.b64decode(src.partition(",")[2])
            number = len(list((self.folder / "images").glob(f"{page}-*.png")))
            name = f"images/{page}-{number:02d}.png"
            (self.folder / "images").mkdir(exist_ok=True)
            (self.folder / name).write_bytes(data)
            picture["src"] = name
        elif EXTERNAL.match(src):  # a badge
            picture.replace_with(picture.get("alt", ""))
            return
        else:
            picture["src"] = self.target(src, source) or src
        file = self.folder / picture["src"]
        if file.suffix == ".png" and file.is_file():
            width, height = struct.unpack(">II", file.read_bytes()[16:24])
            picture["width"], picture["height"] = str(width), str(height)
        picture["loading"] = "lazy"

    def write(self, name, title, body, around=(None, None), note="", source=""):
        """Write the page `name` with its navigation, and remember its words for the search."""
        body, headings, soup = self.finish(body, source or name, name.removesuffix(".html"))
        before, after = around
        links = [f'<a rel="prev" href="{before[0]}">← {before[1]}</a>' if before else ""]
        links += ['<a href="index.html">All pages</a>', '<a href="results.html">Results</a>']
        links += ['<a href="index.html#query">Search</a>']
        links += [f'<a rel="next" href="{after[0]}">{after[1]} →</a>' if after else ""]
        bar = " ".join(filter(None, links))
        inside = [f'<li><a href="#{i}">{html.escape(t)}</a></li>' for n, i, t in headings if n == 2]
        contents = f"<details><summary>On this page</summary><ol>{''.join(inside)}</ol></details>"
        text = f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{html.escape(title)}</title>
<link rel="icon" href="data:,">
<link rel="stylesheet" href="style.css">
</head>
<body>
<a class="skip" href="#content">Skip to the content</a>
<nav aria-label="Pages">{bar}</nav>
<main id="content">
{f'<p class="note">{note}</p>' if note else ""}{contents if len(inside) > 2 else ""}
{body}
</main>
<nav aria-label="Pages, again">{bar}</nav>
{'<script src="search-index.js"></script><script src="search.js"></script>' if name == "index.html" else ""}
</body>
</html>
"""
        (self.folder / name).write_text(text, encoding="utf-8")
        self.remember(name, title, soup)

    def remember(self, name, title, soup):
        """One entry of the search for each section: its text without code and pictures; spends `soup`."""
        for tag in soup.find_all(["pre", "img", "annotation"]):
            tag.decompose()
        at, heading, words = "", title, []
        for part in soup.descendants:
            if part.name in {f"h{i}" for i in range(1, 7)}:
                self.index.append([f"{name}{at}", title, heading, " ".join(words)])
                at, heading, words = f"#{part['id']}", part.get_text(), []
            elif part.name is None and part.strip():
                words.append(" ".join(part.split()))
        self.index.append([f"{name}{at}", title, heading, " ".join(words)])
        self.index = [e for e in self.index if e[3]]

    # --- its pages ---

    def notebook(self, at):
        """(title, question, how it differs from an executed one, body) of a notebook."""
        path = self.notebooks[at]
        executed = ROOT / "build" / self.run / "notebooks" / path.name
        notebook = nbformat.read(executed if executed.is_file() else path, as_version=4)
        if self.run == self.default:  # the values are those of the parameters cell
            notebook.cells = [
                c for c in notebook.cells if "injected-parameters" not in c.metadata.get("tags", [])
            ]
        without = list(described(notebook.cells, self.figures))
        self.faults += [f"{path.name}: a picture of cell {c} has no text" for c in without]
        first = notebook.cells[0].source
        title = re.match(r"# (.+)", first)[1]
        question = re.search(r"^\*\*Question\.\*\* (.+)", first, re.MULTILINE)
        note = ""
        if not executed.is_file() and self.run != self.default:
            note = (
                f"As committed, with the results of the run {self.default}: not part of this run."
            )
        body, resources = self.exporter.from_notebook_node(notebook)
        self.style = resources["inlining"]["css"]
        return title, question[1] if question else "", note, body

    def results(self):
        """The page of all tables and figures."""
        parts = [f"<h1>Results of the run {html.escape(self.run)}</h1><h2>Tables</h2>"]
        for name, (caption, table) in publish.tables(self.run).items():
            parts.append(html_table(name, caption, table))
        folder = ROOT / "data" / "results" / self.run
        links = [
            f'<li><a href="{p.relative_to(ROOT).as_posix()}">{p.name}</a></li>'
            for p in sorted(folder.glob("*.csv"))
        ]
        parts.append(f"<h2>Files</h2><p>All scores, as text:</p><ul>{''.join(links)}</ul>")
        parts.append("<h2>Figures</h2>")
        for stem, fields in publish.drawn(self.run):
            if not fields:
                self.faults.append(f"figures/{self.run}/{stem} is not listed in FIGURES.md")
                continue
            alt, caption = (publish.plain(fields[k]) for k in ("Alternative text", "Caption"))
            src = f"figures/{self.run}/{stem}"
            parts.append(
                f'<figure><h3>{stem}</h3><img src="{src}.png" alt="{html.escape(alt)}">'
                f'<figcaption>{html.escape(caption)} <a href="{src}.pdf">{stem}.pdf</a></figcaption>'
                f"<details><summary>In words</summary><p>{html.escape(alt)}</p></details></figure>"
            )
        return "".join(parts)

    def elsewhere(self):
        """Links that open the notebooks on a machine of someone else's."""
        if not re.fullmatch(r"[\w.\-]+/[\w.\-]+", self.repository):
            return ""
        binder = f"https://mybinder.org/v2/gh/{self.repository}/HEAD?urlpath=lab/tree/notebooks"
        colab = f"https://colab.research.google.com/github/{self.repository}/blob/HEAD"
        return (
            f'<p>Run them without installing anything: <a href="{binder}">Binder</a>, '
            f'<a href="{colab}/notebooks/colab/start.ipynb">Colab</a>.</p>'
        )

    def build(self):
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        here = Path(__file__).parent
        shutil.copyfile(here / "search.js", self.folder / "search.js")
        made = [self.notebook(at) for at in range(len(self.notebooks))]
        style = [(here / "site.css").read_text(encoding="utf-8"), *self.style]
        (self.folder / "style.css").write_text("\n".join(style), encoding="utf-8")
        names = [(p.stem + ".html", title) for p, (title, *_) in zip(self.notebooks, made)]
        for at, (path, (title, _, note, body)) in enumerate(zip(self.notebooks, made)):
            around = names[at - 1] if at else None, names[at + 1] if at + 1 < len(names) else None
            source = path.relative_to(ROOT).as_posix()
            self.write(names[at][0], title, body, around, note, source)
        self.write("results.html", f"Results of {self.run}", self.results(), source="README.md")
        done = set()
        while left := [name for name in self.todo if name not in done]:
            for name in left:
                text = (ROOT / name).read_text(encoding="utf-8")
                title = re.search(r"^# (.+)", text, re.MULTILINE)
                title = publish.plain(title[1]) if title else name
                self.write(self.pages[name], title, render(text), source=name)
                done.add(name)
        self.write("index.html", "Language model decomposition", self.front(names, made, done))
        words = json.dumps(self.index, ensure_ascii=False, separators=(",", ":"))
        (self.folder / "search-index.js").write_text(f"const INDEX = {words};\n", encoding="utf-8")

    def front(self, names, made, pages):
        listed = [
            f'<li><a href="{name}">{html.escape(title)}</a><br>{render(question)[3:-5]}</li>'
            for (name, title), (_, question, *_) in zip(names, made)
        ]
        others = [f'<li><a href="{self.pages[n]}">{n}</a></li>' for n in sorted(pages)]
        links = "".join(listed)
        # hrefs of this page are names of pages already
        self.pages |= {name: name for name, _ in names} | {"results.html": "results.html"}
        self.pages |= {self.pages[n]: self.pages[n] for n in pages}
        return (
            "<h1>Language model decomposition</h1>"
            "<p>How much of one language model is a linear combination of others? The notebooks of this "
            f"repository, as run for the profile or run <code>{html.escape(self.run)}</code>.</p>"
            '<form role="search" onsubmit="return false"><label for="query">Search all pages</label> '
            '<input id="query" type="search" autocomplete="off"></form>'
            '<p id="count" role="status"></p><ul id="found"></ul>'
            f'<h2>Notebooks</h2><ul class="pages">{links}</ul>'
            '<h2>Results</h2><p><a href="results.html">All tables and figures</a>, with captions and '
            f"alternative texts.</p>{self.elsewhere()}<h2>Pages of the repository</h2><ul>{''.join(others)}</ul>"
        )


def html_table(name, caption, table):
    """A table of text with its caption, row and column headings."""
    head = [table.index.name or "", *table.columns]
    cells = "".join(f'<th scope="col">{html.escape(str(c))}</th>' for c in head)
    rows = "".join(
        f'<tr><th scope="row">{html.escape(str(label))}</th>'
        + "".join(f"<td>{html.escape(str(v))}</td>" for v in row)
        + "</tr>"
        for label, row in zip(table.index, table.to_numpy())
    )
    return (
        f"<h3>{html.escape(name)}</h3><table><caption><span>{html.escape(caption)}</span></caption>"
        f"<thead><tr>{cells}</tr></thead><tbody>{rows}</tbody></table>"
    )


def main():
    if len(sys.argv) != 3:
        sys.exit("usage: python tools/make_site.py RUN FOLDER")
    run, folder = sys.argv[1], Path(sys.argv[2])
    with lmd.atomic(folder) as temporary:
        site = Site(run, temporary)
        try:
            site.build()
        except (ValueError, OSError) as error:
            sys.exit(f"make_site: {error}")
        if site.faults:
            sys.exit("make_site: " + "\nmake_site: ".join(dict.fromkeys(site.faults)))
    print(f"{len(list(folder.glob('*.html')))} pages; open {os.path.relpath(folder)}/index.html")


if __name__ == "__main__":
    main()
