"""Pictures of pages for links on social media: title, summary and the name of the site."""

from functools import cache
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont

SIZE = (1200, 630)
MARGIN = 80
INK, PALE, PAPER, MARK = (236, 239, 244), (154, 165, 184), (22, 27, 38), (96, 165, 250)


def draw_card(file: Path, title: str, summary: str) -> None:
    """Write the picture of a page as PNG; text that does not fit ends with an ellipsis."""
    picture = Image.new("RGB", SIZE, PAPER)
    draw = ImageDraw.Draw(picture)
    draw.rectangle((0, 0, 16, SIZE[1]), fill=MARK)
    y = _write(draw, title, MARGIN, 72, INK, 3)
    _write(draw, summary, y + 24, 34, PALE, 4)
    draw.text((MARGIN, SIZE[1] - MARGIN - 40), "Postroom", MARK, _font(40))
    file.parent.mkdir(parents=True, exist_ok=True)
    picture.quantize(32).save(file, optimize=True)


def _write(draw: ImageDraw.ImageDraw, text: str, y: int, size: int, ink: Any, most: int) -> int:
    """Write lines of text; return where the next may begin."""
    font, lines = _font(size), [""]
    for word in text.split():
        line = f"{lines[-1]} {word}".strip()
        if font.getlength(line) > SIZE[0] - 2 * MARGIN and lines[-1]:
            lines.append(word)
        else:
            lines[-1] = line
    if len(lines) > most:
        lines = [*lines[: most - 1], lines[most - 1].rsplit(" ", 1)[0] + " …"]
    for line in lines:
        draw.text((MARGIN, y), line, ink, font)
        y += round(size * 1.25)
    return y


@cache
def _font(size: int) -> Any:
    return ImageFont.load_default(size)
