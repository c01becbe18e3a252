"""The project as a newcomer finds it: imports, README, examples, Makefile, citation."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from flatmtl import SAM, FlatMTL, TaskParameters, split_parameters
from flatmtl.aggregators import build
from flatmtl_bench.models import MultiHead

ROOT = Path(__file__).parents[1]


def run(*command, **options) -> subprocess.CompletedProcess:
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False, **options)


def test_the_library_imports_torch_and_the_standard_library_only():
    code = """
import sys, torch
before = set(sys.modules)
import flatmtl, flatmtl.aggregators
new = {name.partition(".")[0] for name in set(sys.modules) - before}
print(sorted(new - set(sys.stdlib_module_names) - {"torch", "flatmtl"}))
"""
    done = run(sys.executable, "-c", code)
    assert done.stdout.strip() == "[]", done.stderr


def test_the_library_imports_without_numpy():
    code = """
import sys, warnings
sys.modules["numpy"] = None
warnings.simplefilter("ignore")
import torch
from flatmtl import SAM, FlatMTL, split_parameters
from flatmtl.aggregators import CAGrad
model = torch.nn.Linear(2, 2)
def closure(tasks):
    out = model(torch.ones(1, 2))
    return {t: out[0, i].square() for i, t in enumerate(tasks)}
parameters = split_parameters(model, closure, ["a", "b"])
print(FlatMTL(CAGrad(), SAM(0.1)).backward(closure, parameters).tasks)
"""
    done = run(sys.executable, "-c", code)
    assert done.stdout.strip() == "('a', 'b')", done.stderr


class Toy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.1))
        self.heads = nn.ModuleDict({"seg": nn.Linear(8, 3), "depth": nn.Linear(8, 1)})


def example_in(page: str, name: str) -> str:
    """Return the Python code between the markers of that name."""
    text = (ROOT / page).read_text()
    return re.search(rf"<!-- {name}:begin -->\n```python\n(.*?)```", text, re.DOTALL).group(1)


def test_the_aggregators_of_ones_own_in_the_docs_run_as_they_stand():
    names: dict = {}
    exec(example_in("docs/methods.md", "own"), names)
    model = nn.Linear(3, 2)
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))

    def closure(tasks):
        return {t: model(x)[:, i].square().mean() for i, t in enumerate(tasks)}

    parameters = split_parameters(model, closure, ["a", "b"])
    for aggregator in (names["Shortest"](), names["Hardest"]()):
        mtl = names["FlatMTL"](aggregator, names["SAM"](0.05))
        weights = mtl.backward(closure, parameters).weights_loss
        assert sorted(weights.tolist()) == [0.0, 1.0]
        names["FlatMTL"](aggregator).load_state_dict(names["FlatMTL"](aggregator).state_dict())


@pytest.mark.parametrize("name", ["uw", "dwa", "famo", "cagrad"])
def test_the_loop_of_the_docs_is_for_every_aggregator(name):
    model = Toy()
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randn(16, 6, generator=generator) for _ in range(4)]
    loss_fn = {"seg": F.cross_entropy, "depth": F.l1_loss}
    loader = [(x, {"seg": x[:, :3].argmax(1), "depth": x.sum(1, keepdim=True)}) for x in batches]

    def closure(tasks):
        return {t: loss_fn[t](model.heads[t](model.encoder(loader[0][0])), loader[0][1][t]) for t in tasks}

    names = {
        "torch": torch,
        "FlatMTL": FlatMTL,
        "SAM": SAM,
        "model": model,
        "loader": loader,
        "loss_fn": loss_fn,
        "weighting": build(name, **({"tasks": 2} if name in ("uw", "famo") else {})),
        "parameters": split_parameters(model, closure, ["seg", "depth"]),
        "epochs": 3,
    }
    exec(example_in("docs/methods.md", "loop"), names)
    assert set(names["checkpoint"]) == {"model", "optimizer", "mtl"}
    weights = names["mtl"].backward(names["closure"], names["parameters"]).weights_loss
    assert name == "cagrad" or not torch.allclose(weights[0], weights[1], rtol=1e-6)


def test_the_analyses_in_the_docs_run_as_they_stand():
    model = MultiHead(nn.Sequential(nn.Linear(6, 8), nn.Tanh()), {"seg": nn.Linear(8, 3), "depth": nn.Linear(8, 1)})
    data = [(x, {"seg": x[:3].argmax(), "depth": x.sum(0, keepdim=True)}) for x in torch.randn(100, 6)]
    names = {
        "model": model,
        "dataset": data,
        "losses": {"seg": F.cross_entropy, "depth": F.mse_loss},
        "parameters": TaskParameters(model.encoder.parameters(), {t: h.parameters() for t, h in model.heads.items()}),
        "test_losses": lambda: {"weight": model.encoder[0].weight.norm().item()},
    }
    exec(example_in("docs/figures.md", "analysis"), names)
    assert set(names["rises"]) == {"seg", "depth"}
    assert all(rise > 0.0 for rise in names["rises"].values())
    assert names["surfaces"]["weight"].shape == (3, 3)


def test_the_example_of_the_readme_runs_as_it_stands(tmp_path):
    example = example_in("README.md", "example")
    assert len(example.strip().splitlines()) <= 14
    model = Toy()
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randn(16, 6, generator=generator) for _ in range(4)]
    loader = [(x, {"seg": x[:, :3].argmax(1), "depth": x.sum(1, keepdim=True)}) for x in batches]
    names = {
        "model": model,
        "loader": loader,
        "loss_fn": {"seg": F.cross_entropy, "depth": F.l1_loss},
        "optimizer": torch.optim.Adam(model.parameters()),
    }
    before = [p.detach().clone() for p in model.parameters()]
    file = tmp_path / "example.py"
    file.write_text(example)
    exec(compile(file.read_text(), str(file), "exec"), names)
    assert names["result"].tasks == ("seg", "depth")
    assert all(not torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.name)
def test_examples_run(example):
    lightnings_own = "ignore:`isinstance(treespec, LeafSpec)` is deprecated:FutureWarning"
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}  # with more, several at a time take minutes
    done = run(sys.executable, "-W", "error", "-W", lightnings_own, str(example), env=one_thread)
    assert done.returncode == 0, done.stderr
    assert done.stdout


@pytest.mark.parametrize(
    ("prints", "message"),
    [("old", "flatmtl needs Python 3.11 or newer, but '{}' is older"), ("", "no Python found as '{}'")],
)
def test_a_python_that_is_too_old_or_missing_gets_one_clear_line(tmp_path, prints, message):
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho {prints}\n")
    python.chmod(0o755)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MAKE")}
    done = run("make", "setup", f"PYTHON={python}", f"VENV={tmp_path / 'venv'}", env=environment)
    assert done.returncode != 0
    assert message.format(python) in done.stderr.splitlines()[0]
    assert "PYTHON=python3.12" in done.stderr.splitlines()[0]
    assert not (tmp_path / "venv").exists()


def test_version_is_the_same_everywhere():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert f"version: {version}\n" in (ROOT / "CITATION.cff").read_text()


def test_no_runs_checkpoints_data_or_pages_are_tracked():
    if not (ROOT / ".git").exists():
        pytest.skip("this is no git checkout")
    tracked = run("git", "ls-files").stdout.split()
    assert not [name for name in tracked if re.search(r"^(runs|data|site)/|\.(pt|npz|pickle|html)$", name)]


def test_numbers_in_the_readme_are_those_of_the_committed_results():
    done = run(sys.executable, "docs/generate.py", "--check")
    assert done.returncode == 0, done.stderr
