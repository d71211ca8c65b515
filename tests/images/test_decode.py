"""Files of every format, as cameras, browsers and attackers write them."""

from __future__ import annotations

import io
import struct
import zlib
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from picture_files import BLUE, GREEN, RED, WHITE, encoded, png, png_claiming, with_red_corner
from PIL import Image  # picture_files has skipped this module where there is none
from PIL.GifImagePlugin import GifImageFile

from mlx_backend.images import Detail, ImageError, Picture
from mlx_backend.images.decode import BYTES_PER_PIXEL, MAX_JPEG_SCANS, MAX_PIXELS, decode

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

LIMIT = 50_000_000
ORIENTATION = 0x0112
FTYP = b"\0\0\0\x18ftyp"


def decoded(data: bytes, detail: Detail = Detail.AUTO, max_pixels: int = LIMIT) -> Picture:
    picture, _, _ = decode(data, detail, max_pixels=max_pixels, reserve=lambda _: nullcontext())
    return picture


def pixel(picture: Picture, x: int, y: int) -> tuple[int, ...]:
    at = 3 * (y * picture.width + x)
    return tuple(picture.rgb[at : at + 3])


def is_close(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    return all(abs(a - b) <= 8 for a, b in zip(one, other, strict=True))


# -- formats ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("format_name", "mode", "options"),
    [
        ("PNG", "RGB", {}),
        ("PNG", "RGBA", {}),
        ("PNG", "P", {}),
        ("PNG", "RGB", {"compress_level": 0}),
        ("JPEG", "RGB", {"quality": 100, "subsampling": 0}),
        ("JPEG", "RGB", {"quality": 100, "subsampling": 0, "progressive": True}),
        ("JPEG", "CMYK", {"quality": 100, "subsampling": 0}),
        ("WEBP", "RGB", {"lossless": True}),
        ("WEBP", "RGBA", {"lossless": True}),
        ("GIF", "P", {}),
    ],
)
def test_a_picture_is_read_from_every_format(format_name: str, mode: str, options: dict[str, Any]) -> None:
    picture = decoded(encoded(with_red_corner(32, 16, mode), format_name, **options))
    assert (picture.width, picture.height, len(picture.rgb)) == (32, 16, 3 * 32 * 16)
    assert is_close(pixel(picture, 2, 2), RED)
    assert is_close(pixel(picture, 28, 12), BLUE)


@pytest.mark.parametrize("mode", ["1", "L", "LA"])
def test_shades_of_grey_have_three_equal_channels(mode: str) -> None:
    image = Image.new("L", (4, 4), 255).convert(mode)
    assert decoded(encoded(image)).rgb == bytes(WHITE) * 16


def test_sixteen_bits_of_grey_are_scaled_and_not_cut_off() -> None:
    shades = [0, 256, 0x7FFF, 0xFFFF]
    image = Image.frombytes("I;16", (4, 1), struct.pack("<4H", *shades))
    picture = decoded(encoded(image))
    assert [pixel(picture, x, 0)[0] for x in range(4)] == [0, 1, 0x7F, 0xFF]


def test_what_is_transparent_is_white_as_on_a_page() -> None:
    image = Image.new("RGBA", (4, 1), (0, 0, 0, 0))
    image.putpixel((1, 0), (0, 0, 0, 255))
    image.putpixel((2, 0), (255, 0, 0, 128))
    picture = decoded(encoded(image))
    assert pixel(picture, 0, 0) == WHITE
    assert pixel(picture, 1, 0) == (0, 0, 0)
    assert is_close(pixel(picture, 2, 0), (255, 127, 127))


def test_a_transparent_colour_of_a_palette_is_white_too() -> None:
    image = with_red_corner(mode="P")
    image.info["transparency"] = image.getpixel((7, 3))
    picture = decoded(encoded(image, "GIF"))
    assert is_close(pixel(picture, 0, 0), RED)
    assert pixel(picture, 7, 3) == WHITE


@pytest.mark.parametrize("format_name", ["GIF", "WEBP", "PNG"])
def test_of_an_animation_the_first_frame_is_shown(format_name: str) -> None:
    frames = [Image.new("RGB", (8, 8), colour) for colour in (RED, GREEN, BLUE)]
    data = encoded(frames[0], format_name, save_all=True, append_images=frames[1:], duration=10)
    assert is_close(pixel(decoded(data), 4, 4), RED)


def test_the_format_is_told_by_the_content_alone() -> None:
    assert decoded(encoded(with_red_corner(), "GIF")).width == 8  # whatever its name was
    with pytest.raises(ImageError, match="no image"):
        decoded(b"just some text that is called picture.png")


# -- which way up -----------------------------------------------------------------------------------------------

CORNERS = {1: (0, 0), 2: (1, 0), 3: (1, 1), 4: (0, 1), 5: (0, 0), 6: (1, 0), 7: (1, 1), 8: (0, 1)}
"""Where the top left of the file's pixels is shown, by the orientation that the camera noted."""


@pytest.mark.parametrize("format_name", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_photo_is_turned_as_its_camera_says(format_name: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    options = {"quality": 100, "subsampling": 0} if format_name == "JPEG" else {}
    picture = decoded(encoded(with_red_corner(32, 16), format_name, exif=exif, **options))
    assert (picture.width, picture.height) == ((32, 16) if orientation < 5 else (16, 32))
    right, bottom = CORNERS[orientation]
    corner = pixel(picture, right * (picture.width - 1), bottom * (picture.height - 1))
    assert max(abs(a - b) for a, b in zip(corner, RED, strict=True)) < 64  # WebP's colours bleed
    opposite = pixel(picture, (1 - right) * (picture.width - 1), (1 - bottom) * (picture.height - 1))
    assert max(abs(a - b) for a, b in zip(opposite, BLUE, strict=True)) < 64


@pytest.mark.filterwarnings("ignore:Corrupt EXIF")  # as decode.py has it outside of tests
@pytest.mark.parametrize(
    "exif", [b"Exif\0\0rubbish", b"Exif\0\0MM\0*\xff\xff\xff\xff", b"Exif\0\0II*\0\x08\0\0\0\xff\xff"]
)
def test_notes_of_a_camera_that_are_damaged_do_not_matter(exif: bytes) -> None:
    assert decoded(encoded(with_red_corner(32, 16), "JPEG", exif=exif)).width == 32


# -- how many pixels --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format_name", ["PNG", "JPEG"])
@pytest.mark.parametrize(
    ("detail", "shown"), [(Detail.LOW, (724, 362)), (Detail.AUTO, (1416, 708)), (Detail.HIGH, (3000, 1500))]
)
def test_detail_decides_how_many_pixels_are_shown(
    format_name: str, detail: Detail, shown: tuple[int, int]
) -> None:
    picture = decoded(encoded(Image.new("L", (3000, 1500), 90), format_name), detail)
    assert (picture.width, picture.height) == shown
    assert picture.width * picture.height <= (MAX_PIXELS[detail] or LIMIT)
    assert is_close(pixel(picture, 100, 100), (90, 90, 90))


def test_a_small_picture_is_not_enlarged() -> None:
    assert decoded(png(8, 4), Detail.HIGH).rgb == decoded(png(8, 4), Detail.LOW).rgb


def test_pictures_are_told_apart_by_pixels_and_size_not_by_their_files() -> None:
    image = with_red_corner(32, 16)
    one = decoded(encoded(image, compress_level=9)).digest
    assert one == decoded(encoded(image, "WEBP", lossless=True)).digest
    assert one != decoded(encoded(with_red_corner(16, 32))).digest
    assert Picture(2, 1, bytes(6)).digest != Picture(1, 2, bytes(6)).digest


# -- what is refused --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "no image"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "SVG"),
        (b"\xef\xbb\xbf<?xml version='1.0'?>\n<!-- x -->\n<SVG/>", "SVG"),
        (b"<!DOCTYPE html><html>", "web page"),
        (b"%PDF-1.7", "a PDF"),
        (FTYP + b"heic\0\0\0\0", "HEIC"),
        (FTYP + b"mif1\0\0\0\0", "HEIC"),
        (FTYP + b"avif\0\0\0\0", "AVIF"),
        (FTYP + b"isom\0\0\0\0", "a video"),
        (b"II*\0", "a TIFF"),
        (b"BM" + bytes(60), "a BMP"),
    ],
)
def test_a_file_that_is_nothing_for_a_model_is_called_by_its_name(data: bytes, says: str) -> None:
    with pytest.raises(ImageError, match=f"{says}.*PNG, JPEG, WebP or GIF") as raised:
        decoded(data)
    assert raised.value.code == "unsupported_image_format"


def whole_files() -> dict[str, bytes]:
    image = with_red_corner(64, 32)
    return {name: encoded(image, name) for name in ("PNG", "JPEG", "WEBP", "GIF")}


@pytest.mark.parametrize("format_name", ["PNG", "JPEG", "WEBP", "GIF"])
def test_a_file_cut_anywhere_is_refused_or_shown_whole_and_raises_nothing_else(format_name: str) -> None:
    data = whole_files()[format_name]
    outcomes: set[int | str] = set()
    for size in range(len(data)):
        try:
            outcomes.add(decoded(data[:size]).width)
        except ImageError as error:
            outcomes.add(error.code)
    assert (
        {"unsupported_image_format", "invalid_image"}
        <= outcomes
        <= {
            "unsupported_image_format",
            "invalid_image",
            64,  # what is missing comes behind the pixels
        }
    )


def test_a_truncated_jpeg_is_refused_in_a_sentence() -> None:
    data = encoded(Image.effect_noise((256, 256), 90).convert("RGB"), "JPEG")
    with pytest.raises(ImageError, match="JPEG image cannot be read: its file is damaged or incomplete"):
        decoded(data[: len(data) // 2])


@pytest.mark.parametrize("format_name", ["PNG", "JPEG", "WEBP", "GIF"])
def test_a_file_with_any_byte_changed_is_refused_or_shown_and_raises_nothing_else(format_name: str) -> None:
    data = whole_files()[format_name]
    for at in range(0, len(data), 3):
        damaged = bytearray(data)
        damaged[at] ^= 0xFF
        with suppress(ImageError):
            decoded(bytes(damaged), max_pixels=1_000_000)


@pytest.mark.parametrize(
    ("width", "height"), [(10_000, 10_000), (60_000, 60_000), (2_000_000_000, 2_000_000_000)]
)
def test_a_png_of_100_megapixels_is_refused_before_any_is_decoded(width: int, height: int) -> None:
    reserved: list[int] = []

    def reserve(nbytes: int) -> AbstractContextManager[None]:
        reserved.append(nbytes)
        return nullcontext()

    with pytest.raises(ImageError, match=r"pixels|damaged") as raised:
        decode(png_claiming(width, height), Detail.AUTO, max_pixels=LIMIT, reserve=reserve)
    assert not reserved
    if width == 10_000:
        assert str(raised.value) == (
            "The image has 10000 x 10000 pixels, 100 million; this server's limit is 50 million. Send a smaller one."
        )


def test_a_limit_above_pillows_own_can_be_set() -> None:
    class Reached(Exception):
        pass

    def reserve(nbytes: int) -> AbstractContextManager[None]:
        raise Reached(nbytes)

    with pytest.raises(Reached, match=str(200_000_000 * BYTES_PER_PIXEL)):
        decode(png_claiming(20_000, 10_000), Detail.AUTO, max_pixels=200_000_000, reserve=reserve)


def test_an_animated_bomb_is_read_up_to_its_first_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    frames = [Image.new("P", (1000, 1000), colour) for colour in range(10)]
    data = encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])
    seeks: list[int] = []
    monkeypatch.setattr(GifImageFile, "seek", lambda _image, frame: seeks.append(frame))
    reserved: list[int] = []

    def reserve(nbytes: int) -> AbstractContextManager[None]:
        reserved.append(nbytes)
        return nullcontext()

    decode(data, Detail.LOW, max_pixels=LIMIT, reserve=reserve)
    assert not seeks
    assert reserved == [1000 * 1000 * BYTES_PER_PIXEL]


def test_a_picture_that_is_a_line_is_refused() -> None:
    with pytest.raises(ImageError, match="200 times as long"):
        decoded(encoded(Image.new("L", (4020, 20))))
    assert decoded(encoded(Image.new("L", (4000, 20)))).width == 4000


def test_a_jpeg_that_goes_over_its_pixels_for_ever_is_refused() -> None:
    data = encoded(with_red_corner(64, 64), "JPEG", progressive=True)
    start = data.rindex(b"\xff\xda")
    scan = data[start : data.rindex(b"\xff\xd9")]
    many = data[:start] + scan * (MAX_JPEG_SCANS + 1) + b"\xff\xd9"
    with pytest.raises(ImageError, match=f"more than {MAX_JPEG_SCANS} passes"):
        decoded(many)


def test_memory_is_reserved_before_a_picture_is_decoded_and_given_back() -> None:
    reserved: list[Any] = []

    class Reservation:
        def __init__(self, nbytes: int) -> None:
            reserved.append(nbytes)

        def __enter__(self) -> None:
            reserved.append("begin")

        def __exit__(self, *_: object) -> None:
            reserved.append("end")

    def reserve(nbytes: int) -> AbstractContextManager[None]:
        return Reservation(nbytes)

    decode(png(40, 20), Detail.AUTO, max_pixels=LIMIT, reserve=reserve)
    with pytest.raises(ImageError, match="damaged"):
        decode(png(40, 20)[:80], Detail.AUTO, max_pixels=LIMIT, reserve=reserve)
    assert reserved == [40 * 20 * BYTES_PER_PIXEL, "begin", "end"] * 2


PROCESS = Path("/proc/self")


@pytest.mark.skipif(not (PROCESS / "clear_refs").exists(), reason="the system does not tell a peak of memory")
@pytest.mark.parametrize(
    ("format_name", "mode", "options"),
    [
        ("PNG", "RGBA", {}),
        ("JPEG", "CMYK", {"progressive": True}),
        ("WEBP", "RGB", {}),
        ("WEBP", "RGBA", {"lossless": True}),
        ("GIF", "P", {}),
    ],
)
def test_decoding_takes_no_more_memory_than_is_reserved(
    format_name: str, mode: str, options: dict[str, Any]
) -> None:
    def kilobytes(of: str) -> int:
        status = (PROCESS / "status").read_text()
        return next(int(line.split()[1]) for line in status.splitlines() if line.startswith(of))

    data = encoded(Image.new(mode, (2400, 2000)), format_name, **options)
    reserved: list[int] = []

    def reserve(nbytes: int) -> AbstractContextManager[None]:
        reserved.append(nbytes)
        return nullcontext()

    decode(png(), Detail.HIGH, max_pixels=LIMIT, reserve=lambda _: nullcontext())  # what Pillow imports
    (PROCESS / "clear_refs").write_text("5")  # the peak begins anew
    before = kilobytes("VmRSS")
    decode(data, Detail.HIGH, max_pixels=LIMIT, reserve=reserve)
    assert (kilobytes("VmHWM") - before) << 10 < reserved[0] + (8 << 20)


def test_nothing_is_written_to_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Any] = []
    monkeypatch.setattr(io, "open", lambda *arguments, **_: opened.append(arguments))
    monkeypatch.setattr("builtins.open", lambda *arguments, **_: opened.append(arguments))
    for data in whole_files().values():
        decoded(data)
    assert not opened


JPEG, GIF = encoded(with_red_corner(), "JPEG"), encoded(with_red_corner(mode="P"), "GIF")
GIF_HEAD = 13 + 3 * (2 << (GIF[10] & 7))
CHUNK = b"\0\0\0\0prVt" + zlib.crc32(b"prVt").to_bytes(4, "big")
CUT: dict[str, Callable[[int], bytes]] = {
    "PNG, before the pixels": lambda count: png()[:33] + CHUNK * count + png()[33:],
    "PNG, after the pixels": lambda count: png()[:-12] + CHUNK * count + png()[-12:],
    "JPEG": lambda count: JPEG[:2] + b"\xff\xfe\0\2" * count + JPEG[2:],
    "GIF": lambda count: GIF[:GIF_HEAD] + b"\x21\xfe" + b"\1a" * count + b"\0" + GIF[GIF_HEAD:],
}


@pytest.mark.parametrize("name", CUT)
def test_a_file_in_a_million_parts_is_refused_before_they_are_gone_through(name: str) -> None:
    assert decoded(CUT[name](5_000)).rgb
    with pytest.raises(ImageError, match="more parts than any picture has"):
        decoded(CUT[name](1_300_000))
