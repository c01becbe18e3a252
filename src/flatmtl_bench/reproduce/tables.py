"""The nine tables of the paper: their data, rows and columns, in the names of recipes and metrics."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from flatmtl_bench.recipes.config import LABELS
from flatmtl_bench.reports.columns import DELTA_M, Column

ALONE = "stl"
"""The method of recipes that train one task alone."""


@dataclass(frozen=True)
class Row:
    """A row of a table.

    Attributes:
        printed: the method as it is printed there.
        method: in the names of recipes.
        flat: whether it is the flat form.
        combine: ablation of the flat form, as it stands in the names of recipes; none for the paper's own.
        quoted: whether its numbers are not the authors' own, but those of another paper or of public code.
        beside: whether it stands in our table only, for comparison.
    """

    printed: str
    method: str
    flat: bool = False
    combine: str = ""
    quoted: bool = False
    beside: bool = False

    @property
    def label(self) -> str:
        """The method as it is printed, told from the other form where both have one name.

        What the authors call "Ours" is named, as ours is something else here.
        """
        if self.printed.startswith("Ours"):
            return f'"{self.printed}" (F-{LABELS[self.method]})'
        return f"F-{self.printed}" if self.flat and not self.printed.endswith("-aggre") else self.printed

    def recipe(self, data: str, suffix: str = "") -> str:
        """Return the name of the recipe for a data set and protocol.

        Example:
            >>> Row("Ours (direct)", "mgda", flat=True, combine="direct").recipe("cityscapes", "_paper")
            'cityscapes_f_mgda_direct_paper'
        """
        return f"{data}_{'f_' * self.flat}{self.method}{self.combine and f'_{self.combine}'}{suffix}"


@dataclass(frozen=True)
class PaperTable:
    """A table of the paper.

    Attributes:
        number: of the table.
        title: what it shows.
        data: the data sets in the names of recipes -> as they are printed.
        rows: in the order of the paper.
        columns: what is printed of each row, by its name -> how our runs have it; given the tasks.
        measured: whether its metrics are measured of the trained models, and are not in the metrics of runs.
    """

    number: int
    title: str
    data: Mapping[str, str]
    rows: Sequence[Row]
    columns: Callable[[Sequence[str]], Mapping[str, Column]]
    measured: bool = False
    calls: bool = field(default=False, kw_only=True)
    """Whether it is about how often the aggregator is called."""

    @property
    def name(self) -> str:
        """What the command calls it."""
        return f"table{self.number}"


DIGITS = {"multifashion": "MultiFashion", "multimnist": "MultiMNIST", "multifashionmnist": "MultiFashion+MNIST"}
NYUV2, CITYSCAPES, CELEBA = {"nyuv2": "NYUv2"}, {"cityscapes": "CityScapes"}, {"celeba": "CelebA"}


def _both(*methods: tuple[str, str]) -> list[Row]:
    """Return plain and flat form of each method."""
    return [Row(*method, flat=flat) for method in methods for flat in (False, True)]


MGDA, PCGRAD, CAGRAD, IMTL = ("MGDA", "mgda"), ("PCGrad", "pcgrad"), ("CAGrad", "cagrad"), ("IMTL", "imtl_g")
STL = Row("STL", ALONE)
QUOTED = [
    Row(printed, method, quoted=True)
    for printed, method in (("SI", "si"), ("RLW", "rlw"), ("DWA", "dwa"), ("GradDrop", "graddrop"))
]
"""Numbers of tables 3 and 4 that stand in Navon et al. (2022), *Multi-task learning as a bargaining game*, ICML."""
SCENES = [
    Row("STL", ALONE, quoted=True),  # constants that stand in public code
    Row("LS", "ls"),
    *QUOTED,
    Row("UW", "uw"),
    Row("Nash-MTL", "nash_mtl", quoted=True),
    *_both(MGDA, PCGRAD, CAGRAD, IMTL),
]


def _accuracies(tasks: Sequence[str]) -> dict[str, Column]:
    return _each("accuracy", "accuracy", tasks, "higher", 100.0, ".2f", ", %")


def _each(
    printed: str, metric: str, tasks: Sequence[str], better: str, scale: float, form: str, unit: str = ""
) -> dict[str, Column]:
    """Return the columns of one metric of each task, and of its average."""
    names = [f"{metric}/{task}" for task in tasks]
    single = {
        f"{printed} task {k}": Column(f"{printed} {task}{unit}", [name], better, scale, form)
        for k, (task, name) in enumerate(zip(tasks, names, strict=True), start=1)
    }
    return {**single, f"{printed} average": Column(f"{printed} average{unit}", names, better, scale, form)}


def _error(tasks: Sequence[str]) -> dict[str, Column]:
    names = [f"error/{task}" for task in tasks]
    return {"mean classification error %": Column("mean error, %", names, "lower", form=".2f")}


_SCENES = {
    "segmentation": {
        "mIoU": Column("mIoU, %", ["miou/segmentation"], "higher", 100.0, ".2f"),
        "pixel accuracy": Column("pixel accuracy, %", ["pixel_accuracy/segmentation"], "higher", 100.0, ".2f"),
    },
    "depth": {
        "depth abs err": Column("depth abs err", ["abs_err/depth"], "lower", form=".4f"),
        "depth rel err": Column("depth rel err", ["rel_err/depth"], "lower", form=".4f"),
    },
    "normals": {
        "normal angle mean": Column("normals mean, °", ["mean/normals"], "lower", form=".2f"),
        "normal angle median": Column("normals median, °", ["median/normals"], "lower", form=".2f"),
        **{
            f"normal within {t}": Column(f"normals within {t}°, %", [f"within_{t}/normals"], "higher", 100.0, ".2f")
            for t in ("11.25", "22.5", "30")
        },
    },
}


def _scenes(tasks: Sequence[str]) -> dict[str, Column]:
    metrics = {printed: column for task in tasks for printed, column in _SCENES[task].items()}
    return {**metrics, "delta m %": DELTA_M}


def _brier(tasks: Sequence[str]) -> dict[str, Column]:
    return _each("Brier score", "brier", tasks, "lower", 1.0, ".4f")


def _ece(tasks: Sequence[str]) -> dict[str, Column]:
    return _each("expected calibration error", "ece", tasks, "lower", 1.0, ".4f")


def _ours(plain: str, *flat: tuple[str, str], method: str) -> list[Row]:
    """Return a plain row, and flat ones with their ablations, as a table about one method has them."""
    return [Row(plain, method), *(Row(printed, method, flat=True, combine=combine) for printed, combine in flat)]


CALIBRATED = [Row("ERM", "cagrad"), Row("Ours", "cagrad", flat=True)]
"""The paper does not say of which method tables 8 and 9 are; it is CAGrad in the ablation on the same data."""

TABLES = {
    table.name: table
    for table in (
        PaperTable(
            1,
            "accuracy on three Multi-MNIST data sets",
            DIGITS,
            [
                STL,
                Row("STL", ALONE, flat=True, beside=True),
                *_both(MGDA, PCGRAD, CAGRAD, IMTL, ("Nash-MTL", "nash_mtl"), ("FairGrad", "fairgrad")),
            ],
            _accuracies,
        ),
        PaperTable(
            2,
            "mean error of 40 attributes of faces",
            CELEBA,
            [STL, Row("LS", "ls"), Row("UW", "uw"), *_both(MGDA, PCGRAD, CAGRAD, IMTL)],
            _error,
        ),
        PaperTable(3, "three tasks on rooms", NYUV2, SCENES, _scenes),
        PaperTable(4, "two tasks on streets", CITYSCAPES, SCENES, _scenes),
        PaperTable(
            5,
            "MGDA: SAM gradients aggregated directly, or loss and flat gradients apart",
            CITYSCAPES,
            [
                Row("STL", ALONE, beside=True),  # of which Delta m is relative
                *_ours("ERM", ("Ours (direct)", "direct"), ("Ours (individual)", ""), method="mgda"),
            ],
            _scenes,
            calls=True,
        ),
        PaperTable(
            6,
            "CAGrad: ways to aggregate loss and flat gradients",
            DIGITS,
            [
                Row("CAGrad", "cagrad", beside=True),
                *_ours("", ("Second-aggre", "second"), ("Each-aggre", "each"), ("Ours", ""), method="cagrad")[1:],
            ],
            _accuracies,
            calls=True,
        ),
        PaperTable(
            7,
            "SAM on a single task or the summed loss",
            NYUV2,
            [*_both(("STL", ALONE), ("LS", "ls")), Row(*MGDA, flat=True), Row(*IMTL, flat=True)],
            _scenes,
        ),
        PaperTable(8, "Brier score", DIGITS, CALIBRATED, _brier, measured=True),
        PaperTable(9, "expected calibration error, ten bins", DIGITS, CALIBRATED, _ece, measured=True),
    )
}
"""By the name that the command has for them."""
