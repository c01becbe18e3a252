"""What ties checkpoints and results to the run that they belong to: its config, its seed and its data."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flatmtl_bench.recipes.config import Config
from flatmtl_bench.runs import RunError, RunFolder, digest


@dataclass(frozen=True)
class Provenance:
    """Of a run, to refuse what another one made.

    Attributes:
        config: the hash of the config.
        seed: as a text.
        data: of each split what tells its data from others.
        root: the folder of the data.
    """

    config: str
    seed: str
    data: Mapping[str, str]
    root: str

    @classmethod
    def of(cls, config: Config, data: Mapping[str, Any]) -> "Provenance":
        """Return that of a config and the data sets of its splits."""
        fingerprints = {split: dataset.fingerprint for split, dataset in data.items()}
        return cls(digest(config), str(config.seed), fingerprints, config.root or "data")

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint holds of it."""
        return {"data": dict(self.data), "config": self.config, "seed": self.seed}

    def check(self, path: str, state: Mapping[str, Any]) -> None:
        """Raise if the state that a checkpoint holds is not this one.

        Raises:
            RunError: naming the checkpoint and how it differs.
        """
        own = {"config": self.config, "seed": self.seed}
        if different := [
            f"{name} {state[name]!r:.80} instead of {own[name]!r}" for name in own if state[name] != own[name]
        ]:
            raise RunError(
                f"{path} is a checkpoint of another run: {', '.join(different)}. Remove it to go on from the "
                "checkpoint before it, or use --overwrite to start again."
            )
        self._check_data(path, state["data"])

    def check_result(self, folder: RunFolder) -> None:
        """Raise if the finished run in a folder was made with other data.

        Raises:
            RunError: naming the folder.
        """
        self._check_data(str(folder.path), folder.summary().get("fingerprints"))

    def _check_data(self, made: str, data: Mapping[str, str] | None) -> None:
        if data != self.data:
            raise RunError(
                f"{made} was made with other data than those in {self.root}. Give the --root that it was made with, "
                "choose another --out, or use --overwrite to start again."
            )
