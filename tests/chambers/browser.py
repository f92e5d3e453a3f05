"""A browser that tests control."""

import json
import os
import shutil
import subprocess
import time
from contextlib import contextmanager

import pytest

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
needs_browser = pytest.mark.skipif(BROWSER is None, reason="needs Chromium")


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

    def open(self, url):
        self.ask("Page.navigate", url=url)
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
