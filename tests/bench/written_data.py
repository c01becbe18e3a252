"""Small data sets on disk, in the formats of the full ones, with numbers that are as they should be."""

import pickle
from pathlib import Path

import numpy as np
from PIL import Image

SIZE = (32, 64)
COUNTS = {"train": 8, "val": 4}
FARTHEST = 10.0  # metres, in rooms
LARGEST_DISPARITY = 32257 / 65535  # in streets


def write_nyuv2(root, *, dtype=np.float32, counts=COUNTS, size=SIZE, seed=0):
    """Write rooms as ``<root>/{train,val}/{image,label,depth,normal}/<number>.npy``; return the root."""
    folders = {"image": picture, "label": labels(13), "depth": depth(FARTHEST), "normal": normals}
    return _write_maps(root, folders, dtype, counts, size, seed)


def write_cityscapes(root, *, label="label_7", dtype=np.float32, counts=COUNTS, size=SIZE, seed=0):
    """Write streets as ``<root>/{train,val}/{image,label_7,depth}/<number>.npy``; return the root."""
    folders = {"image": picture, label: labels(7), "depth": depth(LARGEST_DISPARITY)}
    return _write_maps(root, folders, dtype, counts, size, seed)


def _write_maps(root, folders, dtype, counts, size, seed):
    rng = np.random.RandomState(seed)
    for part, count in counts.items():
        for folder, draw in folders.items():
            path = Path(root) / part / folder
            path.mkdir(parents=True)
            for number in range(count):
                np.save(path / f"{number}.npy", draw(rng, size).astype(dtype))
    return Path(root)


def picture(rng, size):
    """A picture ``(H, W, 3)`` of broad stripes with noise, in [0, 1]."""
    height, width = size
    ways = rng.uniform(0.05, 0.3, (2, 3))
    waves = np.sin(np.arange(height)[:, None, None] * ways[0] + np.arange(width)[None, :, None] * ways[1])
    return np.clip(0.5 + 0.3 * waves + 0.1 * rng.randn(height, width, 3), 0, 1)


def labels(classes):
    """Return what draws labels ``(H, W)``: patches of classes, a tenth of the pixels void."""

    def draw(rng, size):
        patches = rng.randint(classes, size=(-(-size[0] // 8), -(-size[1] // 8)))
        label = np.kron(patches, np.ones((8, 8)))[: size[0], : size[1]]
        return np.where(rng.random_sample(size) < 0.1, -1, label)

    return draw


def depth(largest):
    """Return what draws depths ``(H, W, 1)`` up to the largest, a tenth of them 0."""

    def draw(rng, size):
        valid = rng.random_sample((*size, 1)) > 0.1
        return rng.uniform(0.05, 1, (*size, 1)) * largest * valid

    return draw


def normals(rng, size):
    """Draw unit vectors ``(H, W, 3)``, a tenth of them zero."""
    vectors = rng.randn(*size, 3)
    valid = rng.random_sample((*size, 1)) > 0.1
    return vectors / np.linalg.norm(vectors, axis=-1, keepdims=True) * valid


ATTRIBUTES = [
    *("5_o_Clock_Shadow", "Arched_Eyebrows", "Attractive", "Bags_Under_Eyes", "Bald"),
    *("Bangs", "Big_Lips", "Big_Nose", "Black_Hair", "Blond_Hair"),
    *("Blurry", "Brown_Hair", "Bushy_Eyebrows", "Chubby", "Double_Chin"),
    *("Eyeglasses", "Goatee", "Gray_Hair", "Heavy_Makeup", "High_Cheekbones"),
    *("Male", "Mouth_Slightly_Open", "Mustache", "Narrow_Eyes", "No_Beard"),
    *("Oval_Face", "Pale_Skin", "Pointy_Nose", "Receding_Hairline", "Rosy_Cheeks"),
    *("Sideburns", "Smiling", "Straight_Hair", "Wavy_Hair", "Wearing_Earrings"),
    *("Wearing_Hat", "Wearing_Lipstick", "Wearing_Necklace", "Wearing_Necktie", "Young"),
]
CELEBA_LAYOUTS = {  # folders of the attributes, of the partition and of the pictures
    "nested": (".", ".", "img_align_celeba/img_align_celeba"),
    "original": ("Anno", "Eval", "Img/img_align_celeba"),
    "torchvision": ("celeba", "celeba", "celeba/img_align_celeba"),
}
CELEBA_COUNTS = {"train": 8, "validation": 4, "test": 4}


def write_celeba(root, *, layout="nested", lists="txt", counts=CELEBA_COUNTS, seed=0):
    """Write faces, which are stripes, and both lists as in one of the layouts, .txt or .csv; return the root."""
    rng = np.random.RandomState(seed)
    for_attributes, for_partition, for_pictures = (Path(root) / folder for folder in CELEBA_LAYOUTS[layout])
    for folder in (for_attributes, for_partition, for_pictures):
        folder.mkdir(parents=True, exist_ok=True)
    parts = [str(place) for place, split in enumerate(CELEBA_COUNTS) for _ in range(counts[split])]
    names = [f"{number:06d}.jpg" for number in range(1, len(parts) + 1)]
    values = [["1" if has else "-1" for has in row] for row in rng.randint(2, size=(len(names), 40))]
    for name in names:
        pixels = np.rint(255 * picture(rng, (218, 178))).astype(np.uint8)
        Image.fromarray(pixels).save(for_pictures / name, quality=90)
    if lists == "csv":
        attributes = [["image_id", *ATTRIBUTES], *([name, *row] for name, row in zip(names, values, strict=True))]
        partition = [["image_id", "partition"], *zip(names, parts, strict=True)]
        text = ["".join(",".join(row) + "\r\n" for row in rows) for rows in (attributes, partition)]
    else:
        rows = [f"{name} " + " ".join(f"{v:>2}" for v in row) for name, row in zip(names, values, strict=True)]
        attributes = "\n".join([str(len(names)), " ".join(ATTRIBUTES) + " ", *rows, ""])
        text = [attributes, "".join(f"{name} {part}\n" for name, part in zip(names, parts, strict=True))]
    (for_attributes / f"list_attr_celeba.{lists}").write_bytes(text[0].encode())
    (for_partition / f"list_eval_partition.{lists}").write_bytes(text[1].encode())
    return Path(root)


PAIRS = {
    "multimnist": "multi_mnist.pickle",
    "multifashion": "multi_fashion.pickle",
    "multifashionmnist": "multi_fashion_and_mnist.pickle",
}


def draw_pairs(counts=COUNTS, seed=0):
    """Return train pictures uint8 (N, 36, 36), train labels (N, 2), test pictures, test labels."""
    rng = np.random.RandomState(seed)
    arrays = []
    for count in counts.values():
        arrays += [rng.randint(256, size=(count, 36, 36)).astype(np.uint8), rng.randint(10, size=(count, 2))]
    return arrays


def write_pairs(root, name, arrays=None, *, protocol=2):
    """Write ready-made pairs as a pickle of four arrays; return its path."""
    path = Path(root) / PAIRS[name]
    path.write_bytes(pickle.dumps(tuple(draw_pairs() if arrays is None else arrays), protocol=protocol))
    return path
