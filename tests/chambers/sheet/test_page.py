"""The page in a browser: an annotator's scores are stored, saved, loaded and read."""

import time

import pytest

from tests.chambers.browser import browser, needs_browser
from tests.chambers.conftest import execute
from tests.chambers.sheet.conftest import MODELS, QUESTIONS
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, needs_browser]
CHOOSE = """
document.querySelectorAll("section").forEach((row, number, all) => {
  if (number < all.length - %d) row.querySelectorAll('[value="4"]').forEach(each => each.click());
})
"""
STATE = "document.querySelector('output').value"


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
        own.open(page.as_uri())
        assert own.run(STATE) == f"0 of {count} answers scored"
        own.run(CHOOSE % 1)

        def opened_again():
            own.open(page.as_uri())
            return own.run(STATE)

        # On a busy machine, Chromium writes localStorage some time later.
        wait_until(lambda: opened_again() == f"{count - 1} of {count} answers scored", 30.0)
        own.run("document.querySelector('#save').click()")
        unfinished = saved(downloads, "annotator-1-unfinished.csv")
        own.run(CHOOSE % 0)
        assert own.run(STATE).startswith("All answers scored")
        own.run("document.querySelector('#save').click()")
        finished = saved(downloads, "annotator-1.csv")
        # As in a different browser, which has no stored scores.
        own.run("localStorage.clear()")
        own.open(page.as_uri())
        assert own.run(STATE) == f"0 of {count} answers scored"
        load = own.ask("Runtime.evaluate", expression="document.querySelector('#load')")["result"]
        own.ask("DOM.setFileInputFiles", files=[str(unfinished)], objectId=load["objectId"])
        own.wait_for(f"{STATE} === '{count - 1} of {count} answers scored'")
    shown = execute(capsys, "sheet", "read", folder / "key.json", finished)
    assert shown.count("4.00") == 2 * len(MODELS)
