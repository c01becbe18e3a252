"""What a run is made of: one frozen dataclass whose fields are the flags of `flatmtl run`."""

import ast
import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Annotated, Any, Literal, get_type_hints

from tyro.conf import Positional, arg
from tyro.constructors import PrimitiveConstructorSpec

Option = bool | int | float | str | list[float] | None
LABELS = {
    "mean": "Mean",
    "sum": "Sum",
    "fixed": "Fixed",
    "random": "Random",
    "mgda": "MGDA",
    "upgrad": "UPGrad",
    "dualproj": "DualProj",
    "nash_mtl": "Nash-MTL",
    "fairgrad": "FairGrad",
    "cagrad": "CAGrad",
    "imtl_g": "IMTL-G",
    "config": "ConFIG",
    "aligned_mtl": "Aligned-MTL",
    "pcgrad": "PCGrad",
    "gradvac": "GradVac",
    "graddrop": "GradDrop",
    "ls": "LS",
    "si": "SI",
    "gls": "GLS",
    "rlw": "RLW",
    "dwa": "DWA",
    "uw": "UW",
    "imtl_l": "IMTL-L",
    "famo": "FAMO",
}
Split = Literal["train", "validation", "test"]
Source = Literal["auto", "full", "mnist5k", "npz", "pickle", "faces40", "scenes", "streets"]
Placement = Literal["corner", "jitter"]
Disparity = Literal["divide", "multiply"]
Preprocessing = Literal["rgb", "imagenet", "official"]
Averaging = Literal["pooled", "batches"]
"""Of depth and normals: over all pixels at once, or the mean over batches of the means of each."""
Combine = Literal["individual", "direct", "second", "each"]
LoggerName = Literal["tensorboard", "csv", "mlflow", "wandb"]
DEFAULT_LOGGERS: tuple[LoggerName, ...] = ("tensorboard", "csv")


def _options_from(words: list[str]) -> dict[str, Option]:
    """Return options from names and values in turn.

    Example:
        >>> _options_from(["c", "0.5", "rescale", "1+c2", "weights", "[1, 2]"])
        {'c': 0.5, 'rescale': '1+c2', 'weights': [1, 2]}
    """
    if len(words) % 2:
        raise ValueError(f"expected names and values in turn, e.g. c 0.5 rescale 1+c2; got {' '.join(words)}")
    return {name: _value(word) for name, word in zip(words[::2], words[1::2], strict=True)}


def _value(word: str) -> Option:
    try:
        return ast.literal_eval(word)
    except (ValueError, SyntaxError):
        return word


NAMES_AND_VALUES = PrimitiveConstructorSpec[dict[str, Option]](
    nargs="*",
    metavar="[NAME VALUE ...]",
    instance_from_str=_options_from,
    is_instance=lambda options: isinstance(options, dict),
    str_from_instance=lambda options: [str(word) for pair in options.items() for word in pair],
)


@dataclass(frozen=True)
class Data:
    """Which data, and how they are read. What is None is as the data set has it by itself."""

    name: str = "multimnist"
    """Data set: multimnist, multifashion, multifashionmnist, celeba, nyuv2, cityscapes; or one that is made on the
    spot: faces40, scenes, streets."""
    train_samples: int | None = None
    """Items to train on; None: all, or of digits and rendered pictures the usual number."""
    validation_samples: int | None = None
    """Items to validate on."""
    test_samples: int | None = None
    """Items to test on."""
    validation_share: float = 0.1
    """Share of the training data held out for validation; 0: no validation part."""
    download: bool = False
    """Fetch what is not there, for --source full of digits and garments."""
    unchecked: bool = False
    """Do not read every file before the training starts: look at names, sizes and shapes only."""
    augment: bool | None = None
    """Crop and flip the training pictures at random; scenes and streets only."""
    size: list[int] | None = None
    """Height and width of rendered pictures."""
    placement: Placement | None = None
    """Where the two pictures of Multi-MNIST lie: in the corners, or moved by up to 4 pixels in each direction."""
    same_label: bool | None = None
    """Whether both pictures of Multi-MNIST may carry one label."""
    disparity: Disparity | None = None
    """What a zoom does to the disparities of streets: multiply (right), or divide as in the authors' code."""
    preprocessing: Preprocessing | None = None
    """How pictures of faces are read: rgb in [0, 1], by ImageNet's means and deviations, or as in the authors' code."""
    logits: Literal[1, 2] | None = None
    """Outputs for each attribute of a face."""

    def __post_init__(self) -> None:
        for name in ("train_samples", "validation_samples", "test_samples"):
            samples = getattr(self, name)
            if samples is not None and samples < 1:
                raise ValueError(f"data.{name} must be at least 1, got {samples}. Leave it out for the usual number.")
        if self.size is not None and len(self.size) != 2:
            raise ValueError(f"data.size must be a height and a width, e.g. 64 64, got {self.size}.")
        if not 0 <= self.validation_share < 1:
            raise ValueError(f"data.validation_share must be at least 0 and below 1, got {self.validation_share}.")

    def options(self, split: Split) -> dict[str, Any]:
        """Return the options of :func:`flatmtl_bench.data.build` for one split: those that were chosen."""
        chosen = {
            "samples": getattr(self, f"{split}_samples"),
            "download": self.download or None,
            "check": False if self.unchecked else None,
            **{name: getattr(self, name) for name in OPTIONS},
        }
        return {"validation_share": self.validation_share} | {k: v for k, v in chosen.items() if v is not None}


OPTIONS = ("augment", "size", "placement", "same_label", "disparity", "preprocessing", "logits")
"""Fields of :class:`Data` that some data sets know."""


@dataclass(frozen=True)
class Method:
    """The multi-task method: an aggregator, and a perturbation if it is a flat one."""

    aggregator: str = "mean"
    """Name of the aggregator or loss weighting, as in the recipes of `flatmtl list`; or package.module:Class."""
    options: Annotated[dict[str, Option], NAMES_AND_VALUES] = field(default_factory=dict)
    """Options of the aggregator as names and values, e.g. c 0.5 rescale 1+c2; they replace the recipe's."""
    perturbation: Literal["none", "sam", "asam"] = "none"
    """none: the plain method; sam, asam: its flat form, with the radius --rho."""
    rho_heads: float | None = None
    """Radius of the heads; None: the same as --rho."""
    norm: Literal["separate", "joint"] = "separate"
    """One norm each for trunk and head (the paper), or one for both (the authors' Multi-MNIST code)."""
    combine: Combine = "individual"
    """How loss and flat gradients become one direction; individual: the paper."""
    flat_scale: Literal["linear", "raw"] = "linear"
    """Scale of the flat part for aggregators that are not of degree 1; raw: as printed in the paper."""

    @property
    def label(self) -> str:
        """The name in tables, with ``F-`` for a flat method."""
        return "F-" * (self.perturbation != "none") + LABELS.get(self.aggregator, self.aggregator)


@dataclass(frozen=True)
class Optimizer:
    """What turns the direction into a step."""

    name: Literal["adam", "adamw", "sgd"] = "adam"
    """Optimizer of torch.optim."""
    lr: float = 1e-3
    """Learning rate."""
    weight_decay: float = 0.0
    """Weight decay."""
    momentum: float = 0.0
    """Momentum; sgd only."""


@dataclass(frozen=True)
class Schedule:
    """How the learning rate changes while the run goes on."""

    name: Literal["constant", "cosine", "linear", "step"] = "constant"
    """constant; cosine, linear: down to zero at the end; step: it falls every so many epochs."""
    warmup_steps: int = 0
    """Steps over which the learning rate first rises to its full value."""
    every: int = 100
    """Epochs from one fall to the next; step only."""
    factor: float = 0.5
    """What the learning rate is multiplied by when it falls; step only."""

    def __post_init__(self) -> None:
        for name, value, least in (("warmup_steps", self.warmup_steps, 0), ("every", self.every, 1)):
            if value < least:
                raise ValueError(f"schedule.{name} must be at least {least}, got {value}.")
        if not 0.0 < self.factor <= 1.0:
            raise ValueError(f"schedule.factor must be above 0 and at most 1, got {self.factor}.")


@dataclass(frozen=True)
class EarlyStop:
    """Whether a run ends before its last epoch."""

    patience: int | None = None
    """Stop after so many epochs without a better score, the one that the protocol chooses by; None: never."""

    def __post_init__(self) -> None:
        if self.patience is not None and self.patience < 1:
            raise ValueError(f"early_stop.patience must be at least 1, got {self.patience}. Leave it out for no stop.")


@dataclass(frozen=True)
class Sharpness:
    """How the sharpness of the final model is measured, for plain and flat methods alike."""

    rho: float = 0.05
    """Radius of the worst-case step (SAM), for trunk and head each."""
    samples: int = 1024
    """Size of the fixed sample of the training data; 0: do not measure."""


@dataclass(frozen=True)
class Config:
    """Everything that decides the numbers of a run, and where it runs."""

    recipe: Annotated[Positional[str], arg(metavar="RECIPE")] = "multimnist_mean"
    """Recipe that the other values come from; `flatmtl list` shows all."""
    seed: int = 0
    """Seed of everything random: weights, train pairs, their order, the aggregator."""
    epochs: int = 200
    """Passes over the training data."""
    batch_size: int = 256
    """Samples in a step."""
    model: str = "resnet18"
    """Model: lenet, resnet18, resnet18_official, resnet50, resnet18_celeba, segnet, segnet_mtan, deeplab_resnet50; or
    package.module:factory, called with the outputs of each task and the number of input channels."""
    width: float = 1.0
    """Width of the layers of segnet and segnet_mtan, as a share of their own, e.g. 0.125."""
    source: Source = "auto"
    """Where the data come from; auto: the full data if present, else data of the same kind that need no files."""
    root: str | None = None
    """Folder of the data; None: data."""
    task: str | None = None
    """Train this task alone (single-task learning); None: all tasks of the data."""
    rho: float = 0.0
    """Radius of the perturbation; see --method.perturbation."""
    shared: Literal["reached", "all"] = "reached"
    """What is aggregated: parameters that two tasks reach; or all outside the heads, as in the authors' code for
    scenes, where MTAN's attention belongs to one task."""
    averaging: Averaging = "pooled"
    """Depth and normal metrics: of all pixels at once, or the mean over batches as in the authors' scripts."""
    protocol: Literal["honest", "paper", "official"] = "honest"
    """Which test result counts: of the best validation epoch, the last ten's mean, of the best test epoch."""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """Device; auto: an accelerator if there is one."""
    precision: Literal["32-true", "64-true", "bf16-true", "bf16-mixed", "16-mixed"] = "32-true"
    """Precision of the forward and backward passes, as in Lightning Fabric."""
    devices: int | None = None
    """Devices on each machine, one process for each; None: as many as torchrun has started, else 1."""
    num_nodes: int = 1
    """Machines; torchrun knows them by itself."""
    strategy: Literal["auto", "ddp"] = "auto"
    """How several processes work together, as in Lightning Fabric; auto: ddp if there are several."""
    workers: int = 0
    """Processes that load data beside each training process; 0: it loads by itself."""
    loggers: list[LoggerName] = field(default_factory=lambda: list(DEFAULT_LOGGERS))
    """Who is told the metrics of each epoch, beside metrics.jsonl; no name: nobody."""
    data: Data = field(default_factory=Data)
    method: Method = field(default_factory=Method)
    optimizer: Optimizer = field(default_factory=Optimizer)
    schedule: Schedule = field(default_factory=Schedule)
    early_stop: EarlyStop = field(default_factory=EarlyStop)
    sharpness: Sharpness = field(default_factory=Sharpness)

    def __post_init__(self) -> None:
        for name, value, least in (
            ("seed", self.seed, 0),
            ("number of epochs", self.epochs, 1),
            ("batch size", self.batch_size, 1),
            ("number of devices", 1 if self.devices is None else self.devices, 1),
            ("number of machines", self.num_nodes, 1),
            ("number of workers", self.workers, 0),
        ):
            if value < least:
                raise ValueError(f"the {name} must be at least {least}, got {value}.")
        for name, radius in (("rho", self.rho), ("sharpness.rho", self.sharpness.rho)):
            if radius < 0:
                raise ValueError(f"{name} must not be negative, got {radius}. For a plain method choose its recipe.")
            if not math.isfinite(radius):
                raise ValueError(f"{name} must be a finite number, got {radius}. Useful radii lie between 0.005 and 5.")
        if self.sharpness.samples < 0 or (self.sharpness.samples and not self.sharpness.rho):
            raise ValueError(
                f"sharpness is measured with --sharpness.rho above 0 on at least one sample, got rho "
                f"{self.sharpness.rho} and {self.sharpness.samples} samples. Not to measure it: --sharpness.samples 0."
            )
        if self.rho > 0 and self.method.perturbation == "none":
            raise ValueError(
                f"rho is {self.rho}, but {self.recipe} is a plain method (--method.perturbation none). "
                "Choose its flat form, or --method.perturbation asam."
            )
        if self.protocol == "honest" and not self.data.validation_share:
            raise ValueError(
                "the protocol honest chooses the epoch by the score on validation data, but --data.validation-share is "
                "0. Hold some out, or use --protocol paper."
            )
        if self.protocol == "paper" and self.early_stop.patience is not None:
            raise ValueError(
                "the protocol paper chooses no epoch by a score, so --early-stop.patience has none to watch. "
                "Use --protocol honest, or leave it out."
            )

    @property
    def label(self) -> str:
        """The name of the method in tables."""
        return self.method.label if self.task is None else "F-" * (self.method.perturbation != "none") + "STL"

    def to_dict(self) -> dict[str, Any]:
        """Return plain values that JSON can hold; :meth:`from_dict` is the inverse."""
        return dataclasses.asdict(self)

    def flat(self) -> dict[str, Any]:
        """Return the values by their dotted names, which are those of the flags; of options each has its own.

        Example:
            >>> Config(method=Method("cagrad", {"c": 0.2})).flat()["method.options.c"]
            0.2
        """
        return _flat(self.to_dict())

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Config":
        """Return the config that :meth:`to_dict` was called on.

        Raises:
            ValueError: if a value is missing or not one of a config, e.g. of another version.
        """
        return _from_dict(cls, values)


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in values.items():
        found |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return found


@cache
def kinds(cls: type) -> Mapping[str, Any]:
    """Return of what kind the value of each field of a dataclass is."""
    return get_type_hints(cls)


def _from_dict(cls: type, values: Mapping[str, Any]) -> Any:
    types = kinds(cls)
    if set(values) != set(types):
        unknown, missing = sorted(set(values) - set(types)), sorted(set(types) - set(values))
        raise ValueError(f"not a {cls.__name__} of this version of flatmtl: unknown {unknown}, missing {missing}.")
    nested = {name for name, kind in types.items() if dataclasses.is_dataclass(kind)}
    return cls(**{n: _from_dict(types[n], v) if n in nested else v for n, v in values.items()})
