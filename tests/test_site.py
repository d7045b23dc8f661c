"""The static site, the colours of the figures, and the ways to open the notebooks elsewhere."""

import ast
import json
import re
import subprocess
import sys
from itertools import combinations

import check_site
import make_site
import matplotlib as mpl
import nbformat
import numpy as np
import pandas as pd
import publish
import pytest
import yaml
from clone import clone, environment
from conftest import ROOT
from nbformat.v4 import new_code_cell, new_markdown_cell, new_output

NOTEBOOKS = sorted((ROOT / "notebooks").glob("[0-9A][0-9]*.ipynb"))


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site of the notebooks as they are committed, with the results of course."""
    copy = clone(tmp_path_factory.mktemp("site") / "copy")
    paths = [copy, *filter(None, sys.path)]  # lmd_utils of the copy
    done = subprocess.run(
        [sys.executable, "tools/make_site.py", "course", "site"],
        cwd=copy, env=environment(PYTHONPATH=":".join(map(str, paths)), REPOSITORY="some/one"),
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return copy / "site"


@pytest.fixture(scope="module")
def pages(site):
    return check_site.pages_of(site)


def test_the_site_has_no_fault(site):
    assert list(check_site.problems(site)) == []


def test_every_notebook_has_a_page_with_its_neighbours(pages):
    names = [f"{path.stem}.html" for path in NOTEBOOKS]
    for at, name in enumerate(names):
        nav = pages[name].find("nav")
        previous, following = (nav.find("a", rel=rel) for rel in ("prev", "next"))
        assert (previous and previous["href"]) == (names[at - 1] if at else None)
        assert (following and following["href"]) == (names[at + 1] if at + 1 < len(names) else None)
        assert {"index.html", "results.html"} <= {a["href"] for a in nav.find_all("a")}
        assert pages["index.html"].find("a", href=name)


def test_every_formula_is_mathml(pages):
    for path in NOTEBOOKS:
        cells = nbformat.read(path, as_version=4).cells
        text = "\n\n".join(c.source for c in cells if c.cell_type == "markdown")
        text = re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.DOTALL)
        formulas = re.findall(r"\$\$.+?\$\$|(?<![\\$])\$[^$\n]+?\$", text, re.DOTALL)
        assert len(pages[f"{path.stem}.html"].find_all("math")) == len(formulas), path.stem


def test_every_picture_of_the_notebooks_is_there_with_its_text(site, pages):
    for path in NOTEBOOKS:
        cells = nbformat.read(path, as_version=4).cells
        outputs = [o for c in cells for o in c.get("outputs", [])]
        count = sum("image/png" in o.get("data", {}) for o in outputs)
        shown = pages[f"{path.stem}.html"].select(".output_png img")
        assert len(shown) == count
        assert all((site / tag["src"]).read_bytes()[:4] == b"\x89PNG" for tag in shown)


def test_the_page_of_results_has_every_table_and_figure(pages):
    soup = pages["results.html"]
    captions = [caption.get_text() for caption in soup.find_all("caption")]
    assert captions == [caption for caption, _ in publish.tables("course").values()]
    shown = {tag["src"] for tag in soup.find_all("img")}
    stems = {p.stem for p in (ROOT / "figures/course").glob("*.pdf")}
    assert shown == {f"files/figures/course/{stem}.png" for stem in stems}
    scores = pd.read_csv(ROOT / "data/results/course/scores.csv")
    best = scores[(scores["T"] == 128) & (scores["split"] == "test") & (scores["kind"] == "group")]
    table = soup.find("h3", id="groups_t128").find_next("table")
    rows = {tr.th.get_text(): tr.find_all("td")[3].get_text() for tr in table.tbody.find_all("tr")}
    for row in best.itertuples():
        assert rows[row.target].rstrip("†") == f"{row.r2:.3f}"


def test_the_search_knows_every_page(site, pages):
    text = (site / "search-index.js").read_text(encoding="utf-8")
    index = json.loads(text.removeprefix("const INDEX = ").rstrip(";\n"))
    assert {entry[0].partition("#")[0] for entry in index} >= pages.keys() - {"index.html"}
    assert any("stretch, turn and shear" in entry[3] for entry in index)


def test_elsewhere_is_linked_only_where_it_is_known(pages):
    links = [a["href"] for a in pages["index.html"].find_all("a", href=re.compile("^https"))]
    assert [link.split("/")[2] for link in links] == ["mybinder.org", "colab.research.google.com"]
    assert all("some/one" in link for link in links)


@pytest.fixture(scope="module")
def alone(site, tmp_path_factory):
    """(name of a page, what is told of it where no other page is)."""
    name, folder = "10_your_models.html", tmp_path_factory.mktemp("alone")
    (folder / name).write_text((site / name).read_text(encoding="utf-8"), encoding="utf-8")
    return name, list(check_site.problems(folder))


def change(text, old, new):
    assert old in text
    return text.replace(old, new, 1)


@pytest.mark.parametrize(
    "old, new, fault",
    [
        ('<a href="results.html"', '<a href="result.html"', "broken link: result.html"),
        ('href="#parameters"', 'href="#parameter"', "no such place: #parameter"),
        ("<h2 ", "<h4 ", "a heading of level 4 follows one of level 1"),
        ("<h1 ", "<h2 ", "0 headings of level 1"),
        (
            "</body>",
            '<script src="https://a.example/x.js"></script></body>',
            "elsewhere: https://a",
        ),
        ("</head>", '<link href="//a.example/x.css"></head>', "elsewhere: //a.example/x.css"),
        ("</head>", "<style>p {background: url(x.png)}</style></head>", "a style fetches"),
        ("</main>", "<p>where $x_1$ is small</p></main>", "LaTeX left in the text"),
        ("</main>", r"<p>\frac{1}{2}</p></main>", "LaTeX left in the text"),
        ("</main>", r"<math><mi>\foo</mi></math></main>", "LaTeX left in mathematics"),
        (
            "</main>",
            '<img alt="a picture of a thing" src="missing.png"></main>',
            "missing picture: missing.png",
        ),
        ("</main>", '<p id="parameters"></p></main>', "the id parameters twice"),
        ('lang="en"', "", "no language or no title"),
        ('name="viewport"', "", "no viewport"),
        ("alt=", "old=", "no alternative text"),
    ],
)
def test_each_fault_is_found(site, alone, tmp_path, old, new, fault):
    """Else the test of the whole site could not fail; a page alone lacks those that it links to."""
    name, before = alone
    text = (site / name).read_text(encoding="utf-8")
    (tmp_path / name).write_text(change(text, old, new), encoding="utf-8")
    after = [p for p in check_site.problems(tmp_path) if p.startswith(f"{name}: ")]
    assert sum(fault in p for p in after) > sum(fault in p for p in before)


def test_a_browser_that_is_named_must_be_there(tmp_path):
    command = [sys.executable, "tools/browse_site.py", str(tmp_path)]
    for given, status, said in (
        ("/no/chromium", 1, "browse_site: CHROMIUM=/no/chromium: no such program\n"),
        ("", 0, "browse_site: skipped, no Chromium here; install it or name it: CHROMIUM=path\n"),
    ):
        settings = environment(CHROMIUM=given, PATH=str(tmp_path))
        done = subprocess.run(command, cwd=ROOT, env=settings, capture_output=True, text=True)
        assert (done.returncode, done.stdout + done.stderr) == (status, said)


# --- alternative texts ---------------------------------------------------------------------------


def picture():
    return new_output("display_data", {"image/png": "AAAA", "text/plain": "x"})


def alts(*cells):
    """Alternative texts that the pictures of some cells get; None for those without."""
    figures = {
        "known": {"Alternative text": "A `known` picture."},
        "pairs_T<T>": {"Alternative text": "One T."},
    }
    list(make_site.described(cells, figures))
    return [
        o.metadata.get("image/png", {}).get("alt") for c in cells for o in c.get("outputs", [])
        if "image/png" in o.get("data", {})
    ]  # fmt: skip


def test_a_picture_gets_the_text_of_its_figure_or_the_text_nearby():
    two = 'save(fig, "known")\nsave(fig, f"pairs_T{T:03d}")'
    said = new_output("stream", text="No figure `known` for this profile")
    after = new_markdown_cell("Look.\n\n*Alternative text: bars, rising.* And so on.")
    other = new_markdown_cell("*Alternative text:* A line that falls.\n")
    assert alts(new_code_cell(two, outputs=[picture(), picture()])) == [
        "A known picture.",
        "One T.",
    ]
    assert alts(new_code_cell(two, outputs=[said, picture()])) == ["One T."]
    assert alts(new_code_cell("plt.show()", outputs=[picture()]), after) == ["bars, rising."]
    assert alts(other, new_code_cell("plt.show()", outputs=[picture()])) == ["A line that falls."]
    cells = [new_code_cell("plt.show()", outputs=[picture()], id="first")]
    cells += [new_code_cell("plt.show()", outputs=[picture()]), after]
    assert alts(*cells) == [None, "bars, rising."]
    assert list(make_site.described(cells, {})) == ["first"]


# --- colours -------------------------------------------------------------------------------------

# Machado, Oliveira and Fernandes 2009 (doi 10.1109/TVCG.2009.113), severity 1, on linear RGB.
BLIND = {
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}  # fmt: skip
LEAST = 15  # CIE 1976 distance; two colours side by side are told apart from about 2.3 on
TO_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])


def lab(colours, kind):
    """CIE L*a*b* (D65) of sRGB colours [n, 3] as someone with that colour blindness sees them."""
    rgb = np.asarray(colours, float)
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    if kind:
        linear = np.clip(linear @ np.array(BLIND[kind]).T, 0, 1)
    xyz = linear @ TO_XYZ.T / TO_XYZ.sum(axis=1)
    f = np.where(xyz > (6 / 29) ** 3, np.cbrt(xyz), xyz / (3 * (6 / 29) ** 2) + 4 / 29)
    return np.stack([116 * f[:, 1] - 16, 500 * (f[:, 0] - f[:, 1]), 200 * (f[:, 1] - f[:, 2])], 1)


def nearest(colours, kind):
    """The smallest distance between two of the colours."""
    seen = lab(colours, kind)
    return min(np.linalg.norm(a - b) for a, b in combinations(seen, 2))


def cycle():
    style = mpl.rc_params_from_file(ROOT / "notebooks" / "lmd.mplstyle", use_default_template=False)
    return list(style["axes.prop_cycle"])


@pytest.mark.parametrize("kind", [None, *BLIND])
def test_the_colours_of_the_cycle_stay_apart(kind):
    colours = list(dict.fromkeys(mpl.colors.to_rgb(look["color"]) for look in cycle()))
    assert len(colours) == 7 and nearest(colours, kind) >= LEAST


def test_the_simulation_sees_colours_that_do_not_stay_apart():
    red_green = [mpl.colors.to_rgb(c) for c in ("#c03020", "#508020")]
    assert nearest(red_green, None) > 50 and nearest(red_green, "deuteranopia") < 25
    tab = [mpl.colors.to_rgb(c) for c in mpl.color_sequences["tab10"]]
    assert min(nearest(tab, kind) for kind in BLIND) < LEAST
    np.testing.assert_allclose(
        lab([[1, 1, 1], [0, 0, 0]], None), [[100, 0, 0], [0, 0, 0]], atol=0.01
    )
    np.testing.assert_allclose(lab([[1, 0, 0]], None), [[53.2, 80.1, 67.2]], atol=0.1)  # sRGB red


def test_no_two_lines_share_colour_marker_and_dashes():
    looks = [(look["color"], look["linestyle"]) for look in cycle()]
    assert len(set(looks)) == len(looks) == len({look["marker"] for look in cycle()})


@pytest.mark.parametrize("kind", [None, *BLIND])
def test_the_colours_of_the_heatmaps_grow_lighter(kind):
    lightness = lab(mpl.colormaps["cividis"](np.linspace(0, 1, 32))[:, :3], kind)[:, 0]
    assert (np.diff(lightness) > 0).all()


# --- elsewhere -----------------------------------------------------------------------------------


def test_what_runs_elsewhere_calls_commands_that_exist():
    workflow = yaml.safe_load((ROOT / ".github/workflows/pages.yml").read_text(encoding="utf-8"))
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    lines = [line for step in steps for line in step.get("run", "").splitlines()]
    start = nbformat.read(ROOT / "notebooks/colab/start.ipynb", as_version=4)
    nbformat.validate(start)
    code = "\n".join(c.source for c in start.cells if c.cell_type == "code")
    ast.parse(re.sub(r"^[!%].*$", "", code, flags=re.MULTILINE))
    lines += [line.lstrip("!") for line in code.splitlines()]
    lines += (ROOT / "postBuild").read_text(encoding="utf-8").splitlines()
    makes = [line.split()[1] for line in lines if line.startswith("make ")]
    targets = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[
        1
    ].split()
    assert len(makes) >= 3
    assert all(name in targets or name.startswith("build/models/") for name in makes), makes
    names = re.findall(r"\b(\d\d_\w+)\.ipynb", code)
    assert all((ROOT / "notebooks" / f"{name}.ipynb").is_file() for name in names)
    assert names.index("01_corpus") < names.index("10_your_models"), "which reads its documents"
