from __future__ import annotations

import base64
import copy
import json
import os
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import unquote

import pytest
from matplotlib.figure import Figure

from psgd.experiments import report

RUN = {"label": "preconditioner 3, step size 0.02", "seed": 1, "settings": {"step size": 0.02}, "seconds": 12.34}
SEEDS = [{"seed": seed, "holds": seed < 4, "measured": f"ISI 0.03{seed}"} for seed in range(5)]
CLAIM = {
    "name": "c3_reaches_the_floor",
    "text": "Criterion 3 reaches the noise floor.",
    "source": "paper",
    "holds": True,
    "measured": "ISI 0.0286 in the median",
    "note": "",
    "seeds": SEEDS,
}
FAILS = {
    **CLAIM,
    "name": "sgd_is_slow",
    "holds": False,
    "source": "ours",
    "note": "The channel is another one.",
    "seeds": [],
}
RESULT = {
    "name": "fig3",
    "title": "Blind equalization",
    "about": "Interference of a blind equalizer.",
    "size": "full",
    "claims": [CLAIM, FAILS],
    "tables": [{"caption": "At the end", "columns": ["optimizer", "ISI"], "rows": [["SGD", "0.31"], ["PSGD", "0.03"]]}],
    "settings": {"mini-batches": 10000, "normalized": True, "rate": 0.01},
    "runs": [RUN, {**RUN, "seed": 2, "settings": {"momentum": 0.9}}],
    "seeds": [0, 1, 2, 3, 4],
    "versions": {"psgd": "0.1.0", "torch": "2.13.0"},
    "machine": {"processor": "Abacus 9", "cores": 2, "device": "cpu"},
    "seconds": 123.4,
    "finished": "2026-11-15T12:00:00Z",
}


def leave(directory: Path, name: str = "fig3", picture: bytes | None = b"a picture", **changes: Any) -> None:
    """What `psgd reproduce` leaves behind for one figure."""
    directory.mkdir(exist_ok=True)
    (directory / f"{name}.json").write_text(json.dumps({**RESULT, "name": name, **changes}), encoding="utf-8")
    if picture is not None:
        (directory / f"{name}.png").write_bytes(picture)


class Page(HTMLParser):
    """The elements of a page with their attributes, and its visible text; fails where tags are not closed in order."""

    EMPTY: ClassVar = {"meta", "link", "img"}

    def __init__(self, source: str) -> None:
        super().__init__()
        self.source = source
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self._open: list[str] = []
        self._texts: list[str] = []
        self.feed(source)
        self.close()
        assert self._open == []
        self.text = " ".join(" ".join(self._texts).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in self.EMPTY:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self._open:
            self._texts.append(data)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


def written(directory: Path) -> Page:
    return Page(report.write(directory).read_text(encoding="utf-8"))


# ---------------------------------------------------------------- what the page says


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Page:
    directory = tmp_path_factory.mktemp("results")
    leave(directory)
    leave(directory, "complexity", title="Cost of a step", claims=[CLAIM], tables=[], seconds=3600)
    return written(directory)


def test_the_page_is_written_beside_the_results(tmp_path):
    leave(tmp_path)
    assert report.write(tmp_path) == tmp_path / "report.html"
    assert {path.name for path in tmp_path.iterdir()} == {"fig3.json", "fig3.png", "report.html"}


def test_the_top_says_how_many_claims_hold_and_where_they_were_tested(page):
    assert page.text.count(report.TITLE) == 2  # the window's title, and the heading
    assert "2 of 3 claims hold: 2 of 2 of the paper's, 0 of 1 of our own." in page.text
    assert (
        "Size: full. Run on Abacus 9 (2 cores, device cpu) with psgd 0.1.0, torch 2.13.0. "
        "Computing time: 1 h 2 min in all." in page.text
    )


def test_claims_of_our_own_are_counted_apart_only_where_there_are_any(tmp_path):
    leave(tmp_path, claims=[CLAIM])
    assert "1 of 1 claims hold." in written(tmp_path).text


def test_different_sizes_and_machines_are_all_named(tmp_path):
    leave(tmp_path, "fig1")
    leave(tmp_path, "fig2", size="quick", machine={"processor": "Loom", "cores": 1, "device": "cuda"})
    text = written(tmp_path).text
    assert "Size: full and quick." in text
    assert "Abacus 9 (2 cores, device cpu) with psgd 0.1.0, torch 2.13.0 and Loom (1 core, device cuda) with" in text


def test_the_overview_leads_to_the_sections(page):
    overview = page.text.partition("Overview")[2]
    assert overview.startswith(
        " Experiment Claims that hold Run Figure 3: Blind equalization ✗ 1 of 2 full, 2 min 3 s "
        "Cost of a step ✓ 1 of 1 full, 1 h 0 min"
    )
    links = [link["href"] for link in page.all("a")]
    assert links[:2] == ["#fig3", "#complexity"]
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert {f"#{name}" for name in ids} >= set(links)


def test_a_section_says_what_is_shown_and_how_it_was_run(page):
    assert (
        "Figure 3: Blind equalization Size: full. Seeds: 0, 1, 2, 3, 4. "
        "Computing time: 2 min 3 s; written 2026-11-15 12:00:00 UTC . "
        "Interference of a blind equalizer." in page.text
    )


def test_figures_made_on_several_machines(tmp_path):
    machine = {"processor": "Abacus 9 and Loom", "cores": "2 and 4", "device": "cpu"}
    leave(tmp_path, machine=machine, finished="2026-11-15T12:00:00+00:00")
    text = written(tmp_path).text
    assert "Run on Abacus 9 and Loom (2 and 4 cores, device cpu) with" in text
    assert "written 2026-11-15 12:00:00 UTC ." in text


def test_pictures_are_part_of_the_page(page):
    data = base64.b64encode(b"a picture").decode()
    for picture, title in zip(page.all("img"), ("Figure 3: Blind equalization", "Cost of a step"), strict=True):
        assert picture["src"] == f"data:image/png;base64,{data}"
        assert picture["alt"] == f"Plots of {title}"


def test_claims_stand_beside_what_was_measured(page):
    claim = "The paper's claim Criterion 3 reaches the noise floor. c3_reaches_the_floor "
    assert claim + "Measured ✓ holds ISI 0.0286 in the median Holds on 4 of 5 seeds Seed Verdict Measured" in page.text
    assert "0 ✓ holds ISI 0.030 1 ✓ holds ISI 0.031" in page.text
    assert "4 ✗ does not hold ISI 0.034" in page.text


def test_our_own_claims_failures_and_notes_are_marked(page):
    claim = "Our own claim Criterion 3 reaches the noise floor. sgd_is_slow "
    failure = "Measured ✗ does not hold ISI 0.0286 in the median The channel is another one. Tables"
    assert claim + failure in page.text


def test_tables_settings_and_runs(page):
    assert "Tables At the end optimizer ISI SGD 0.31 PSGD 0.03" in page.text
    assert "Common to all runs Setting Value mini-batches 10,000 normalized yes rate 0.01" in page.text
    runs = "Runs Run Seed step size momentum Seconds"
    label = RUN["label"]
    assert "Settings and 2 runs Run on Abacus 9 (2 cores, device cpu) with psgd 0.1.0, torch 2.13.0. C" in page.text
    assert f"{runs} {label} 1 0.02 12.3 {label} 2 0.9 12.3" in page.text


def test_numbers_are_aligned_to_the_right(page):
    assert '<td class="number">0.31</td>' in page.source
    assert '<th scope="col" class="number">ISI</th>' in page.source
    assert '<th scope="row">SGD</th>' in page.source


def test_a_table_with_odd_rows_is_shown_as_far_as_it_goes(tmp_path):
    table = {"caption": "odd", "columns": ["a", "b"], "rows": [["1"], [], ["2", "3", "more"]]}
    empty = {"caption": "empty", "columns": [], "rows": []}
    leave(tmp_path, tables=[table, empty])
    assert "odd a b 1 2 3 more empty" in written(tmp_path).text


def test_nothing_is_said_about_what_is_not_there(tmp_path):
    leave(tmp_path, claims=[], tables=[], runs=[], settings={})
    text = written(tmp_path).text
    assert "Claims and measurements" not in text
    assert "Tables" not in text
    assert "0 of 0 claims hold." in text
    assert "no claims" in text
    assert "Settings and 0 runs" in text


def test_the_order_is_that_of_the_paper(tmp_path):
    names = ["fig1", "fig2", "fig9", "complexity", "rnn-suite", "another", "fig10"]
    for name in sorted(names):
        leave(tmp_path, name)
    assert [section["id"] for section in written(tmp_path).all("section")] == ["overview", *names]


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.04, "0.0 s"),
        (59.94, "59.9 s"),
        (59.96, "1 min 0 s"),
        (3599.4, "59 min 59 s"),
        (3599.6, "1 h 0 min"),
        (7265, "2 h 1 min"),
    ],
)
def test_times_are_readable(tmp_path, seconds, words):
    leave(tmp_path, seconds=seconds)
    assert f"full, {words} Figure 3" in written(tmp_path).text


def test_the_same_results_give_the_same_bytes(tmp_path):
    for name in ("fig2", "fig1"):
        leave(tmp_path, name)
    first = report.write(tmp_path).read_bytes()
    assert report.write(tmp_path).read_bytes() == first
    for name in ("fig1", "fig2"):
        leave(tmp_path / "elsewhere", name)
    assert report.write(tmp_path / "elsewhere").read_bytes() == first


# ---------------------------------------------------------------- text that looks like markup

EVIL = """<script>alert("1")</script> & '$title' ${style} \ud800"""
#: the lone surrogate is no text, and is written as a question mark
SHOWN = EVIL.replace("\ud800", "?")
#: the keys that are given; those of settings and versions are anyone's
KEYS = {*RESULT, *CLAIM, *SEEDS[0], *RUN, *RESULT["tables"][0], *RESULT["machine"]}


def poisoned(value: Any) -> Any:
    """The same value with the evil text at the end of every text in it, but for the empty ones, which are not shown."""
    if isinstance(value, dict):
        return {key if key in KEYS else key + EVIL: poisoned(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [poisoned(entry) for entry in value]
    return value + EVIL if isinstance(value, str) and value not in ("", "ours") else value


def test_everything_is_escaped(tmp_path):
    (tmp_path / "fig3.png").write_bytes(b"a picture")
    pages = []
    for result in (RESULT, poisoned(RESULT)):
        (tmp_path / "fig3.json").write_text(json.dumps(result), encoding="utf-8")
        pages.append(written(tmp_path))
    good, evil = pages
    assert [tag for tag, _ in evil.elements] == [tag for tag, _ in good.elements]
    assert evil.text.count(SHOWN) > 40
    assert evil.text.replace(SHOWN, "") == good.text
    assert evil.all("img")[0]["alt"] == f"Plots of Figure 3: Blind equalization{SHOWN}"


def test_names_are_escaped(tmp_path):
    name = """it's "100%" & more"""
    leave(tmp_path, name)
    page = written(tmp_path)
    assert page.all("section")[1]["id"] == name
    assert unquote(page.all("a")[0]["href"] or "") == f"#{name}"


# ---------------------------------------------------------------- results that are not there, or not results


def test_a_missing_picture_is_said_to_be_missing(tmp_path):
    leave(tmp_path, "fig1", picture=None)
    leave(tmp_path, "fig2", picture=b"")
    leave(tmp_path, "fig3")
    page = written(tmp_path)
    assert len(page.all("img")) == 1
    assert "The picture is missing: fig1.png" in page.text
    assert "The picture is missing: fig2.png" in page.text


@pytest.mark.parametrize("exists", [True, False])
def test_a_folder_without_results_is_refused(tmp_path, exists):
    directory = tmp_path / "results"
    if exists:
        directory.mkdir()
        (directory / "fig1.png").write_bytes(b"a picture")
    with pytest.raises(
        report.ReportError,
        match=rf"^no results in {re.escape(str(directory))}: run psgd reproduce first, or have a .*$",
    ):
        report.write(directory)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe\xff", b'{"title": "\xe4"}'])
def test_what_is_not_json_is_named(tmp_path, content):
    leave(tmp_path, "fig1")
    (tmp_path / "fig2.json").write_bytes(content)
    with pytest.raises(
        report.ReportError, match=r"^\S*fig2\.json is not a result of psgd reproduce: it is not JSON: .+$"
    ):
        report.write(tmp_path)
    assert not (tmp_path / "report.html").exists()


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to every entry that is given."""
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, entry in entries:
        if path[-1:] not in (("settings",), ("versions",)):
            yield (*path, key)
            yield from places(entry, (*path, key))


PLACES = [path for path in places(RESULT) if path != ("name",)]


@pytest.mark.parametrize("path", PLACES, ids=lambda path: ".".join(map(str, path)))
def test_what_lacks_a_key_or_has_another_type_is_named(tmp_path, path):
    *way, last = path
    for wrong in (None, "missing"):
        result: Any = copy.deepcopy(RESULT)
        holder = result
        for key in way:
            holder = holder[key]
        if wrong is None:
            holder[last] = wrong
        elif isinstance(last, str):
            del holder[last]
        else:
            continue
        (tmp_path / "fig3.json").write_text(json.dumps(result), encoding="utf-8")
        with pytest.raises(
            report.ReportError, match=r"^\S*fig3\.json is not a result of psgd reproduce: .+$"
        ) as caught:
            report.write(tmp_path)
        assert [key for key in path if isinstance(key, str)][-1] in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"seeds": [0, True]}, r"seeds\[1\] cannot be true"),
        ({"claims": [{**CLAIM, "holds": 1}]}, r"claims\[0\]\.holds cannot be 1"),
        ({"claims": [{**CLAIM, "seeds": [SEEDS[0], {}]}]}, r"claims\[0\]\.seeds\[1\] has no 'seed'"),
        ({"settings": []}, "settings is not an object"),
        ({"tables": {}}, "tables is not a list"),
    ],
)
def test_it_is_said_where_a_result_is_wrong(tmp_path, changes, words):
    leave(tmp_path, **changes)
    with pytest.raises(report.ReportError, match=f": {words}$"):
        report.write(tmp_path)


def test_a_list_is_not_a_result(tmp_path):
    (tmp_path / "fig1.json").write_text("[]", encoding="utf-8")
    with pytest.raises(report.ReportError, match=r"fig1\.json is not a result of psgd reproduce: it is not an object$"):
        report.write(tmp_path)


def test_a_page_that_cannot_be_finished_leaves_the_old_one(tmp_path, monkeypatch):
    leave(tmp_path)
    path = report.write(tmp_path)
    before = path.read_bytes()
    leave(tmp_path, title="Another")

    def fail(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="no space left"):
        report.write(tmp_path)
    assert path.read_bytes() == before
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["fig3.json", "fig3.png", "report.html"]


# ---------------------------------------------------------------- the page as markup


def test_headings_are_in_order(page):
    levels = [int(tag[1]) for tag, _ in page.elements if re.fullmatch(r"h[1-6]", tag)]
    assert levels == [1, 2, 2, 3, 3, 2, 3]


def test_the_page_is_made_for_everyone(page):
    assert page.all("html") == [{"lang": "en"}]
    assert {"name": "viewport", "content": "width=device-width, initial-scale=1"} in page.all("meta")
    assert all(header["scope"] in ("col", "row") for header in page.all("th"))
    assert all(image["alt"] for image in page.all("img"))
    assert all(len(page.all(tag)) == 1 for tag in ("header", "main", "footer", "h1", "title"))


def test_the_page_needs_nothing_else(page):
    for tag, attributes in page.elements:
        for name in ("src", "href", "srcset", "action"):
            assert (attributes.get(name) or "#").startswith(("#", "data:")), tag
    assert "url(" not in page.source
    assert "@import" not in page.source
    assert "://" not in page.source
    (policy,) = [meta["content"] for meta in page.all("meta") if "http-equiv" in meta]
    assert policy == "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


# ---------------------------------------------------------------- the page in a browser


@pytest.fixture(scope="module")
def real(tmp_path_factory) -> Path:
    """A page with pictures that can be drawn, and with texts and tables that are too long for a phone."""
    directory = tmp_path_factory.mktemp("real")
    figure = Figure(figsize=(9, 5))
    figure.add_subplot().plot([1, 2, 3], [3, 1, 2])
    figure.savefig(directory / "picture.png", dpi=150)
    picture = (directory / "picture.png").read_bytes()
    long = {
        **FAILS,
        "name": "_".join(["a_name_that_cannot_be_broken"] * 5),
        "measured": "12,345.6 s " * 30,
        "seeds": SEEDS,
    }
    wide = {
        "caption": "A caption of some length. " * 6,
        "columns": [f"column {n}" for n in range(20)],
        "rows": [["1.25"] * 20],
    }
    runs = [
        {
            **RUN,
            "label": f"{RUN['label']}, as long as labels get " * 3,
            "settings": {f"setting {n}": n for n in range(9)},
        }
    ]
    for name in ("fig1", "fig3", "complexity"):
        leave(directory, name, picture, claims=[CLAIM, long], tables=[*RESULT["tables"], wide], runs=runs)
    leave(directory, "fig8", picture=None, title="A title, " * 20 + "w" * 80, about="x" * 200)
    return report.write(directory)


OPEN = "document.querySelectorAll('details').forEach(details => { details.open = true })"

#: what sticks out of the page at the right, other than in a box that scrolls
OVERFLOW = """[...document.body.querySelectorAll("*")]
    .filter(element => !element.closest(".scroll") || element.matches(".scroll"))
    .filter(element => element.getBoundingClientRect().right > document.documentElement.clientWidth + 0.5)
    .map(element => element.outerHTML.slice(0, 80))"""

#: text whose contrast is below 4.5, the AA of the Web Content Accessibility Guidelines
FAINT = """(() => {
    const numbers = color => color.match(/[\\d.]+/g).map(Number)
    const linear = part => part <= 0.04045 * 255 ? part / 255 / 12.92 : ((part / 255 + 0.055) / 1.055) ** 2.4
    const light = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b)
    const ground = element => {
        const color = numbers(getComputedStyle(element).backgroundColor)
        return color[3] === 0 ? ground(element.parentElement) : color
    }
    const faint = []
    const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT)
    let seen = 0
    while (walker.nextNode()) {
        const element = walker.currentNode.parentElement
        if (!walker.currentNode.data.trim() || !element.checkVisibility()) continue
        const values = [light(numbers(getComputedStyle(element).color)), light(ground(element))]
        const contrast = (Math.max(...values) + 0.05) / (Math.min(...values) + 0.05)
        if (contrast < 4.5) faint.push(contrast.toFixed(2) + " " + element.outerHTML.slice(0, 80))
        seen += 1
    }
    return {faint, seen}
})()"""

PICTURES = "[...document.images].map(image => image.complete && image.naturalWidth)"


def faults(events: list[dict[str, Any]], path: Path) -> list[dict[str, Any]]:
    """Complaints of the console, and whatever was asked of another place than the page itself."""
    found = []
    for event in events:
        if event["method"] in ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded"):
            found.append(event)
        if event["method"] == "Network.requestWillBeSent":
            url = event["params"]["request"]["url"]
            if url != path.as_uri() and not url.startswith("data:"):
                found.append(event)
    return found


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [375, 1280])
def test_the_page_is_readable(browser, real, tmp_path, width, scheme):
    browser.show(real, width, scheme)
    pixels = browser.screenshot(tmp_path / "top.png")
    assert pixels.shape[1] == width
    corners = pixels[[1, 1, -2], [1, -20, 1], :3]
    assert (corners < 0.15).all() if scheme == "dark" else (corners > 0.95).all()

    browser.evaluate(OPEN)
    assert browser.evaluate("innerWidth") == width
    assert browser.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    assert browser.evaluate(OVERFLOW) == []
    assert browser.evaluate(PICTURES) == [1350] * 3
    text = browser.evaluate(FAINT)
    assert text["faint"] == []
    assert text["seen"] > 200

    x, y = browser.evaluate(
        "document.images[0].scrollIntoView(), (({x, y}) => [x, y])(document.images[0].getBoundingClientRect())"
    )
    pixels = browser.screenshot(tmp_path / "picture.png")[..., :3]
    card, picture = pixels[int(y) + 3, int(x) - 3], pixels[int(y) + 3, int(x) + 3]
    assert (card < 0.15).all() if scheme == "dark" else (card == 1).all()
    assert abs(picture - card).max() < 0.05  # what was white in the picture is the ground
    assert faults(browser.events, real) == []


@pytest.mark.parametrize(("width", "columns"), [(375, 1), (1280, 2)])
def test_claims_are_stacked_where_there_is_no_room(browser, real, width, columns):
    browser.show(real, width, "light")
    boxes = "[...document.querySelectorAll('.claims > li:first-child > div')].map(box => box.getBoundingClientRect().x)"
    assert len(set(browser.evaluate(boxes))) == columns


def test_wide_tables_scroll_in_their_own_box(browser, real):
    browser.show(real, 375, "light")
    box = "document.querySelector('#fig1 > figure:last-of-type .scroll')"
    assert browser.evaluate(f"{box}.querySelectorAll('th[scope=col]').length") == 20
    assert browser.evaluate(f"{box}.scrollWidth") > 2 * browser.evaluate(f"{box}.clientWidth")
    assert browser.evaluate(f"({box}.scrollLeft = 400, {box}.scrollLeft)") == 400
    assert browser.evaluate("scrollX") == 0


@pytest.mark.parametrize("width", [375, 1280])
def test_a_picture_opens_larger_and_closes(browser, real, tmp_path, width):
    browser.show(real, width, "dark")
    size = "(({width, height}) => [width, height])(document.querySelector('.picture').getBoundingClientRect())"
    image = "document.images[0].getBoundingClientRect().width"
    small, before = browser.evaluate(image), browser.evaluate(size)
    browser.evaluate("document.querySelector('.picture a').click()")
    assert browser.evaluate(size) == [width, 800]
    assert browser.evaluate(image) > 1.2 * small
    browser.screenshot(tmp_path / "large.png")
    close = "document.querySelector('.picture .close')"
    assert browser.evaluate(f"{close}.checkVisibility()")
    browser.evaluate(f"{close}.click()")
    assert browser.evaluate(size) == before
    assert browser.evaluate("location.hash") == "#fig1"


def test_the_page_is_printed_black_on_white(browser, real):
    browser.show(real, 1280, "dark", media="print")
    assert browser.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert browser.evaluate(FAINT)["faint"] == []
    assert base64.b64decode(browser("Page.printToPDF")["data"]).startswith(b"%PDF")


def test_faults_would_be_found(browser, tmp_path):
    path = tmp_path / "bad.html"
    path.write_text(
        "<meta name='viewport' content='width=device-width'>"
        "<body style='background: white'><p style='width: 500px; color: #999'>faint<img src='data:,'>"
        "<img src='missing.png'><script>console.error('oh')</script>",
        encoding="utf-8",
    )
    browser.show(path, 375, "light")
    assert len(browser.evaluate(OVERFLOW)) == 1
    assert browser.evaluate("document.documentElement.scrollWidth") > 375
    assert browser.evaluate(PICTURES) == [0, 0]
    assert browser.evaluate(FAINT)["faint"][0].startswith("2.85")
    kinds = {event["method"] for event in faults(browser.events, path)}
    assert kinds >= {"Runtime.consoleAPICalled", "Network.requestWillBeSent", "Log.entryAdded"}
