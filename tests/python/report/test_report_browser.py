"""The page of `sordino report` in a real browser: with mouse and keyboard, in light and dark, and live."""

from __future__ import annotations

import base64
import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import recorded
from pace import HANG_S

from sordino.record.reading import Reader, readers
from sordino.report.page.build import page
from sordino.report.page.contents import contents
from sordino.report.page.live import LiveServer

pytestmark = pytest.mark.browser
WIDTH, HEIGHT = 1100, 900


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Yield Chromium without a window; skip the test if it is not installed."""
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip("needs a browser: apt-get install chromium chromium-driver")
    webdriver = pytest.importorskip("selenium.webdriver", reason="needs selenium: pip install selenium")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for word in ("headless=new", "no-sandbox", "disable-dev-shm-usage", "disable-gpu", f"window-size={WIDTH},{HEIGHT}"):
        options.add_argument(f"--{word}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    made = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    yield made
    made.quit()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("runs")
    recorded.write(place / "allreduce", faults=True)
    recorded.write(place / "caps", "CaPS(threshold=60)", skips=True, seed=2)
    recorded.write(place / "pull", "ScheduledPull(interval=2)", ages=True, seed=3)
    return place


def opened(browser: Any, folder: Path, tmp_path: Path) -> None:
    """Open the page; check that it caused no errors and fetched nothing."""
    path = tmp_path / "report.html"
    path.write_text(page([contents(reader) for reader in readers([folder])]))
    browser.get(path.as_uri())
    assert browser.get_log("browser") == []
    assert browser.execute_script("return performance.getEntriesByType('resource').map((one) => one.name)") == []


def press(browser: Any, *keys: str) -> None:
    from selenium.webdriver.common.action_chains import ActionChains

    ActionChains(browser).send_keys(*keys).perform()


def focused(browser: Any) -> dict[str, str]:
    """Return the attributes of the focused element."""
    found: dict[str, str] = browser.execute_script(
        "return Object.fromEntries([...document.activeElement.attributes].map((one) => [one.name, one.value]))"
    )
    return found


def tab_to(browser: Any, attribute: str, value: str) -> None:
    from selenium.webdriver.common.keys import Keys

    for _ in range(150):
        press(browser, Keys.TAB)
        if focused(browser).get(attribute, "").startswith(value):
            return
    raise AssertionError(f"no {attribute}={value!r} is reached by Tab")


def text_of(browser: Any, identity: str) -> str:
    """Return the text of an element that the page may be about to replace."""
    text: str = browser.execute_script("return document.getElementById(arguments[0]).innerText", identity)
    return text


def until(happened: Callable[[], bool]) -> None:
    end = time.monotonic() + HANG_S
    while not happened():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_click_takes_a_curve_away_and_brings_it_back(browser: Any, runs: Path, tmp_path: Path) -> None:
    opened(browser, runs, tmp_path)
    curves = "#training figure:first-of-type polyline.curve"
    (button,) = browser.find_elements("xpath", "//section[@id='training']//figure[1]//button[contains(., 'caps')]")
    assert len(browser.find_elements("css selector", curves)) == 3
    button.click()
    assert button.get_attribute("aria-pressed") == "false"
    assert len(browser.find_elements("css selector", curves)) == 2
    button.click()
    assert len(browser.find_elements("css selector", curves)) == 3


def test_what_runs_reached_and_cost_stands_first(browser: Any, runs: Path, tmp_path: Path) -> None:
    opened(browser, runs, tmp_path)
    table = browser.find_element("css selector", "#overview table")
    assert [one.text for one in table.find_elements("css selector", "thead th")] == [
        "run", "test accuracy", "loss", "sent by a rank", "waited by a rank", "in steps", "besides the steps",
        "sent in all",
    ]  # fmt: skip
    rows = [[one.text for one in row.find_elements("css selector", "th, td")]
            for row in table.find_elements("css selector", "tbody tr")]  # fmt: skip
    assert [row[0] for row in rows] == ["allreduce", "caps", "pull"]
    assert rows[1][1].startswith("0.97") and rows[1][3:] == ["40.7 MB", rows[1][4], "200", "4.07 MB, 4 s", "44.8 MB"]
    assert rows[1][4].endswith("% of 10 s")


def test_restless_curves_are_moving_means_over_faint_points(browser: Any, runs: Path, tmp_path: Path) -> None:
    opened(browser, runs, tmp_path)
    (figure,) = browser.find_elements("xpath", "//section[@id='communication']//figure[contains(., 'Exposed')]")
    assert "moving mean of 21 points" in figure.find_element("css selector", "figcaption").text
    assert len(figure.find_elements("css selector", "polyline.raw")) == 3
    assert len(figure.find_elements("css selector", "polyline.curve")) == 3


def test_all_tables_of_bytes_have_one_scale(browser: Any, tmp_path: Path) -> None:
    """A value that is 10 times as large in one run as in the other has a darker cell there."""
    recorded.write(tmp_path / "runs" / "small", ranks=2, steps=8, parameters=6_000)
    recorded.write(tmp_path / "runs" / "large", ranks=2, steps=8, parameters=60_000)
    opened(browser, tmp_path / "runs", tmp_path)
    shades = [[one.get_attribute("class").split()[-1] for one in figure.find_elements("css selector", "td.cell")]
              for figure in browser.find_elements("css selector", "#links figure")]  # fmt: skip
    assert shades == [["h0", "h7", "h7", "h0"], ["h0", "h1", "h1", "h0"]]
    told = browser.find_element("id", "links").text
    assert "1.2 MB, the maximum over all runs; all tables here have one scale" in told and "rank 1, node0" in told


def test_what_is_wider_than_the_page_says_so_and_scrolls_by_keyboard(browser: Any, runs: Path, tmp_path: Path) -> None:
    from selenium.webdriver.common.keys import Keys

    narrow = {"width": 420, "height": HEIGHT, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", narrow)
    try:
        opened(browser, runs, tmp_path)
        assert browser.execute_script("return document.documentElement.scrollWidth <= innerWidth")
        box, hint = (browser.find_element("css selector", f"#overview .{name}") for name in ("scroll", "hint"))
        until(lambda: hint.is_displayed())
        assert hint.text.startswith("→ There is more on the right")
        tab_to(browser, "class", "scroll wide")
        assert browser.execute_script("return getComputedStyle(document.activeElement).outlineWidth") == "3px"
        press(browser, Keys.ARROW_RIGHT)
        until(lambda: browser.execute_script("return arguments[0].scrollLeft", box) > 0)
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    until(lambda: not hint.is_displayed() and box.get_attribute("tabindex") is None)  # there is space again


def test_all_of_it_is_reached_by_keyboard(browser: Any, runs: Path, tmp_path: Path) -> None:
    from selenium.webdriver.common.keys import Keys

    opened(browser, runs / "caps", tmp_path)
    press(browser, Keys.TAB)
    assert focused(browser)["class"] == "skip"
    press(browser, Keys.ENTER)
    tab_to(browser, "data-key", "show metric loss")
    press(browser, Keys.SPACE)
    assert focused(browser)["aria-pressed"] == "false"
    press(browser, Keys.SPACE)
    tab_to(browser, "data-key", "at metric loss")
    press(browser, Keys.HOME, Keys.ARROW_RIGHT)
    told = focused(browser)
    assert (
        told["role"] == "slider"
        and told["aria-valuenow"] == "1"
        and told["aria-valuetext"].startswith("step 2: mean over ranks 2.")
    )
    press(browser, Keys.TAB)
    press(browser, Keys.ENTER)
    until(lambda: len(browser.find_elements("css selector", "#training details[open] tbody tr")) == 200)
    tab_to(browser, "data-key", "gantt")
    press(browser, Keys.ARROW_RIGHT)
    assert focused(browser)["aria-valuetext"].startswith("rank 0 waits for rank 1, ")
    press(browser, Keys.ARROW_DOWN)
    assert focused(browser)["aria-valuetext"].startswith("rank 1 ")
    before = browser.execute_script("return document.querySelectorAll('#waits rect.g-wait').length")
    press(browser, "-")
    assert focused(browser)["data-key"] == "gantt caps"  # it keeps the focus when it is drawn again
    assert browser.execute_script("return document.querySelectorAll('#waits rect.g-wait').length") > before
    tab_to(browser, "data-key", "at skips")
    press(browser, Keys.END, Keys.ARROW_DOWN)
    assert "conv1.bias (24 B): 90 % skipped" in focused(browser)["aria-valuetext"]


def test_all_that_takes_the_focus_has_a_name(browser: Any, runs: Path, tmp_path: Path) -> None:
    opened(browser, runs, tmp_path)
    nodes = browser.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]
    focusable = [node for node in nodes if not node["ignored"] and any(
        one["name"] == "focusable" and one["value"]["value"] for one in node.get("properties", []))]  # fmt: skip
    assert len(focusable) > 40
    nameless = [node for node in focusable if not node.get("name", {}).get("value")
                and node["role"]["value"] not in ("RootWebArea", "main")]  # fmt: skip
    assert nameless == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_is_drawn_in_light_and_in_dark(browser: Any, runs: Path, tmp_path: Path, scheme: str) -> None:
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    opened(browser, runs, tmp_path)
    ground = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert ground == {"light": "rgb(255, 255, 255)", "dark": "rgb(20, 24, 29)"}[scheme]
    assert browser.execute_script("return document.documentElement.scrollWidth <= innerWidth")
    empty = "return [...document.querySelectorAll('svg.chart')].filter((one) => one.getBBox().height < 50).length"
    assert browser.execute_script(empty) == 0
    picture = base64.b64decode(
        browser.execute_cdp_cmd("Page.captureScreenshot", {"captureBeyondViewport": True})["data"]
    )
    (tmp_path / f"{scheme}.png").write_bytes(picture)
    assert len(picture) > 20_000


def test_news_come_to_a_page_that_is_open(browser: Any, tmp_path: Path) -> None:
    folder = recorded.write(tmp_path / "run", ranks=2, steps=20)
    with LiveServer([Reader(folder)]) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            browser.get(server.address)
            tab_to(browser, "data-key", "at metric loss")
            line = {"kind": "metrics", "step": 99, "time": recorded.ZERO + 9, "values": {"loss": 0.0625}}
            with open(folder / "rank-00000.jsonl", "a") as file:
                file.write(json.dumps(line) + "\n")
            until(lambda: "0.0625" in text_of(browser, "overview"))
            assert focused(browser)["data-key"] == "at metric loss"  # the focused element keeps the focus
            assert text_of(browser, "state").startswith("Live; last look at")
            asked = browser.execute_script("return performance.getEntriesByType('resource').map((one) => one.name)")
            assert asked and all(name == server.address + "data.json" for name in asked)
            assert [one for one in browser.get_log("browser") if one["level"] == "SEVERE"] == []
        finally:
            server.shutdown()
            thread.join()
