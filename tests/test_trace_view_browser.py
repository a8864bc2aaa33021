"""The page of a trace in a browser: by keyboard and by mouse, narrow and wide, in light and dark, without a request."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("selenium")

from selenium import webdriver
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

import dflash_fn
from dflash_fn.policies import token_rejection
from dflash_fn.sampling import Sampling
from dflash_fn.trace import Trace, record, render_page

BROWSER, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")

pytestmark = pytest.mark.skipif(not (BROWSER and DRIVER), reason="chromium and chromedriver are not installed")

HEIGHT = 800


@pytest.fixture(scope="module")
def trace() -> Trace:
    pair = dflash_fn.load_zoo("tiny-code")
    state = dflash_fn.prefill(pair, "import random", seed=5)
    return record(state, pair, policy=token_rejection(Sampling(0.8)), max_new_tokens=24, stop_token_ids=())[1]


@pytest.fixture(scope="module")
def address(trace: Trace, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("page") / "page.html"
    path.write_text(render_page(trace, dflash_fn.load_zoo("tiny-code").tokenizer), encoding="utf-8")
    return path.as_uri()


@pytest.fixture(scope="module")
def chromium() -> Iterator[webdriver.Chrome]:
    options = webdriver.ChromeOptions()
    options.binary_location = str(BROWSER)
    for flag in ("--headless=new", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"):
        options.add_argument(flag)
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        options.add_argument("--no-sandbox")  # chromium's sandbox refuses to be root
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(executable_path=str(DRIVER)))
    yield driver
    driver.quit()


def opened(driver: webdriver.Chrome, address: str, width: int, *features: tuple[str, str]) -> None:
    metrics = {"width": width, "height": HEIGHT, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    driver.execute_cdp_cmd("Emulation.setFocusEmulationEnabled", {"enabled": True})
    media = [{"name": name, "value": value} for name, value in features]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": media})
    driver.get_log("performance")
    driver.get(address)


def focused(driver: webdriver.Chrome) -> dict[str, Any]:
    """Return what has the focus, and what the tip says of it."""
    return driver.execute_script(
        """const here = document.activeElement, tip = document.getElementById("tip");
        const box = tip.getBoundingClientRect();
        return {tip: here.dataset.tip || null, id: here.id, shown: !tip.hidden, text: tip.innerText,
                told: here.dataset.tip ? document.getElementById(here.dataset.tip).textContent : null,
                box: [box.left, box.top, box.right, box.bottom], same: tip.textContent};"""
    )


def press(driver: webdriver.Chrome, *keys: str) -> dict[str, Any]:
    for key in keys:
        ActionChains(driver).send_keys(key).perform()
    return focused(driver)


def to_text(driver: webdriver.Chrome) -> dict[str, Any]:
    """Tab to the text's first token."""
    for _ in range(10):
        now = press(driver, Keys.TAB)
        if now["tip"]:
            return now
    raise AssertionError("the Tab key leads to no token")


@pytest.mark.parametrize("width", [360, 1280])
def test_a_walk_by_keyboard(chromium: webdriver.Chrome, address: str, trace: Trace, width: int) -> None:
    opened(chromium, address, width)
    order = [
        f"t0-{step}-{slot}{'x' if slot == row.num_accepted + 1 else ''}"
        for step, (row,) in enumerate(trace.steps)
        if row
        for slot in range(1, len(row.emitted) + 1)
    ]
    assert to_text(chromium)["tip"] == order[0]
    for place in order[1:6]:
        now = press(chromium, Keys.ARROW_RIGHT)
        assert now["tip"] == place
        assert now["shown"]
        assert now["same"] == now["told"]
        assert "p = " in now["text"]
        left, top, right, bottom = now["box"]
        assert left >= 0
        assert top >= 0
        assert right <= width
        assert bottom <= HEIGHT
    assert press(chromium, Keys.END)["tip"] == order[-1]
    assert press(chromium, Keys.HOME)["tip"] == order[0]
    assert press(chromium, Keys.ARROW_DOWN, Keys.ARROW_DOWN)["tip"].startswith("t0-2-")
    assert press(chromium, Keys.ARROW_UP)["tip"].startswith("t0-1-")
    assert press(chromium, Keys.ENTER)["id"].startswith("s0-1-")
    assert not press(chromium, Keys.ESCAPE)["shown"]
    # each list of tokens is one stop of the Tab key
    assert press(chromium, Keys.TAB)["tip"] is None
    assert chromium.get_log("browser") == []


@pytest.mark.parametrize("width", [360, 1280])
def test_every_tip_fits_and_nothing_sticks_out(chromium: webdriver.Chrome, address: str, width: int) -> None:
    opened(chromium, address, width, ("prefers-reduced-motion", "reduce"))
    wide, beyond = chromium.execute_script(
        """const wide = document.documentElement.scrollWidth, beyond = [];
        const tip = document.getElementById("tip");
        for (const token of document.querySelectorAll(".tok")) {
            token.focus();
            const box = tip.getBoundingClientRect();
            if (tip.hidden || box.left < 0 || box.top < 0 || box.right > innerWidth || box.bottom > innerHeight)
                beyond.push([token.dataset.tip, box.left, box.top, box.right, box.bottom]);
        }
        return [wide, beyond];"""
    )
    assert wide <= width
    assert beyond == []


def test_the_mouse_sees_what_the_keyboard_sees(chromium: webdriver.Chrome, address: str) -> None:
    opened(chromium, address, 1280)
    tokens = chromium.find_elements(By.CSS_SELECTOR, ".text .tok")
    tip = chromium.find_element(By.ID, "tip")
    assert not tip.is_displayed()
    for token in tokens[:3]:
        ActionChains(chromium).move_to_element(token).perform()
        told = chromium.find_element(By.ID, str(token.get_dom_attribute("data-tip")))
        assert tip.is_displayed()
        assert tip.get_property("textContent") == told.get_property("textContent")


def test_marks_differ_without_colour(chromium: webdriver.Chrome, address: str) -> None:
    opened(chromium, address, 1280)
    looks = chromium.execute_script(
        """const looks = {};
        for (const name of ["accepted", "rejected", "unreached", "recovered"]) {
            const one = document.querySelector("button." + name);
            looks[name] = [one.querySelector(".glyph").textContent, getComputedStyle(one).borderTopStyle];
        }
        return looks;"""
    )
    assert len({json.dumps(look) for look in looks.values()}) == 4
    assert len({glyph for glyph, _ in looks.values()}) == 4
    assert len({style for _, style in looks.values()}) == 4


def test_dark_light_and_motion(chromium: webdriver.Chrome, address: str) -> None:
    ask = """const style = getComputedStyle(document.body);
        return [style.backgroundColor, style.color, getComputedStyle(document.documentElement).scrollBehavior];"""
    opened(chromium, address, 1280, ("prefers-color-scheme", "dark"), ("prefers-reduced-motion", "reduce"))
    dark = chromium.execute_script(ask)
    opened(chromium, address, 1280, ("prefers-color-scheme", "light"))
    light = chromium.execute_script(ask)
    assert dark == ["rgb(22, 24, 27)", "rgb(232, 233, 235)", "auto"]
    assert light == ["rgb(253, 253, 251)", "rgb(28, 29, 31)", "smooth"]


def test_nothing_is_asked_of_any_network(chromium: webdriver.Chrome, address: str) -> None:
    opened(chromium, address, 1280)
    chromium.find_element(By.CSS_SELECTOR, ".tok").click()
    messages = [json.loads(entry["message"])["message"] for entry in chromium.get_log("performance")]
    asked = [one["params"]["request"]["url"] for one in messages if one["method"] == "Network.requestWillBeSent"]
    assert address in asked
    assert {url for url in asked if not url.startswith("data:")} == {address}
    assert chromium.get_log("browser") == []


def test_without_its_script_the_page_still_tells(chromium: webdriver.Chrome, address: str) -> None:
    chromium.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        opened(chromium, address, 1280)
        button = chromium.find_element(By.CSS_SELECTOR, "button.accepted")
        told = chromium.find_element(By.ID, str(button.get_dom_attribute("data-tip")))
        assert not told.is_displayed()
        ActionChains(chromium).scroll_to_element(button).move_to_element(button).perform()
        assert told.is_displayed()
    finally:
        chromium.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})


def test_this_very_page_would_tell_of_an_error(chromium: webdriver.Chrome, address: str, tmp_path: Path) -> None:
    """A check that guards comes with a test that it can fail."""
    page = tmp_path / "bad.html"
    page.write_text("<script>nothing()</script><img src='http://127.0.0.1:9/x.png'>", encoding="utf-8")
    opened(chromium, page.as_uri(), 1280)
    text = json.dumps(chromium.get_log("browser"))
    assert "nothing is not defined" in text
    messages = json.dumps(chromium.get_log("performance"))
    assert "http://127.0.0.1:9/x.png" in messages
