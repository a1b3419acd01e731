"""Debian's chromium over its own driver, and what the tests ask of it."""

from __future__ import annotations

import base64
import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.remote.webelement import WebElement

AXE = Path(os.environ.get("MEMGUARD_AXE", Path(sys.prefix) / "axe-core" / "axe.min.js"))
"""`scripts/test --engines` puts it there."""
_ARGUMENTS = (
    "--headless=new", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--force-color-profile=srgb",
)  # fmt: skip
_DRAWN = "return [...document.querySelectorAll('.plot')].filter(p => p.dataset.drawn === 'yes').length"


class Browser:
    def __init__(self) -> None:
        found = {name: shutil.which(name) for name in ("chromium", "chromedriver")}
        missing = [name for name, path in found.items() if path is None]
        assert not missing, f"{missing} not found: apt-get install chromium chromium-driver, or scripts/test --engines"
        options = Options()
        options.binary_location = str(found["chromium"])
        for argument in _ARGUMENTS:
            options.add_argument(argument)
        if os.geteuid() == 0:
            options.add_argument("--no-sandbox")
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        self.driver = webdriver.Chrome(options=options, service=Service(str(found["chromedriver"])))
        self.driver.set_script_timeout(60)

    def reset(self) -> None:
        """A fresh page in the light theme, without logs."""
        self.media()
        self.driver.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})
        self.driver.set_window_size(1280, 1400)
        self.driver.get("about:blank")
        for kind in ("browser", "performance"):
            self.driver.get_log(kind)

    def media(self, scheme: str = "light", media: str = "") -> None:
        features = [
            {"name": "prefers-color-scheme", "value": scheme},
            {"name": "prefers-reduced-motion", "value": "reduce"},
        ]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": media, "features": features})

    def open(self, path: Path, drawn: int = 1) -> None:
        """Open the file, and wait until so many figures are drawn."""
        self.driver.get(path.as_uri())
        self.wait(lambda: self.driver.execute_script(_DRAWN) >= drawn, f"{drawn} figures are drawn")

    def wait(self, condition: Any, what: str, seconds: float = 30.0) -> Any:
        end = time.monotonic() + seconds
        while not (found := condition()):
            assert time.monotonic() < end, f"not within {seconds} s: {what}"
            time.sleep(0.02)
        return found

    def js(self, script: str, *arguments: object) -> Any:
        return self.driver.execute_script(script, *arguments)

    def one(self, selector: str) -> WebElement:
        return self.driver.find_element("css selector", selector)

    def requests(self) -> list[str]:
        """Addresses that the page asked for, other than its own file and data in it; not what its policy stopped."""
        asked: dict[str, str] = {}
        for entry in self.driver.get_log("performance"):
            message = json.loads(entry["message"])["message"]
            about = message["params"]
            if message["method"] == "Network.requestWillBeSent":
                asked[about["requestId"]] = about["request"]["url"]
            elif message["method"] == "Network.loadingFailed" and about.get("blockedReason") == "csp":
                asked.pop(about["requestId"], None)
        return [url for url in asked.values() if not url.startswith(("file:", "data:", "blob:", "about:"))]

    def complaints(self) -> list[str]:
        """What stands in the console."""
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def violations(self) -> list[str]:
        """Serious and critical ones that axe-core finds."""
        self.js(AXE.read_text(encoding="utf-8"))
        found = self.driver.execute_async_script(
            "const done = arguments[arguments.length - 1];"
            "axe.run(document, {resultTypes: ['violations']}).then(r => done(r.violations), e => done(String(e)));"
        )
        assert isinstance(found, list), found
        return [
            f"{one['id']} ({one['impact']}): {one['help']}: {[node['html'][:150] for node in one['nodes'][:3]]}"
            for one in found
            if one["impact"] in ("serious", "critical")
        ]

    def pdf(self) -> bytes:
        made = self.driver.execute_cdp_cmd("Page.printToPDF", {"printBackground": False})
        return base64.b64decode(made["data"])

    def quit(self) -> None:
        self.driver.quit()
