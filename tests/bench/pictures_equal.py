"""Compare SVG pictures: their texts, and all drawn elements."""

import re
from xml.etree import ElementTree

import pytest

_NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e-?\d+)?")
# Far less than the width of a line; a tenth of a pixel may come from another processor.
_POINTS = 0.1


def assert_same_picture(made: str, recorded: str) -> None:
    """Fail unless two pictures have the same elements at the same positions."""
    ours, theirs = (list(ElementTree.fromstring(svg).iter()) for svg in (made, recorded))
    assert [element.tag for element in ours] == [element.tag for element in theirs]
    for own, other in zip(ours, theirs, strict=True):
        assert own.text == other.text
        for key, value in own.attrib.items():
            before = other.attrib[key]
            assert _NUMBER.sub("", value) == _NUMBER.sub("", before)
            assert _numbers(value) == pytest.approx(_numbers(before), abs=_POINTS)


def _numbers(text: str) -> list[float]:
    return [float(number) for number in _NUMBER.findall(text)]
