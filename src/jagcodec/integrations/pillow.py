"""PIL images in messages: call `register_images` on both sides."""

from __future__ import annotations

from typing import Any

import numpy as np

from jagcodec._compiling import untraced
from jagcodec.integrations import needed
from jagcodec.wire.registry import register_type

with needed(__name__, "Pillow: pip install 'pillow>=10'"):
    from PIL import Image, ImageFile, PngImagePlugin


@untraced
def register_images() -> None:
    """Let PIL images be encoded, anywhere in a value: in `multi_modal_data`, for example.

    Example:
        >>> from PIL import Image
        >>> from jagcodec import decode, encode
        >>> from jagcodec.integrations.pillow import register_images
        >>> register_images()
        >>> image = Image.new("RGB", (3, 2), (255, 0, 7))
        >>> decode(encode({"images": [image]}))["images"][0] == image
        True

    An image arrives with its mode, size, pixels, palette and `info`; if `info` holds an object that
    cannot be encoded, `encode` raises. Pixels are sent raw, so the reader never parses an image
    file. An image opened from a file arrives as a plain `PIL.Image.Image`, without its file,
    `format` and further frames. Calling this twice is harmless.
    """
    register_type(Image.Image, "PIL.Image", to_state=_image_state, from_state=_image)
    Image.init()  # every format that this Pillow opens has a type of its own
    for cls in _file_types(ImageFile.ImageFile):
        register_type(cls, f"PIL.{cls.__name__}", to_state=_image_state, from_state=_image)
    # Text in the `info` of PNG files: a str subclass with a language.
    register_type(
        PngImagePlugin.iTXt,
        "PIL.iTXt",
        to_state=lambda text: (str.__str__(text), text.lang, text.tkey),
        from_state=lambda state: PngImagePlugin.iTXt(*state),
    )


def _file_types(base: type) -> list[type]:
    """All subclasses of a class, at any depth."""
    subclasses: list[type] = base.__subclasses__()
    return subclasses + [cls for each in subclasses for cls in _file_types(each)]


def _image_state(image: Image.Image) -> dict[str, Any]:
    pixels = np.frombuffer(image.tobytes(), dtype=np.uint8)  # loads pixels not yet read from a file
    state = {"mode": image.mode, "size": image.size, "pixels": pixels, "palette": None}
    if image.mode in ("P", "PA"):
        mode = image.im.getpalettemode()
        state["palette"] = (mode, image.im.getpalette(mode, mode))
    return {**state, "info": dict(image.info)}


def _image(state: Any) -> Image.Image:
    mode, (width, height), pixels = state["mode"], state["size"], state["pixels"]
    # Check the size before allocating memory: every mode needs at least one bit per pixel.
    if width < 0 or height < 0 or width * height > 8 * pixels.nbytes:
        raise ValueError(f"expected pixels of {width} x {height}, found {pixels.nbytes} bytes")
    image = Image.new(mode, (width, height))
    if width and height:
        image.frombytes(pixels.tobytes())
    if state["palette"] is not None:
        palette_mode, colours = state["palette"]
        image.putpalette(bytes(memoryview(colours)), palette_mode)
        image.load()  # applies the palette
    image.info = dict(state["info"])
    return image
