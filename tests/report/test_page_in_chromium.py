"""Report pages in headless Chromium: drawn without errors or requests, nothing cut off at any width, light and dark."""

from dataclasses import replace

import pytest
from headless_browser import PROGRAM, HeadlessBrowser
from page_runs import hostile, served, trained
from synthetic_timeline import Engine
from test_sweep_report import point, sweep

from llmb.report.page.jobs_index import jobs_index
from llmb.report.page.run_page import run_page
from llmb.report.page.several_page import several_page
from llmb.report.page.sweep_page import sweep_page
from llmb.report.timeline.profile_page import timeline_sections
from llmb.results.job_store import job_row

pytestmark = pytest.mark.skipif(PROGRAM is None, reason="needs Chromium: apt-get install chromium")
WIDTHS = (400, 800, 1600)
CUT_OFF = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
OUTSIDE = """[...document.querySelectorAll('.plot')].filter(plot => {
  const figure = plot.closest('figure').getBoundingClientRect();
  const drawing = plot.querySelector('.main-svg').getBoundingClientRect();
  const texts = [...plot.querySelectorAll('text')].map(text => text.getBoundingClientRect()).filter(box => box.width);
  return drawing.right > figure.right + 1 || drawing.width < 100
    || texts.some(box => box.right > drawing.right + 1 || box.left < drawing.left - 1);
}).map(plot => plot.id)"""
WITHOUT_DATA = (
    "[...document.querySelectorAll('.plot')].filter(p => !p.data.some(t => (t.x || t.q1).length)).map(p => p.id)"
)
MARKS = ".points path, .js-line, .box"
WITHOUT_MARKS = f"[...document.querySelectorAll('.plot')].filter(p => !p.querySelector('{MARKS}')).map(p => p.id)"


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with HeadlessBrowser(tmp_path_factory.mktemp("chromium")) as browser:
        yield browser


def training_page(recipes):
    """Training with hostile texts and the pictures of an out-of-core profile."""
    timelines = timeline_sections(Engine().streams(2), None)
    return run_page(hostile(replace(trained(recipes, ranks=2, profiled=True), timelines=timelines)))


PAGES = {
    "training": training_page,
    "serving": lambda recipes: run_page(served(recipes)),
    "sweep": lambda recipes: sweep_page(sweep(*(point(load, variant=f"v{load % 2}<b>") for load in (1, 2, 4, 8, 16)))),
    "several": lambda recipes: several_page([trained(recipes), trained(recipes, label="L3"), served(recipes)]),
}


@pytest.mark.parametrize("name", PAGES)
def test_a_page_draws_all_charts_at_every_width(browser, recipes, tmp_path, name):
    page = tmp_path / "page.html"
    page.write_text(PAGES[name](recipes))
    page_load = browser.open(page, width=WIDTHS[0])
    assert page_load.problems == []
    assert page_load.requests == []
    assert browser.evaluate("document.title") != "owned"
    assert int(browser.evaluate("document.documentElement.dataset.charts")) >= 4
    assert browser.evaluate(WITHOUT_DATA) == []
    assert browser.evaluate(WITHOUT_MARKS) == []
    for width in WIDTHS:
        browser.resize(width)
        assert browser.evaluate(CUT_OFF) <= 0, width
        assert browser.evaluate(OUTSIDE) == [], width
    assert browser.page_load.problems == []


def test_charts_follow_a_change_to_dark(browser, recipes, tmp_path):
    page = tmp_path / "page.html"
    page.write_text(run_page(trained(recipes)))
    assert browser.open(page).problems == []
    ink = "document.querySelector('.plot').layout.template.layout.font.color"
    assert browser.evaluate(ink) == "#1c2330"
    browser.prefer("dark")
    assert browser.evaluate(f"new Promise(done => setTimeout(() => done({ink}), 200))") == "#e8ebf0"
    assert browser.page_load.problems == []


def test_tables_and_samples_copy_as_tab_separated_text(browser, recipes, tmp_path):
    page = tmp_path / "page.html"
    page.write_text(run_page(trained(recipes, steps=8)))
    browser.open(page)
    browser.evaluate("navigator.clipboard.writeText = text => { window.copied = text; return Promise.resolve(); }; 1")

    def copied(name):
        browser.evaluate(f"document.querySelector('[data-copies={name}]').click()")
        return browser.evaluate("new Promise(done => setTimeout(() => done(window.copied), 100))")

    figures = dict(line.split("\t") for line in copied("figures").splitlines())
    assert figures["steps_done"] == "8"
    assert float(figures["step_time_s.median"]) == pytest.approx(4.2, rel=0.01)
    lines = copied("samples-steps").splitlines()
    assert lines[0].startswith("rank\tstep\tseconds")
    assert len(lines) == 9


def test_the_index_of_runs_sorts_and_filters(browser, recipes, tmp_path):
    config = trained(recipes).config
    times = {"L1": 3.0, "L2": None, "L3": 20.0, "L4": 1.0}
    jobs = [
        job_row(
            config, tmp_path, "local", job_id, 1e9, status="failed" if seconds is None else "ok", step_time_s=seconds
        )
        for job_id, seconds in times.items()
    ]
    page = tmp_path / "runs.html"
    page.write_text(jobs_index([(job, "a b/report.html" if job.job_id == "L1" else None) for job in jobs]))
    assert browser.open(page, width=400).problems == []
    assert browser.evaluate(CUT_OFF) <= 0
    order = "[...document.querySelectorAll('#runs tbody tr')].filter(r => !r.hidden).map(r => r.cells[0].textContent)"
    head = "[...document.querySelectorAll('#runs th')].find(h => h.textContent === 's/step').click()"
    browser.evaluate(head)
    assert browser.evaluate(order) == ["L4", "L1", "L3", "L2"]
    browser.evaluate(head)
    assert browser.evaluate(order) == ["L3", "L1", "L4", "L2"]
    choose = "const s = document.querySelector('[aria-label=status]'); s.value = 'failed';"
    browser.evaluate(f"(() => {{ {choose} s.dispatchEvent(new Event('input')); }})()")
    assert browser.evaluate(order) == ["L2"]
    assert browser.evaluate("document.getElementById('shown').textContent") == "1 of 4 runs"
    assert browser.evaluate("document.querySelector('#runs a').getAttribute('href')") == "a%20b/report.html"
