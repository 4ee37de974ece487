from __future__ import annotations

import re
from xml.etree import ElementTree as ET

from moesaic.commands.activation_picture import draw
from moesaic.policy.placement.activation_map import ActivationMap

SVG = "{http://www.w3.org/2000/svg}"


def test_near_cells_are_in_the_blocks_of_a_rank() -> None:
    """Tokens 5 and 6 are on ranks 0 and 1, which hold experts 2 | 0 1. Token 6's choice of expert 2 is
    remote."""
    found = ActivationMap((5, 6), (2, 0, 1), (1, 1), (1, 2), ((1.0, 0, 0), (0.25, 0.75, 0)), 7 / 8)
    text = draw("a < b", [("one", found)])
    cells = re.findall(r'class="(cell|far)" fill-opacity="([\d.]+)" d="([^"]*)"', text)
    assert cells == [
        *(("cell", "0.75", "M1,1h1v1h-1z"), ("cell", "1", "M0,0h1v1h-1z")),
        ("far", "0.25", "M0,1h1v1h-1z"),
    ]
    assert "87.5% of the choices" in text and len(ET.fromstring(text).findall(f".//{SVG}path")) == 10
