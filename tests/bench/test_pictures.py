"""The README's answers, numbers and pictures are those that are recorded."""

import re
from xml.etree import ElementTree

import pytest

from bench import pictures
from federation.answers import MODELS
from tests.bench.pictures_equal import assert_same_picture


def test_the_readme_says_what_is_recorded():
    readme = (pictures.ROOT / "README.md").read_text(encoding="utf-8")
    assert pictures.readme_part(*pictures.recorded()) in readme


def texts(svg: str) -> list[str]:
    root = ElementTree.fromstring(svg)
    return ["".join(element.itertext()) for element in root.iter() if element.tag.endswith("text")]


@pytest.mark.parametrize("name", ["smollm2.svg", "split_step.svg"])
def test_pictures_show_what_is_recorded(name):
    events, result = pictures.recorded()
    made = {
        "smollm2.svg": pictures.losses_picture(events),
        "split_step.svg": pictures.split_picture(result),
    }[name]
    file = pictures.PICTURES / name
    assert_same_picture(made, file.read_text(encoding="utf-8"))
    shown = set(texts(made))
    if name == "smollm2.svg":
        losses = [e["loss"] for e in events if e["event"] == "evaluate" and e["round"] == 3]
    else:
        losses = [side["ratios"]["pairs"] for side in result["sides"][1:]]
    assert losses and {f"{loss:.2f}" for loss in losses} <= shown


def test_every_number_of_the_readme_follows_from_the_record():
    """Another record gives another part: none of it is fixed text."""
    events, result = pictures.recorded()
    before = pictures.readme_part(events, result)
    for event in events:
        if event["event"] == "evaluate":
            event["loss"] += 5.5
        if event["event"] == "answers":
            event["answers"][0]["text"] = f"{event['model']} *says* | <b>"
    for side in result["sides"]:
        side["ratios"]["pairs"] += 7.5
    after = pictures.readme_part(events, result)
    numbers = r"\d\.\d\d"
    assert not set(re.findall(numbers, before)) & set(re.findall(numbers, after))
    for model in MODELS:
        assert after.count(rf"{model} \*says\* \| &lt;b&gt;") == 3
