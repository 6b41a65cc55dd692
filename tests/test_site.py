"""The built site in a real browser: no code is cut off, no page scrolls sideways, and pictures suit their screen."""

from __future__ import annotations

from pathlib import Path

import pytest

import psgd

ROOT = Path(__file__).parent.parent
SITE = ROOT / "site"

#: blocks of code that are wider than the column they are in; output of programs is marked as text, and may scroll
CUT_OFF = """[...document.querySelectorAll("pre > code")]
    .filter(code => code.scrollWidth > code.clientWidth + 1)
    .map(code => Math.ceil(code.scrollWidth - code.clientWidth) + " px: "
        + code.innerText.split("\\n").reduce((a, b) => a.length > b.length ? a : b))"""

SIDEWAYS = """document.documentElement.scrollWidth - document.documentElement.clientWidth"""


def pages() -> list[Path]:
    """Pages of the site, if ``make docs`` has built it from the present sources."""
    newest = max(path.stat().st_mtime for path in (ROOT / "docs").glob("*.md"))
    found = sorted(SITE.glob("*.html"))
    return found if found and min(path.stat().st_mtime for path in found) >= newest else []


@pytest.fixture(scope="module")
def site() -> list[Path]:
    if not (found := pages()):
        pytest.skip("make docs builds the site, and there is none of the present sources")
    return found


def test_no_code_is_cut_off(browser, site):
    found = {}
    for page in site:
        browser.show(page, 1440, "light")
        found |= {page.name: cut} if (cut := browser.evaluate(CUT_OFF)) else {}
    assert found == {}


#: types words into the search box, and returns the titles of the first results
FOUND = """(async () => {
    const input = document.querySelector("[data-md-component=search-query]")
    input.focus()
    input.value = %r
    input.dispatchEvent(new KeyboardEvent("keyup", {bubbles: true}))
    const links = () => [...document.querySelectorAll(".md-search-result__link")]
    for (let waited = 0; waited < 100 && !links().length; waited++) await new Promise(done => setTimeout(done, 100))
    return links().slice(0, 12).map(link => link.querySelector("h1, h2").textContent.trim())
})()"""


@pytest.mark.parametrize(
    ("words", "title"),
    [
        ("learning rate", "The learning rate"),
        ("hyperparameter", "The learning rate"),
        ("warm-up", "Warm-up and decay"),
        ("MPS", "Apple GPUs (MPS)"),
        ("out of memory", "Out of memory"),
    ],
)
def test_pages_are_found_by_the_words_of_users(browser, site, words, title):
    """Also if the site is opened as files, without a server."""
    browser.show(SITE / "index.html", 1440, "light")
    assert title in browser.evaluate(FOUND % words)


@pytest.mark.parametrize("width", [390, 1440])
def test_no_page_scrolls_sideways(browser, site, width):
    found = {}
    for page in site:
        browser.show(page, width, "light")
        found |= {page.name: wider} if (wider := browser.evaluate(SIDEWAYS)) > 0 else {}
    assert found == {}


#: place of each picture on a page, its width, and the width in inches that it was drawn with
PICTURES = """[...document.querySelectorAll(".picture > img")].map(image => {
    const {x, y, width} = image.getBoundingClientRect()
    const inches = parseFloat(image.parentElement.style.getPropertyValue("--inches"))
    return {name: image.getAttribute("src"), x, y, width, inches}
})"""


def test_pictures_can_be_read_on_a_phone(browser, site):
    """They scroll in their own box rather than shrink: eight panels in 358 pixels would have letters of four."""
    small = []
    for page in site:
        browser.show(page, 390, "light")
        small += [one["name"] for one in browser.evaluate(PICTURES) if one["width"] < 60 * one["inches"]]
    assert small == []


@pytest.mark.parametrize("name", ["index.html", "method.html", "results.html", "architecture.html"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pictures_have_the_ground_of_the_page(browser, site, tmp_path, name, scheme):
    browser.show(SITE / name, 1440, scheme)
    browser.evaluate("localStorage.clear()")  # the scheme of the page before
    browser.show(SITE / name, 1440, scheme)
    y = "document.querySelector('.picture').scrollIntoView({block: 'center'})"
    browser.evaluate(f"{y}, new Promise(done => setTimeout(done, 300))")
    picture = browser.evaluate(PICTURES)[0]
    x, y = int(picture["x"]), int(picture["y"])
    pixels = browser.screenshot(tmp_path / "page.png")[..., :3]
    outside, inside = pixels[y + 40, x - 6], pixels[y + 2, x + 2]
    assert (outside < 0.2).all() if scheme == "dark" else (outside > 0.95).all()
    assert abs(inside - outside).max() < 0.06
    drawn = pixels[y : y + 200, x : x + 400]
    assert drawn.max() > 0.6
    assert drawn.min() < 0.4


def test_the_version_is_shown_and_the_report_leads_back(browser, site):
    browser.show(SITE / "index.html", 1440, "light")
    assert psgd.__version__ in browser.evaluate("document.querySelector('.md-header').textContent")
    browser.show(SITE / "results" / "report.html", 1440, "light")
    assert browser.evaluate("document.querySelector('header a').href") == (SITE / "results.html").as_uri()
