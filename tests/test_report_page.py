"""The page as a person uses it, in headless Chromium: filters, sorting, proof, copying, keyboard, colours, speed."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from report_makers import hostile, many, matrix
from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import Select, WebDriverWait

from prober.report.heatmap import Heatmap, heatmap_of
from prober.report.page import page_of
from prober.report.rows import lines_of

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(
    CHROMIUM is None or DRIVER is None,
    reason="the page is looked at in Chromium: apt-get install chromium chromium-driver",
)
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-dev-shm-usage",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--window-size=1400,1000",
)  # fmt: skip
NOW = datetime(2026, 6, 1, tzinfo=UTC)
Open = Callable[..., webdriver.Chrome]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    options = Options()
    options.binary_location = CHROMIUM or ""
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    driver.implicitly_wait(2)  # what follows a click may come a moment later
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("pages")
    made = {}
    for name, rows in (("matrix", matrix()), ("few", matrix()[::4]), ("hostile", hostile()), ("many", many(5000))):
        path = folder / f"{name}.html"
        path.write_text(page_of(rows, NOW), encoding="utf-8")
        made[name] = path.as_uri()
    return made


def logged(driver: webdriver.Chrome, kind: str) -> list[dict[str, Any]]:
    """What the browser has logged since this was last asked."""
    found: list[dict[str, Any]] = driver.get_log(kind)  # type: ignore[no-untyped-call]  # selenium's is untyped
    return found


@pytest.fixture
def page(browser: webdriver.Chrome, pages: dict[str, str]) -> Iterator[Open]:
    """Open a page; when the test is over it has said nothing on the console and asked for nothing but itself."""
    logged(browser, "performance")

    def show(name: str = "matrix", address: str = "", scheme: str = "light", width: int = 1400) -> webdriver.Chrome:
        feature = {"name": "prefers-color-scheme", "value": scheme}
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
        size = {"width": width, "height": 1000, "deviceScaleFactor": 1, "mobile": width < 600}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        browser.get("about:blank")
        browser.get(pages[name] + address)
        return browser

    yield show
    browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})
    assert logged(browser, "browser") == []
    asked = [json.loads(entry["message"])["message"] for entry in logged(browser, "performance")]
    addresses = {m["params"]["request"]["url"] for m in asked if m["method"] == "Network.requestWillBeSent"}
    assert {a for a in addresses if not a.startswith(("data:", "about:"))} <= {p.partition("#")[0] for p in
                                                                               pages.values()}  # fmt: skip


def choose(driver: webdriver.Chrome, key: str, value: str) -> None:
    Select(driver.find_element(By.CSS_SELECTOR, f"[data-filter={key}]")).select_by_value(value)


def column(driver: webdriver.Chrome, key: str) -> list[str]:
    """The shown cells of one column, from top to bottom."""
    script = """
        const place = [...document.querySelectorAll('#rows th')].findIndex((th) => th.dataset.key === arguments[0]);
        return [...document.querySelectorAll('#rows tbody tr:not([hidden]):not(.opened)')].map(
            (tr) => (place ? tr.cells[place] : tr.querySelector('summary bdi')).textContent)"""
    found: list[str] = driver.execute_script(script, key)
    return found


def count(driver: webdriver.Chrome, selector: str) -> int:
    found: int = driver.execute_script("return document.querySelectorAll(arguments[0]).length", selector)
    return found


def heat_cells(driver: webdriver.Chrome) -> list[list[str]]:
    """The shown part of the heatmap, row by row, the model first."""
    script = """
        return [...document.querySelectorAll('#heat tbody tr')].filter((tr) => !tr.hidden).map((tr) =>
            [...tr.cells].filter((td) => !td.hidden).map((td, i) => i ? `${td.textContent}|${td.className}` : td.title))
    """
    found: list[list[str]] = driver.execute_script(script)
    return found


def said(driver: webdriver.Chrome) -> str:
    return driver.find_element(By.ID, "shown").text


def test_filters_work_together(page: Open) -> None:
    driver = page()
    rows = matrix()
    assert said(driver) == f"{len(rows)} rows"
    choose(driver, "gpu", "NVIDIA H200")
    choose(driver, "tp", "2")
    choose(driver, "vllm", "0.10.0")
    wanted = [r for r in rows if (r.gpu, r.tensor_parallel_size, r.vllm_version) == ("NVIDIA H200", 2, "0.10.0")]
    assert said(driver) == f"{len(wanted)} of {len(rows)} rows"
    assert sorted(column(driver, "model")) == sorted(r.model for r in wanted)
    driver.find_element(By.CSS_SELECTOR, "[data-filter=model]").send_keys("qwen fp8")
    assert set(column(driver, "model")) == {"Qwen/Qwen3-8B-FP8"}
    assert set(column(driver, "kv")) == {"fp8"}
    impossible = driver.execute_script(
        "return [...document.querySelector('[data-filter=kv]').options].filter((o) => o.disabled).map((o) => o.value)"
    )
    assert impossible == ["default"]
    driver.find_element(By.CSS_SELECTOR, "[data-filter=model]").send_keys(" nothing like it")
    assert driver.find_element(By.ID, "nothing").is_displayed()
    driver.find_element(By.CSS_SELECTOR, "[type=reset]").click()
    assert said(driver) == f"{len(rows)} rows"


def test_age_filter_counts_from_today(page: Open) -> None:
    driver = page()
    driver.execute_script("Date.now = () => Date.parse('2026-04-20T00:00:00Z')")
    choose(driver, "age", "30")
    assert set(column(driver, "measured")) == {"2026-04-10", "2026-04-11", "2026-04-12"}
    impossible = driver.find_element(By.CSS_SELECTOR, "[data-filter=source] [value=reported]")
    assert not impossible.is_enabled()


def test_whole_name_of_a_model_means_that_model(page: Open) -> None:
    driver = page()
    driver.find_element(By.CSS_SELECTOR, "[data-filter=model]").send_keys("Qwen/Qwen3-8B")
    assert set(column(driver, "model")) == {"Qwen/Qwen3-8B"}


def test_filters_are_kept_in_the_address(page: Open) -> None:
    driver = page(address="#gpu=NVIDIA+L4&tp=1&vllm=0.9.2")
    assert set(column(driver, "gpu")) == {"NVIDIA L4"}
    assert set(column(driver, "vllm")) == {"0.9.2"}
    choose(driver, "tp", "2")
    assert driver.current_url.endswith("#gpu=NVIDIA+L4&tp=2&vllm=0.9.2")


def expected_cells(heat: Heatmap) -> list[list[str]]:
    """The heatmap as Python works it out, in the form of `heat_cells`."""
    return [
        [model] + [f"{c.text}|{c.style}" if c else "|" for c in row]
        for model, row in zip(heat.models, heat.cells, strict=True)
    ]


@pytest.mark.parametrize("version", ["", "0.9.2"])
def test_heatmap_of_the_filtered_rows_is_what_python_works_out(page: Open, version: str) -> None:
    driver = page()
    choose(driver, "vllm", "0.9.2")
    choose(driver, "vllm", version)
    heat = heatmap_of(lines_of(r for r in matrix() if r.vllm_version == version or not version))
    assert heat_cells(driver) == expected_cells(heat)
    spans = driver.execute_script(
        "return [...document.querySelectorAll('#heat [scope=colgroup]:not([hidden])')]"
        ".map((th) => [th.textContent, th.colSpan])"
    )
    assert [tuple(span) for span in spans] == heat.gpus


def test_heatmap_counts_only_the_machines_that_pass_the_filters(page: Open) -> None:
    """The age is the one filter that splits a combination: the machine measured long ago no longer lowers the cell."""
    driver = page()
    second_machine = {r.machine: r for r in matrix()}["m2"]
    now = datetime.fromisoformat(second_machine.measured_at or "") + timedelta(days=35)
    driver.execute_script("Date.now = () => Date.parse(arguments[0])", now.isoformat())
    for days, passes in ((90, True), (30, False)):
        choose(driver, "age", str(days))
        recent = [r for r in matrix() if now - datetime.fromisoformat(f"{r.measured_at:.10}T00:00Z") <= timedelta(days)]
        assert (second_machine in recent, matrix()[0] in recent) == (passes, True)
        assert heat_cells(driver) == expected_cells(heatmap_of(lines_of(recent)))


def test_cell_of_the_heatmap_leads_to_its_rows(page: Open) -> None:
    driver = page()
    driver.find_element(By.CSS_SELECTOR, "#heat tr:has([title='Qwen/Qwen3-8B']) button").click()
    assert set(column(driver, "model")) == {"Qwen/Qwen3-8B"}
    assert len(set(column(driver, "gpu"))) == 1
    assert len(column(driver, "ceiling")) >= 4


def test_keyboard_walks_the_heatmap_and_opens_a_row(page: Open) -> None:
    driver = page()
    stops = driver.find_elements(By.CSS_SELECTOR, "#heat button[tabindex='0']")
    assert len(stops) == 1
    driver.execute_script("arguments[0].focus()", stops[0])
    driver.switch_to.active_element.send_keys(Keys.ARROW_DOWN, Keys.ARROW_RIGHT)
    focused = driver.switch_to.active_element
    assert focused.tag_name == "button"
    assert focused != stops[0]
    focused.send_keys(Keys.ENTER)
    assert " of " in said(driver)
    driver.switch_to.active_element.send_keys(Keys.TAB)
    summary = driver.find_element(By.CSS_SELECTOR, "#rows tbody tr:not([hidden]) summary")
    driver.execute_script("arguments[0].focus()", summary)
    summary.send_keys(Keys.ENTER)
    assert driver.find_element(By.CSS_SELECTOR, "tr.opened .detail").is_displayed()


def test_sorting_by_numbers_and_versions_with_the_unknown_last(page: Open) -> None:
    driver = page()
    lengths = driver.find_element(By.CSS_SELECTOR, "[data-key=ceiling] button")
    lengths.click()
    unknown = column(driver, "ceiling").count("–")
    down = [int(re.sub(r"\D", "", text)) for text in column(driver, "ceiling")[:-unknown]]
    assert down == sorted(down, reverse=True)
    assert len(set(down)) > 40
    assert driver.find_element(By.CSS_SELECTOR, "[data-key=ceiling]").get_attribute("aria-sort") == "descending"
    lengths.click()
    assert column(driver, "ceiling")[-unknown:] == ["–"] * unknown
    assert [int(re.sub(r"\D", "", text)) for text in column(driver, "ceiling")[:-unknown]] == down[::-1]
    driver.find_element(By.CSS_SELECTOR, "[data-key=vllm] button").click()
    versions = list(dict.fromkeys(column(driver, "vllm")))
    assert versions == ["0.9.2", "0.10.0", "0.28.0", "unknown"]
    assert len(driver.find_elements(By.CSS_SELECTOR, "[aria-sort]")) == 1


def test_numbers_are_aligned_to_the_right(page: Open) -> None:
    driver = page()
    script = "return getComputedStyle(document.querySelector('#rows tbody tr').cells[arguments[0]]).textAlign"
    assert [driver.execute_script(script, index) for index in (2, 3, 7, 8)] == ["right"] * 4
    assert driver.execute_script(script, 1) in ("left", "start")


def test_row_opens_with_both_edges_and_its_command_is_copied(page: Open) -> None:
    driver = page()
    allowed = {"permissions": ["clipboardReadWrite", "clipboardSanitizedWrite"]}
    driver.execute_cdp_cmd("Browser.grantPermissions", allowed)
    choose(driver, "gpu", "NVIDIA H200")
    summary = driver.find_element(By.CSS_SELECTOR, "#rows tbody tr:not([hidden]) summary")
    summary.click()
    detail = driver.find_element(By.CSS_SELECTOR, "tr.opened .detail")
    told_here = detail.text
    assert "trial trial-a: /health 200" in told_here
    assert "kv too small, trial trial-b: ValueError: the KV cache is needed,\nlarger than" in told_here
    assert "580.65.06" in told_here
    command = detail.find_element(By.CSS_SELECTOR, "code").text
    assert re.match(r"vllm serve \S+ --max-model-len \d+ --tensor-parallel-size 1 --gpu-memory-", command)
    button = detail.find_element(By.TAG_NAME, "button")
    button.click()
    WebDriverWait(driver, 5).until(lambda _: button.text == "Copied")
    assert driver.execute_async_script("navigator.clipboard.readText().then(arguments[0])") == command
    summary.click()
    WebDriverWait(driver, 5).until(lambda _: count(driver, "tr.opened") == 0)


def test_open_row_stays_under_its_row_when_sorted_and_hides_with_it(page: Open) -> None:
    driver = page()
    driver.find_element(By.CSS_SELECTOR, "#rows tbody summary").click()
    WebDriverWait(driver, 5).until(lambda _: count(driver, "tr.opened") == 1)
    driver.find_element(By.CSS_SELECTOR, "[data-key=measured] button").click()
    above = "return document.querySelector('tr.opened').previousElementSibling.querySelector('details').open"
    assert driver.execute_script(above) is True
    choose(driver, "source", "reported")
    assert not driver.find_element(By.CSS_SELECTOR, "tr.opened").is_displayed()


def test_curves_follow_the_filters_and_are_named(page: Open) -> None:
    driver = page()
    choose(driver, "gpu", "NVIDIA L4")
    shown = [d for d in driver.find_elements(By.CSS_SELECTOR, ".curves > details") if d.is_displayed()]
    assert len(shown) == 4
    assert all("NVIDIA L4" in one.text for one in shown)
    drawing = driver.find_element(By.CSS_SELECTOR, ".curves svg")
    assert "tokens" in driver.find_element(By.CSS_SELECTOR, "#curves-title + .note").text.lower()
    assert (drawing.get_attribute("aria-label") or "").startswith("max_model_len over gpu_memory_utilization")


def test_page_is_whole_without_its_script(page: Open, browser: webdriver.Chrome) -> None:
    browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    driver = page()
    assert not driver.find_element(By.ID, "filters").is_displayed()
    assert count(driver, "#rows button, #heat button") == 0
    driver.find_element(By.CSS_SELECTOR, "#rows tbody summary").click()
    detail = driver.find_element(By.CSS_SELECTOR, "#rows details[open] .detail")
    assert detail.is_displayed()
    assert "--max-model-len" in detail.text or "prober probe" in detail.text
    assert driver.find_element(By.CSS_SELECTOR, "#heat .h0, #heat .h1, #heat .h2, #heat .h3, #heat .h4").text


def test_hostile_text_is_shown_as_it_is(page: Open) -> None:
    driver = page("hostile")
    visible = [re.sub(r"[\x00\x1b]", "\ufffd", row.model) for row in hostile()]
    assert sorted(column(driver, "model")) == sorted(visible)
    assert sorted(column(driver, "kv")) == sorted(visible)
    assert len(driver.find_elements(By.TAG_NAME, "script")) == 1
    for model in ("two\nlines", "<script>alert(1)</script>", 'say "x"', "🦙 llama", "Mô hình tiếng Việt", "\tx"):
        driver.execute_script(
            "const s = document.querySelector('[data-filter=gpu]'); s.value = arguments[0];"
            "s.dispatchEvent(new Event('change', {bubbles: true}))", model
        )  # fmt: skip
        assert set(column(driver, "model")) == {model}
    width = driver.execute_script("return document.documentElement.scrollWidth")
    assert width <= 1400


def test_five_thousand_rows_load_in_two_seconds_of_cpu_time(page: Open, browser: webdriver.Chrome) -> None:
    """CPU time of the page's own thread: how busy the machine is with something else does not count."""
    browser.execute_cdp_cmd("Performance.enable", {"timeDomain": "threadTicks"})
    driver = page("many")
    figures = browser.execute_cdp_cmd("Performance.getMetrics", {})["metrics"]
    took = next(figure["value"] for figure in figures if figure["name"] == "TaskDuration")
    browser.execute_cdp_cmd("Performance.disable", {})
    print(f"{took:.2f} s")
    assert said(driver) == "5,000 rows"
    assert 0.01 < took < 2.0
    assert driver.execute_script("return performance.getEntriesByType('resource').length") == 0


@pytest.mark.parametrize(("scheme", "width"), [("light", 1400), ("dark", 1400), ("light", 390), ("dark", 390)])
def test_accessibility(page: Open, scheme: str, width: int) -> None:
    driver = page("few", scheme=scheme, width=width)
    driver.execute_script("""
        for (const one of [...document.querySelectorAll('details')].slice(0, 12)) one.open = true;
        for (const one of document.querySelectorAll('section')) one.style.contentVisibility = 'visible';""")
    driver.execute_script(files("axe_core_python").joinpath("axe.min.js").read_text(encoding="utf-8"))
    found: dict[str, Any] = driver.execute_async_script("axe.run().then(arguments[0])")
    faults = {f["id"]: [node["html"][:200] for node in f["nodes"]][:3] for f in found["violations"]}
    assert faults == {}
    assert len(found["passes"]) > 20


def test_narrow_screen_needs_no_sideways_scrolling(page: Open) -> None:
    driver = page(width=390)
    assert driver.execute_script("return document.documentElement.scrollWidth") <= 390
    rows = driver.find_element(By.ID, "rows")
    assert rows.size["width"] <= 390
    driver.find_element(By.CSS_SELECTOR, "#rows tbody summary").click()
    assert driver.find_element(By.CSS_SELECTOR, "tr.opened .command").size["width"] <= 390


def test_dark_and_light_have_their_own_colours(page: Open) -> None:
    colours = []
    for scheme in ("light", "dark"):
        driver = page(scheme=scheme)
        colours.append(driver.execute_script("return getComputedStyle(document.body).backgroundColor"))
    assert colours[0] != colours[1]


def test_screens_can_be_kept(page: Open, tmp_path: Path) -> None:
    """For whoever wants to look: each screen is a picture that is not one colour."""
    for scheme, width in (("light", 1400), ("dark", 1400), ("light", 390)):
        picture = tmp_path / f"{scheme}-{width}.png"
        assert page(scheme=scheme, width=width).save_screenshot(str(picture))
        assert picture.stat().st_size > 20_000
