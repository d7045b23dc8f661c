"""What only a browser can tell of a built site: needs Chromium and the packages of requirements-site.txt.

    python tools/browse_site.py FOLDER [FOLDER FOR PICTURES]

Opens every page from disk at the width of a desktop and of a phone, and reports: requests to
elsewhere, errors of the console, pictures that do not load, mathematics without a size, text whose
contrast is below WCAG 2.1 AA (4.5, or 3 for large text), pages wider than the window, and a search
that finds nothing. Ends with a line, and no fault, where there is no Chromium; CHROMIUM=path names it,
and must be there then.
"""

import os
import shutil
import sys
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
WAIT = 120_000  # milliseconds, for a busy machine
MOST = 12_000  # pixels of a page that a picture shows
WIDTHS = {"desktop": (1280, 900), "phone": (390, 844)}
PICTURES = """() => [...document.images].filter(i => { i.loading = "eager"; return false; })"""
LOADED = """async () => {
  await Promise.all([...document.images].map(i => i.decode().catch(() => null)));
  return [...document.images].filter(i => !i.naturalWidth).map(i => i.getAttribute("src"));
}"""
MATHS = """() => [...document.querySelectorAll("math")].filter(m => {
  const box = m.getBoundingClientRect();
  return m.checkVisibility() && (box.width < 2 || box.height < 2);
}).map(m => m.textContent.slice(0, 60))"""
CONTRAST = """() => {
  const parse = c => (c.match(/[\\d.]+/g) || []).map(Number);
  const light = c => { const [r, g, b] = c.slice(0, 3).map(v => { v /= 255;
    return v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4; });
    return .2126 * r + .7152 * g + .0722 * b; };
  const over = (a, b) => { const t = a.length > 3 ? a[3] : 1;
    return [0, 1, 2].map(i => a[i] * t + b[i] * (1 - t)); };
  const behind = e => { const stack = [];
    for (; e; e = e.parentElement) stack.push(parse(getComputedStyle(e).backgroundColor));
    return stack.reverse().reduce((below, c) => c.length ? over(c, below) : below, [255, 255, 255]); };
  const found = new Set(), walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    const e = walk.currentNode.parentElement, s = getComputedStyle(e);
    if (!walk.currentNode.data.trim() || !e.checkVisibility() || e.closest("script, style")) continue;
    const below = behind(e), a = light(over(parse(s.color), below)), b = light(below);
    const ratio = (Math.max(a, b) + .05) / (Math.min(a, b) + .05);
    const size = parseFloat(s.fontSize), large = size >= 24 || (size >= 18.66 && s.fontWeight >= 700);
    if (ratio < (large ? 3 : 4.5)) found.add(`${ratio.toFixed(2)}: ${e.tagName} ${e.className} `
      + walk.currentNode.data.trim().slice(0, 30));
  }
  return [...found];
}"""
WIDE = "() => document.documentElement.scrollWidth - document.documentElement.clientWidth"


def check(page, file, size, words):
    """Yield the faults of one page at one width; `words` collects what the browser says meanwhile."""
    words.clear()
    page.set_viewport_size({"width": size[0], "height": size[1]})
    page.goto(file.resolve().as_uri(), wait_until="load")
    page.evaluate(PICTURES)
    yield from (f"picture does not load: {src}" for src in page.evaluate(LOADED))
    yield from (f"mathematics without a size: {text}" for text in page.evaluate(MATHS))
    yield from (f"contrast {text}" for text in page.evaluate(CONTRAST))
    if (wider := page.evaluate(WIDE)) > 0:
        yield f"the page is {wider} pixels wider than the window"
    if file.name == "index.html":
        page.fill("#query", "covariance")
        if not page.locator("#found a").count():
            yield "the search finds no section with 'covariance'"
        page.fill("#query", "zzzz")
        if page.locator("#found a").count():
            yield "the search finds sections with 'zzzz'"
        page.fill("#query", "")
    yield from words


def main():
    if len(sys.argv) not in (2, 3):
        sys.exit("usage: python tools/browse_site.py FOLDER [FOLDER FOR PICTURES]")
    given = os.environ.get("CHROMIUM", "").strip()
    chromium = given or next(filter(None, map(shutil.which, NAMES)), None)
    if given and not shutil.which(given):
        sys.exit(f"browse_site: CHROMIUM={given}: no such program")
    if not chromium:
        print("browse_site: skipped, no Chromium here; install it or name it: CHROMIUM=path")
        return
    from playwright.sync_api import sync_playwright

    files = sorted(Path(sys.argv[1]).glob("*.html"))
    if not files:
        sys.exit(f"browse_site: {sys.argv[1]} has no page")
    faults, words = [], []
    with sync_playwright() as play:
        options = ["--no-sandbox"] if hasattr(os, "getuid") and os.getuid() == 0 else []
        browser = play.chromium.launch(executable_path=chromium, args=options)
        page = browser.new_context().new_page()
        page.set_default_timeout(WAIT)
        page.on("console", lambda m: words.append(f"console: {m.text}") if m.type == "error" else 0)
        page.on("pageerror", lambda error: words.append(f"console: {error}"))
        page.on("requestfailed", lambda r: words.append(f"request failed: {r.url}"))
        page.on(
            "request",
            lambda r: (
                0 if r.url.startswith(("file:", "data:")) else words.append(f"request: {r.url}")
            ),
        )
        for file in files:
            for width, size in WIDTHS.items():
                found = dict.fromkeys(check(page, file, size, words))
                faults += [f"{file.name}, {width}: {fault}" for fault in found]
                if len(sys.argv) == 3:
                    height = min(page.evaluate("document.documentElement.scrollHeight"), MOST)
                    path = Path(sys.argv[2], f"{file.stem}-{width}.png")
                    area = {"x": 0, "y": 0, "width": size[0], "height": height}
                    page.screenshot(path=path, full_page=True, clip=area)
        version = browser.version
        browser.close()
    print(*faults, sep="\n", end="\n" if faults else "")
    if faults:
        sys.exit(f"browse_site: {len(faults)} faults")
    print(f"browse_site: {len(files)} pages, desktop and phone, in Chromium {version}: no fault")


if __name__ == "__main__":
    main()
