"""Makes the images of the parity study from an unpacked Debian package.

    prepare.py IMAGES OUT [SIDE [mirrored]]

IMAGES is `data/core/images` of the package wesnoth-1.16-data. A class is the first two levels of a path (the
first alone, for files that lie there) with at least 100 images. Images are flattened on grey, resized to
SIDE x SIDE (84 unless given: 21 KB each) and written as BMP, below OUT/train and OUT/test, with a folder for
each class. In path order classes follow each other, and a sample has the same number whatever SIDE is.

An image belongs to the test set iff sha256(its relative path)[0] < 256 // 5. With `mirrored`, each training
image is written a second time with left and right exchanged: two samples of one class.
"""

from __future__ import annotations

import hashlib
import sys
from collections import defaultdict
from pathlib import Path

from PIL import Image, ImageOps

SIDE = 84
LEAST = 100
GREY = (128, 128, 128)


def class_of(path: str) -> str:
    parts = path.split("/")
    return "-".join(parts[:2]) if len(parts) > 2 else parts[0]


def flat(path: Path, side: int) -> Image.Image:
    with Image.open(path) as image:
        rgba = image.convert("RGBA")
    canvas = Image.new("RGB", rgba.size, GREY)
    canvas.paste(rgba, mask=rgba.getchannel("A"))
    return canvas.resize((side, side), Image.Resampling.BILINEAR)


def main() -> None:
    images, out, side = Path(sys.argv[1]), Path(sys.argv[2]), int((sys.argv[3:] or [SIDE])[0])
    mirrored = sys.argv[4:] == ["mirrored"]
    classes: dict[str, list[str]] = defaultdict(list)
    for file in images.rglob("*"):
        if file.suffix.lower() in (".png", ".jpg", ".webp"):
            path = file.relative_to(images).as_posix()
            classes[class_of(path)].append(path)
    chosen = sorted(name for name, paths in classes.items() if len(paths) >= LEAST)
    counts = {"train": 0, "test": 0}
    for number, name in enumerate(chosen):
        for i, path in enumerate(sorted(classes[name])):
            part = "test" if hashlib.sha256(path.encode()).digest()[0] < 256 // 5 else "train"
            to = out / part / f"{number:02}-{name}" / f"{i:04}.bmp"
            to.parent.mkdir(parents=True, exist_ok=True)
            image = flat(images / path, side)
            image.save(to)
            counts[part] += 1
            if mirrored and part == "train":
                ImageOps.mirror(image).save(to.with_stem(f"{to.stem}-mirrored"))
                counts[part] += 1
    print(f"{len(chosen)} classes, {counts['train']} train, {counts['test']} test")


if __name__ == "__main__":
    main()
