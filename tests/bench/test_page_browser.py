"""The page of a report in a real browser: what a reader does with mouse, keyboard, phone and in the dark."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from playwright.sync_api import sync_playwright
from tests.bench.small import SMALL, made_run, small_config

from flatmtl_bench.reports import page
from flatmtl_bench.reports.reading import find
from flatmtl_bench.reports.results import tables
from flatmtl_bench.reports.section import Section

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next(filter(None, map(shutil.which, BROWSERS)), None)
QUIET = ("quic", "background-networking", "sync", "component-update")
ARGUMENTS = ["--no-sandbox", "--no-first-run", *(f"--disable-{name}" for name in QUIET)]
METHODS = ("cagrad", "f_cagrad", "mgda", "f_mgda", "nash_mtl", "f_nash_mtl")
pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason=f"NO BROWSER, so the page is not tested: none of {', '.join(BROWSERS)} is installed"
)

CONTRAST = """() => {
  // The contrast ratio of WCAG 2 for each element that has text of its own and is seen.
  const parts = color => color.match(/[\\d.]+/g).map(Number);
  const linear = value => value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
  const light = color => [0.2126, 0.7152, 0.0722].reduce((sum, share, k) => sum + share * linear(color[k] / 255), 0);
  const behind = element => {
    for (; element; element = element.parentElement) {
      const color = parts(getComputedStyle(element).backgroundColor);
      if (color.length === 3 || color[3] > 0) return color;
    }
    return [255, 255, 255];
  };
  const texts = element => [...element.childNodes].filter(node => node.nodeType === Node.TEXT_NODE);
  const said = element => texts(element).some(node => node.textContent.trim());
  const seen = element => element.checkVisibility() && !element.closest("script, option, optgroup");
  return [...document.body.querySelectorAll("*")].filter(said).filter(seen).map(element => {
    const drawn = element instanceof SVGElement;
    const color = parts(getComputedStyle(element)[drawn ? "fill" : "color"]);
    const [high, low] = [light(color), light(behind(element))].sort((a, b) => b - a);
    return [(high + 0.05) / (low + 0.05), drawn, `${element.tagName}: ${element.textContent.slice(0, 40)}`];
  });
}"""
OPEN = "document.querySelectorAll('details').forEach(details => { details.open = true })"
CONTROLS = """[...document.querySelectorAll('a, button, select, input, summary, .wide')].map((element, k) => {
  element.dataset.k = k;
  return String(k);
})"""


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    """A page of two data sets, with six methods of two seeds in the first; a run of one has failed."""
    folder = tmp_path_factory.mktemp("page")
    for k, method in enumerate(METHODS):
        for seed in range(2):
            config = small_config(f"multimnist_{method}", seed=seed, epochs=4)
            made_run(folder, config, [0.3, 0.5, 0.55, 0.6 + 0.03 * ((k * 5) % 7) + 0.01 * seed], conflict=0.1 * k)
    fashion = replace(small_config("multifashion_mgda", epochs=4), data=replace(SMALL, name="multifashion"))
    for seed in range(2):
        made_run(folder, replace(fashion, seed=seed), [0.4, 0.5, 0.6, 0.7])
    failed = made_run(folder, small_config("multimnist_pcgrad", epochs=4), [0.1, 0.2, 0.3, 0.4]) / "summary.json"
    failed.write_text(failed.read_text().replace('"accuracy/left": 0.4', '"accuracy/left": null'))
    fashion, digits = tables(find([folder]).runs)
    made = [Section(table, reason="there is none.") for table in (digits, fashion)]
    file = folder / "report.html"
    file.write_text(page.render(made, finding=["Flat is better."], figures=[Path("figures/conflict.png")]))
    return file.as_uri()


@pytest.fixture(scope="module")
def browser():
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture
def opened(browser, address):
    """A function that opens the page; it fails at the end if the page complained or asked for anything else."""
    contexts, complaints, requests = [], [], []

    def opened(width=1400, scheme="light"):
        contexts.append(browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme))
        tab = contexts[-1].new_page()
        tab.on("console", lambda message: complaints.append(message.text))
        tab.on("pageerror", lambda error: complaints.append(str(error)))
        tab.on("request", lambda request: requests.append(request.url))
        tab.goto(address)
        tab.wait_for_function("[...document.querySelectorAll('.plot')].every(plot => plot.querySelector('.main-svg'))")
        return tab

    yield opened
    for context in contexts:
        context.close()
    assert complaints == []
    assert set(requests) == {address}


def column(tab, index):
    """Return a column of the first table, and how its heading says that it is sorted."""
    cells = tab.locator(".sortable").first.locator(f"tbody tr > :nth-child({index + 1}) > :is(span, strong)")
    state = tab.locator(".sortable").first.locator("thead th").nth(index).get_attribute("aria-sort")
    return cells.all_inner_texts(), state


def heading(tab, index):
    return tab.locator(".sortable").first.locator("thead button").nth(index)


def curves(tab):
    """Return the curves of the first chart as they are drawn: name -> values."""
    found = tab.evaluate("document.querySelector('.plot').data.map(({name, y}) => [name, y])")
    paths = tab.locator(".plot").first.locator(".scatterlayer .trace").count()
    assert paths == len(found)
    return dict(found)


class TestTables:
    @pytest.mark.parametrize("how", ["mouse", "keyboard"])
    def test_a_heading_sorts_up_down_and_back(self, opened, how):
        tab = opened()
        before, state = column(tab, 2)
        assert state == "none"
        known = [text for text in before if "failed" not in text]
        numbers = sorted(known, key=lambda text: float(text.split()[0]))
        for expected, name in ((numbers, "ascending"), (numbers[::-1], "descending"), (None, "none")):
            if how == "mouse":
                heading(tab, 2).click()
            else:
                heading(tab, 2).focus()
                tab.keyboard.press("Enter")
            texts, state = column(tab, 2)
            assert state == name
            if expected is None:
                assert texts == before
            else:
                assert [float(text.split()[0]) for text in texts[:-1]] == [float(text.split()[0]) for text in expected]
                assert texts[-1] == "failed 1/1"

    def test_names_are_sorted_as_texts_and_rows_stay_whole(self, opened):
        tab = opened()
        names, results = column(tab, 0)[0], column(tab, 2)[0]
        heading(tab, 0).click()
        after = column(tab, 0)[0]
        assert after == sorted(names, key=str.casefold)
        assert dict(zip(after, column(tab, 2)[0], strict=True)) == dict(zip(names, results, strict=True))

    def test_one_column_at_a_time_is_the_sorted_one(self, opened):
        tab = opened()
        heading(tab, 0).click()
        heading(tab, 3).click()
        assert (column(tab, 0)[1], column(tab, 3)[1]) == ("none", "ascending")

    def test_notes_are_shown_when_asked_for(self, opened):
        tab = opened()
        notes = tab.locator(".sortable").first.locator("small")
        assert not notes.first.is_visible()
        tab.locator(".notes").first.check()
        assert notes.first.is_visible()
        assert "seeds: " in notes.first.inner_text()

    def test_the_best_of_a_column_stands_out(self, opened):
        strong = opened().locator(".sortable").first.locator("td strong")
        assert strong.count()
        assert int(strong.first.evaluate("e => getComputedStyle(e).fontWeight")) >= 600


class TestCurves:
    def test_there_is_the_mean_of_each_method_and_no_single_run_at_first(self, opened):
        drawn = curves(opened())
        assert drawn["CAGrad"] == pytest.approx([20.0, 40.0, 45.0, 50.5])
        assert {*drawn} == {"CAGrad", "F-CAGrad", "MGDA", "F-MGDA", "Nash-MTL", "F-Nash-MTL", "PCGrad"}

    def test_single_runs_can_be_shown(self, opened):
        tab = opened()
        tab.locator(".single").first.check()
        assert curves(tab)["CAGrad, seed 1"] == pytest.approx([20.0, 40.0, 45.0, 51.0])

    def test_a_method_can_be_hidden_and_shown_again(self, opened):
        tab = opened()
        before = curves(tab)
        tab.get_by_label("F-CAGrad", exact=True).first.uncheck()
        assert curves(tab) == {name: values for name, values in before.items() if name != "F-CAGrad"}
        tab.get_by_label("F-CAGrad", exact=True).first.check()
        assert curves(tab) == before

    def test_a_run_can_be_hidden_and_shown_again_by_keyboard(self, opened):
        tab = opened()
        before = curves(tab)
        method = tab.locator(".chart li").filter(has=tab.get_by_text("CAGrad", exact=True)).first
        method.locator("summary").focus()
        tab.keyboard.press("Enter")
        for key, expected in (
            ("Tab", before["CAGrad"]),
            ("Space", [20.0, 40.0, 45.0, 51.0]),
            ("Space", before["CAGrad"]),
        ):
            tab.keyboard.press(key)
            assert curves(tab)["CAGrad"] == pytest.approx(expected)

    def test_runs_of_a_hidden_method_cannot_be_chosen(self, opened):
        tab = opened()
        tab.locator(".method").first.uncheck()
        assert all(run.is_disabled() for run in tab.locator(".chart li").first.locator(".run").all())

    def test_buttons_choose_forms(self, opened):
        tab = opened()
        for name, expected in (("flat", 3), ("plain", 4), ("none", 0), ("all", 7)):
            tab.locator(f"[data-which={name}]").first.click()
            assert len(curves(tab)) == expected

    def test_another_metric_is_another_curve(self, opened):
        tab = opened()
        tab.locator(".metric").first.select_option(label="training: average loss")
        assert curves(tab)["CAGrad"] == pytest.approx([1.5, 0.75, 0.5, 0.375])
        assert "training: average loss" in tab.locator(".plot").first.get_attribute("aria-label")

    def test_values_are_shown_under_the_mouse(self, opened):
        tab = opened()
        plot = tab.locator(".plot").first
        plot.scroll_into_view_if_needed()
        box = plot.locator(".nsewdrag").first.bounding_box()
        tab.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
        tab.mouse.move(box["x"] + box["width"] - 8, box["y"] + box["height"] / 2)
        tab.wait_for_selector(".hoverlayer .legend")
        assert "50.50%" in tab.locator(".hoverlayer").first.text_content()

    def test_another_scheme_draws_them_in_other_colours(self, opened):
        tab = opened()
        color = "document.querySelector('.plot').data.at(-1).line.color"
        light = tab.evaluate(color)
        tab.emulate_media(color_scheme="dark")
        tab.wait_for_function(f"{color} !== '{light}'")


class TestRuns:
    def test_the_chosen_run_is_shown_in_full(self, opened):
        tab = opened()
        for label in tab.locator("#run option").all_inner_texts()[:3]:
            tab.locator("#run").select_option(label=label)
            recipe, seed = label.split("-")[0], label[-1]
            rows = [text.split("\t") for text in tab.locator("#values tr").all_inner_texts()]
            assert ["recipe", recipe] in rows
            assert ["seed", seed] in rows
            assert ["packages.torch", "2.14.1"] in rows


class TestLegibility:
    @pytest.mark.parametrize("scheme", ["light", "dark"])
    def test_text_stands_out_from_what_is_behind_it(self, opened, scheme):
        tab = opened(scheme=scheme)
        tab.evaluate(OPEN)
        tab.evaluate("document.querySelectorAll('.notes').forEach(d => { d.click() })")
        found = tab.evaluate(CONTRAST)
        assert len([name for _, drawn, name in found if name.startswith("SPAN") and not drawn]) > 30
        assert len([name for _, drawn, name in found if drawn]) > 10  # numbers of the axes
        assert [(round(ratio, 2), name) for ratio, _, name in found if ratio < 4.5] == []

    @pytest.mark.parametrize("width", [360, 768, 1400])
    def test_only_tables_scroll_sideways(self, opened, width):
        tab = opened(width)
        tab.evaluate(OPEN)
        assert tab.evaluate("document.documentElement.scrollWidth") <= width
        assert tab.evaluate("document.querySelector('.plot .main-svg').getBoundingClientRect().right") <= width

    def test_it_is_printed_in_light_colours_without_controls(self, opened):
        tab = opened(scheme="dark")
        tab.emulate_media(media="print")
        assert tab.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(248, 249, 250)"
        assert not tab.locator("fieldset").first.is_visible()
        assert tab.locator(".sortable").first.is_visible()


def test_every_control_is_reached_with_tab_and_shows_that_it_is(opened):
    tab = opened()
    tab.evaluate(OPEN)
    wanted = tab.evaluate(CONTROLS)
    reached = []
    while True:
        tab.keyboard.press("Tab")
        found = tab.evaluate(
            "[document.activeElement.dataset.k, getComputedStyle(document.activeElement).outlineStyle]"
        )
        if found[0] is None or found[0] in [k for k, _ in reached]:
            break
        reached.append(found)
    assert [k for k, _ in reached] == wanted
    assert {outline for _, outline in reached} == {"solid"}
