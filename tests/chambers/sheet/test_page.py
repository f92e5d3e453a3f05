"""The page in a browser: an annotator's scores are stored, saved, loaded and read."""

import json
import os
import shutil
import subprocess
import time
from contextlib import contextmanager

import pytest

from tests.chambers.conftest import told
from tests.chambers.sheet.conftest import MODELS, QUESTIONS

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(BROWSER is None, reason="needs Chromium")]
CHOOSE = """
document.querySelectorAll("section").forEach((row, number, all) => {
  if (number < all.length - %d) row.querySelectorAll('[value="4"]').forEach(each => each.click());
})
"""
STATE = "document.querySelector('output').value"


class Browser:
    """A browser with one page, controlled over a pair of pipes (Chrome DevTools Protocol)."""

    def __init__(self, commands, events):
        self._commands, self._events = commands, events
        self._number, self._session = 0, {}
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self._session = {"sessionId": session}

    def ask(self, method, **parameters):
        self._number += 1
        call = {"id": self._number, "method": method, "params": parameters, **self._session}
        self._commands.write(json.dumps(call).encode() + b"\0")
        self._commands.flush()
        while True:
            answer = json.loads(self._message())
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]

    def run(self, script):
        result = self.ask("Runtime.evaluate", expression=script)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def open(self, page):
        self.ask("Page.navigate", url=page.as_uri())
        self.wait_for("document.readyState === 'complete' && !!document.querySelector('output')")

    def wait_for(self, condition):
        deadline = time.monotonic() + 30
        while not self.run(condition):
            assert time.monotonic() < deadline, condition
            time.sleep(0.05)

    def _message(self):
        message = bytearray()
        while byte := self._events.read(1):
            if byte == b"\0":
                return bytes(message)
            message += byte
        raise AssertionError("the browser ended")


@contextmanager
def browser(profile):
    """Start a browser without a network, and end it."""
    (theirs, commands), (events, own) = os.pipe(), os.pipe()

    options = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe"]
    quiet = ["--no-first-run", "--disable-background-networking", "--proxy-server=127.0.0.1:9"]
    # The browser reads from descriptor 3 and writes to 4.
    as_expected = ["bash", "-c", f'exec "$@" 3<&{theirs} 4>&{own}', "bash"]
    process = subprocess.Popen(
        [*as_expected, BROWSER, *options, *quiet, f"--user-data-dir={profile}"],
        pass_fds=(theirs, own),
        stderr=subprocess.DEVNULL,
    )
    os.close(theirs)
    os.close(own)
    try:
        with os.fdopen(commands, "wb") as writing, os.fdopen(events, "rb") as reading:
            yield Browser(writing, reading)
    finally:
        process.terminate()
        process.wait(30)


def saved(downloads, name):
    deadline = time.monotonic() + 30
    while not (downloads / name).is_file():
        assert time.monotonic() < deadline, sorted(downloads.iterdir())
        time.sleep(0.05)
    return downloads / name


def test_scores_are_kept_saved_loaded_and_read(study, tmp_path, capsys):
    folder, downloads = study(), tmp_path / "downloads"
    downloads.mkdir()
    page, count = folder / "sheets" / "annotator-1.html", len(QUESTIONS) * len(MODELS)
    with browser(tmp_path / "profile") as own:
        own.ask("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(downloads))
        own.open(page)
        assert own.run(STATE) == f"0 of {count} answers scored"
        own.run(CHOOSE % 1)
        own.open(page)
        assert own.run(STATE) == f"{count - 1} of {count} answers scored"
        own.run("document.querySelector('#save').click()")
        unfinished = saved(downloads, "annotator-1-unfinished.csv")
        own.run(CHOOSE % 0)
        assert own.run(STATE).startswith("All answers scored")
        own.run("document.querySelector('#save').click()")
        finished = saved(downloads, "annotator-1.csv")
        # Elsewhere: nothing is kept in that browser.
        own.run("localStorage.clear()")
        own.open(page)
        assert own.run(STATE) == f"0 of {count} answers scored"
        load = own.ask("Runtime.evaluate", expression="document.querySelector('#load')")["result"]
        own.ask("DOM.setFileInputFiles", files=[str(unfinished)], objectId=load["objectId"])
        own.wait_for(f"{STATE} === '{count - 1} of {count} answers scored'")
    shown = told(capsys, "sheet", "read", folder / "key.json", finished)
    assert shown.count("4.00 ± 0.00") == 2 * len(MODELS)
