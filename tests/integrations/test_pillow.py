"""PIL images on the wire, next to what Pillow's own pickling brings back."""

import io
import pickle
from typing import Any

import numpy as np
import pytest

from jagcodec import decode, encode

pytest.importorskip("PIL", reason="Pillow is not installed: pip install '.[pillow]'")

from PIL import Image, PngImagePlugin

from jagcodec.integrations import pillow
from jagcodec.integrations.pillow import register_images

MODES = ["1", "L", "P", "RGB", "RGBA", "CMYK", "YCbCr", "HSV", "I", "F", "LA", "PA", "I;16", "La"]

register_images()
register_images()


def make_image(mode, size=(5, 7)):
    random = np.random.default_rng(0)
    if mode in ("I;16", "La", "PA"):
        image = Image.new(mode, size)
        image.frombytes(random.bytes(len(image.tobytes())))
        return image
    return Image.fromarray(random.integers(0, 256, (*size[::-1], 3), dtype=np.uint8)).convert(mode)


def from_file(name):
    """An image that is still in its file."""
    buffer, options = io.BytesIO(), {}
    if name == "PNG":
        options["pnginfo"] = PngImagePlugin.PngInfo()
        options["pnginfo"].add_itxt("Title", "Grüße", "de", "Titel")
    make_image("RGB").save(buffer, name, **options)
    return Image.open(buffer)


IMAGES = [
    *map(make_image, MODES),
    make_image("RGBA").quantize(8),  # a palette with alpha
    *(Image.new("RGB", (w, h)) for w in (0, 1, 4) for h in (0, 1)),
    *map(from_file, ["PNG", "JPEG", "GIF", "BMP", "WEBP"]),
]


@pytest.mark.parametrize("image", IMAGES)
def test_every_image_comes_back_as_a_plain_one(image):
    image.info["note"] = ("a", 1)
    found = decode([bytes(frame) for frame in encode({"images": [image]})])["images"][0]
    assert type(found) is Image.Image
    assert (found.mode, found.size, found.info) == (image.mode, image.size, image.info)
    pixels = image.tobytes()
    assert found.tobytes() == pixels
    if type(image) is Image.Image:
        assert found == image
        if pixels:  # Pillow 10 cannot unpickle an image without any
            assert found == pickle.loads(pickle.dumps(image))
    if image.mode == "P":
        assert found.im.getpalettemode() == image.im.getpalettemode()
        assert found.convert("RGBA").tobytes() == image.convert("RGBA").tobytes()
    if "Title" in image.info:
        assert (found.info["Title"].lang, found.info["Title"].tkey) == ("de", "Titel")
    if pixels:
        found.putpixel((0, 0), 0)
        found.putpixel((found.width - 1, found.height - 1), 1)
        assert image.tobytes() == pixels  # memory of its own


WRONG: dict[str, list[Any]] = {
    "mode": ["XYZ", None],
    "size": [(-1, 7), (10**9, 10**9), (5, 8), (5,), ("5", 7)],
    "pixels": [b"\0" * 35, np.zeros(34, dtype=np.uint8)],
    "palette": [("RGB", "text")],
    "info": [None],
}


def test_a_state_that_is_no_image_is_refused():
    good = pillow._image_state(make_image("P"))
    assert pillow._image(good) == make_image("P")
    for name, values in WRONG.items():
        for value in values:
            with pytest.raises((ValueError, TypeError, AttributeError)):
                pillow._image({**good, name: value})
