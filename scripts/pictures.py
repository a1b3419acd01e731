"""Draw README's pictures from a GPU recording: `memguard top` in a terminal, `memguard report` in a browser.

    scripts/pictures                       install the dependencies, then run: python scripts/pictures.py

`docs/pictures/recording.jsonl` is a timeline that `scripts/recording.py` wrote on a GPU. The screen shows the state
`AFTER` seconds after the run's first out-of-memory error. `docs/pictures/made-of.json` stores the recording's hash: a
test fails if the hash does not match.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "pictures"
RECORDING = FOLDER / "recording.jsonl"
TERMINAL = (100, 24)
"""Columns and rows."""
WINDOW = (1200, 1600)
"""Pixels."""
AFTER = 0.3
"""Seconds."""


def hash_of(recording: Path) -> str:
    return hashlib.sha256(recording.read_bytes()).hexdigest()


def until_the_error(recording: Path, copy: Path) -> float:
    """Copy the timeline up to `AFTER` seconds after its first out-of-memory error. Return the last record's time."""
    error, last, kept = None, 0.0, []
    for line in recording.read_text().splitlines():
        record = json.loads(line)
        at = float(record.get("t", last))
        if error is None and "oom" in record:
            error = at
        if error is not None and at > error + AFTER:
            break
        last = max(last, at)
        kept.append(line)
    if error is None:
        raise SystemExit(f"{recording} has no out-of-memory error")
    copy.write_text("\n".join(kept) + "\n")
    return last


async def screen(timeline: Path, now: float) -> str:
    """The screen as SVG."""
    from memguard._tools.top.app import Top
    from memguard._tools.top.sources import Timelines

    source = Timelines([str(timeline)], clock=lambda: now)
    try:
        app = Top(source, 0.05)
        async with app.run_test(size=TERMINAL) as pilot:
            while app.snapshot is None:
                await pilot.pause(0.05)
            await pilot.pause(0.2)
            return re.sub(r"terminal-\d+", "terminal", app.export_screenshot(title="memguard top"))
    finally:
        source.close()


def page(report: Path, picture: Path) -> None:
    """Screenshot of the report through Selenium: the browser's own option takes it before the charts are drawn."""
    from selenium import webdriver
    from selenium.webdriver.support.ui import WebDriverWait

    options = webdriver.ChromeOptions()
    options.binary_location = str(shutil.which("chromium"))
    for argument in ("--headless=new", "--no-sandbox", "--hide-scrollbars", f"--window-size={WINDOW[0]},{WINDOW[1]}"):
        options.add_argument(argument)
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(str(shutil.which("chromedriver"))))
    try:
        driver.get(report.as_uri())
        drawn = "return document.querySelectorAll('.js-plotly-plot .main-svg').length > 0"
        WebDriverWait(driver, 30).until(lambda one: one.execute_script(drawn))
        driver.save_screenshot(str(picture))
    finally:
        driver.quit()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recording", nargs="?", type=Path, default=RECORDING)
    recording = parser.parse_args().recording
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        cut = folder / "training.jsonl"
        now = until_the_error(recording, cut)
        (FOLDER / "top.svg").write_text(asyncio.run(screen(cut, now)))
        shutil.copy(recording, folder / "training.jsonl")
        command = [sys.executable, "-m", "memguard", "report", "training.jsonl", "-o", "report.html"]
        subprocess.run(command, check=True, cwd=folder)
        page(folder / "report.html", FOLDER / "report.png")
    (FOLDER / "made-of.json").write_text(json.dumps({"recording": recording.name, "sha256": hash_of(recording)}) + "\n")


if __name__ == "__main__":
    main()
