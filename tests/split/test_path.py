"""The number of files of split/ that process a hidden state between head and body."""

import sys
import threading
from pathlib import Path

import pytest

import split
from split.model.part import Part
from tests.split.clients import SIZES, Client, serving, split_settings, train_together

ROOT = Path(split.__file__).parent


class Recorder:
    """Records the files of split/ that threads enter between the first calls of head and body."""

    def __init__(self):
        self.files = set()
        self.parties = []

    def profile(self, frame, event, _):
        if event != "call" or "body" in self.parties:
            return
        if frame.f_code is Part.__call__.__code__:
            self.parties.append(frame.f_locals["self"].party)
        path = Path(frame.f_code.co_filename)
        if self.parties and path.is_relative_to(ROOT):
            self.files.add(str(path.relative_to(ROOT)))

    def __enter__(self):
        threading.setprofile(self.profile)
        sys.setprofile(self.profile)
        return self

    def __exit__(self, *_):
        sys.setprofile(None)
        threading.setprofile(None)


@pytest.mark.parametrize(("schedule", "most"), [("serial", 13), ("client-batch", 16)])
def test_a_hidden_state_enters_few_files(base, beginning, schedule, most):
    split_ = split_settings(schedule=schedule, window=1)
    name = "alpha"
    with Recorder() as recorder, serving(base, beginning, split_) as server:
        server.begin_round({name: SIZES[name]}, 0)
        trained = train_together([Client(name, base, split_)], server, beginning, {name: 2}, {})
    assert trained and recorder.parties == ["head", "body"]
    assert {"model/part.py", "lane/stream.py", "server/compute.py"} <= recorder.files
    assert len(recorder.files) <= most, sorted(recorder.files)
