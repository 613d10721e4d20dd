"""The preview as a page: whatever a row holds stays text, nothing is fetched, and a browser shows it on any screen."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

from finetune.cli import main
from finetune.data_preview.page import MOST_PIECES
from tests.test_data_preview import chat, write_recipe
from tests.tiny import tiny_llama

HOSTILE = "</span></p><script>document.title='taken'</script><img src=x onerror=alert(1)> {{ 7 * 7 }} & \x1b[31m\u202e"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    model = tiny_llama(folder / "model")
    rows = [chat(HOSTILE, f"so {HOSTILE}"), chat("a long one", "word " * 60), chat("a long one", "word " * 60)]
    held = folder / "held <b>.jsonl"
    held.write_text(json.dumps(rows[0]))
    recipe = write_recipe(folder, model, rows, stage=f', max_seq_length: 512, eval_data: [{{path: "{held}"}}]')
    recipe.write_text(recipe.read_text().replace(", max_seq_length: 64", ""))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FINETUNE_CACHE", str(folder / "cache"))
        assert main(["data", str(recipe), "--html", str(folder / "page.html"), "--rows", "3"]) == 0
        assert main(["data", str(recipe), "--html", str(folder / "page.html"), "--rows", "3"]) == 0, (
            "a page is replaced"
        )
    return folder / "page.html"


class Reader(HTMLParser):
    """The tags that open and close, each tag's attributes, and the text of the tokens."""

    EMPTY = frozenset({"meta", "br", "line", "rect", "img", "link"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: dict[str, list[dict[str, str | None]]] = {}
        self.tokens: list[str] = []
        self._in_tokens = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.setdefault(tag, []).append(dict(attrs))
        if tag not in self.EMPTY:
            self.open.append(tag)
        if dict(attrs).get("class") == "tokens":
            self._in_tokens = len(self.open)
            self.tokens.append("")

    def handle_endtag(self, tag: str) -> None:
        if tag in self.EMPTY:
            return
        assert self.open.pop() == tag
        if len(self.open) < self._in_tokens:
            self._in_tokens = 0

    def handle_data(self, data: str) -> None:
        if self._in_tokens:
            self.tokens[-1] += data


def read(page: Path) -> Reader:
    reader = Reader()
    reader.feed(page.read_text(encoding="utf-8"))
    assert reader.open == []
    return reader


def test_what_rows_hold_stays_text(page: Path) -> None:
    reader = read(page)
    assert "script" not in reader.tags
    assert "img" not in reader.tags
    assert "b" in reader.tags, "of our own; a file's name adds none"
    assert all(found.get("class") != "x" for found in reader.tags["span"])
    shown = next(text for text in reader.tokens if "taken" in text)
    assert (
        "<script>document.title='taken'</script><img src=x onerror=alert(1)> {{ 7 * 7 }} & <U+001B>[31m<U+202E>"
        in shown
    )
    assert "\x1b" not in page.read_text(encoding="utf-8")


def test_nothing_is_fetched(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    reader = read(page)
    assert not {"link", "script", "iframe", "object", "image", "use"} & reader.tags.keys()
    assert not any({"src", "href", "srcset"} & found.keys() for tags in reader.tags.values() for found in tags)
    assert not re.search(r"url\(|@import", re.search(r"<style>(.*?)</style>", text, re.S)[1])  # type: ignore[index]
    assert "default-src 'none'" in text


def test_tokens_say_what_they_are(page: Path) -> None:
    spans = [found for found in read(page).tags["span"] if "data-i" in found]
    stops = [found for found in spans if "s" in (found["class"] or "").split()]
    assert len(stops) == 3
    assert all(re.fullmatch(r"\d+ · learnt, stop token", found["data-i"] or "") for found in stops)
    assert any(found["class"] == "t" and "context" in (found["data-i"] or "") for found in spans)
    assert len(spans) < MOST_PIECES


def test_findings_stand_on_the_page(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert "1 of 3 rows are the same as an earlier one" in text
    assert "1 of 1 are training rows" in text
    assert "held &lt;b&gt;.jsonl:1" in text
    assert text.count("<rect") >= 2


@pytest.mark.parametrize("width", [1200, 390])
def test_a_browser_shows_it(page: Path, width: int, tmp_path: Path) -> None:
    """Its text is all there, none of it has run, and nothing reaches over the edge."""
    browser = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if browser is None:
        pytest.skip(f"no browser here: none of {', '.join(BROWSERS)}")
    # The page itself forbids scripts, so one around it measures it.
    inside = page.read_text(encoding="utf-8")
    frame = tmp_path / "frame.html"
    frame.write_text(
        f'<body style="margin:0"><iframe id="f" width="{width}" height="800" srcdoc="{_attribute(inside)}"></iframe>'
        "<script>f.onload = () => { const d = f.contentDocument, e = d.documentElement; "
        "document.title = [e.scrollWidth, e.clientWidth, d.title, d.querySelectorAll('article').length, "
        "d.defaultView.getComputedStyle(d.querySelector('.t.l')).backgroundColor].join('|') }</script>",
        encoding="utf-8",
    )
    options = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--virtual-time-budget=5000",
        f"--user-data-dir={tmp_path}/x",
    ]
    done = subprocess.run(
        [browser, *options, "--dump-dom", frame.as_uri()], capture_output=True, text=True, timeout=120
    )
    title = re.search(r"<title>(.*?)</title>", done.stdout.split("<iframe")[0])
    assert title is not None, done.stderr[-2000:]
    scroll_width, client_width, name, articles, background = title[1].split("|")
    assert int(scroll_width) <= int(client_width)
    assert (name, articles) == ("x: the data of sft", "3")
    assert background not in ("rgba(0, 0, 0, 0)", "transparent")


def _attribute(text: str) -> str:
    return text.replace("&", "&amp;").replace('"', "&quot;")
