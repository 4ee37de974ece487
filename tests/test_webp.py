"""Animations of scripts/webp.py, read back chunk by chunk and by a browser."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest
from scripts import webp

from tests.support import browser


def still(data: bytes) -> bytes:
    """A WebP file with one picture and a chunk that animations leave out."""
    body = b"WEBP" + webp._chunk(b"EXIF", b"xy") + webp._chunk(b"VP8 ", data)
    return b"RIFF" + len(body).to_bytes(4, "little") + body


def test_an_animation_has_every_frame() -> None:
    file = webp.animation([(still(b"one"), 500), (still(b"four"), 70000)], (960, 540))
    assert int.from_bytes(file[4:8], "little") == len(file) - 8 and len(file) % 2 == 0
    (extended, head), (_, loops), *frames = webp.chunks(file)
    assert (extended, head[0]) == (b"VP8X", webp.ANIMATED) and loops[4:] == b"\0\0"
    assert [int.from_bytes(head[at : at + 3], "little") + 1 for at in (4, 7)] == [960, 540]
    assert [name for name, _ in frames] == [b"ANMF", b"ANMF"]
    assert [int.from_bytes(data[12:15], "little") for _, data in frames] == [500, 70000]
    assert [data[16:] for _, data in frames] == [b"VP8 \3\0\0\0one\0", b"VP8 \4\0\0\0four"]


def test_other_files_are_refused() -> None:
    with pytest.raises(ValueError, match="no WebP"):
        list(webp.chunks(b"\x89PNG\r\n\x1a\n0000"))
    with pytest.raises(ValueError, match="needs a frame"):
        webp.animation([], (2, 2))


@pytest.mark.slow
@pytest.mark.skipif(browser.program() is None, reason="there is no Chromium on this machine")
def test_a_browser_shows_it(tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text("<body></body>")
    with browser.browser() as page:
        page.open(f"file://{tmp_path}/page.html")  # browsers decode pictures for pages that they trust
        page.until("document.readyState == 'complete' && location.protocol == 'file:'")
        page.size(64, 48)
        frames = []
        for colour in ("red", "lime", "blue"):
            page.run(f"document.body.style.background = '{colour}'")
            frames.append((page.still(60), 100))
        file = base64.b64encode(webp.animation(frames, (64, 48))).decode()
        seen = page.run(f"""(async () => {{
            const data = Uint8Array.from(atob('{file}'), (each) => each.charCodeAt(0));
            const decoder = new ImageDecoder({{ data, type: 'image/webp' }});
            await decoder.tracks.ready;
            const found = [];
            for (let frame = 0; frame < decoder.tracks.selectedTrack.frameCount; frame++) {{
                const {{ image }} = await decoder.decode({{ frameIndex: frame }});
                const context = new OffscreenCanvas(64, 48).getContext('2d');
                context.drawImage(image, 0, 0);
                const pixel = [...context.getImageData(32, 24, 1, 1).data];
                found.push(pixel.map((each) => Math.round(each / 255)));
            }}
            return found;
        }})()""")
    assert seen == [[1, 0, 0, 1], [0, 1, 0, 1], [0, 0, 1, 1]]
