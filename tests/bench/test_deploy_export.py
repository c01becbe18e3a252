"""`flatmtl export`: torch alone runs what is written, to the numbers of the model; the weights are the same bits."""

import json
import subprocess
import sys
from importlib.metadata import version
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load, load_file
from tests.bench.small import ENVIRONMENT, fit, lines, small_config
from tests.bench.test_trainer_scenes import config as rooms
from tests.bench.tiny import Tiny
from tests.test_project import example_in
from torch import nn

from flatmtl_bench import cli, models
from flatmtl_bench.analysis.trained import trained
from flatmtl_bench.deploy.export import Refused, program, weights
from flatmtl_bench.models import MODELS
from flatmtl_bench.recipes import Config
from flatmtl_bench.reports.reading import read

DIGITS, PIXELS = {"left": 10, "right": 10}, {"segmentation": 7, "depth": 1}
FORMS = {  # heads, shape of an input, width
    "lenet": (DIGITS, (1, 36, 36), 1.0),
    "resnet18": (DIGITS, (1, 36, 36), 1.0),
    "resnet18_official": (DIGITS, (1, 36, 36), 1.0),
    "resnet50": ({"Bald": 1, "Young": 1}, (3, 32, 32), 1.0),
    "resnet18_celeba": ({"Bald": 2, "Young": 2}, (3, 64, 64), 1.0),
    "segnet": (PIXELS, (3, 32, 64), 1 / 16),
    "segnet_mtan": (PIXELS, (3, 32, 64), 1 / 16),
    "deeplab_resnet50": (PIXELS, (3, 32, 32), 1.0),
}
LARGE = ("resnet50", "deeplab_resnet50")
SIZES = (1, 2, 3, 7)
ALONE = """
import sys
import torch
for name in sys.argv[1:]:
    model = torch.export.load(f"{name}.pt2").module()
    with torch.no_grad():
        outputs = [model(inputs) for inputs in torch.load(f"{name}.inputs")]
    torch.save(outputs, f"{name}.outputs")
print([name for name in sys.modules if name.startswith("flatmtl")])
"""


class Branching(Tiny):
    """Does something else for bright pictures: a branch that no program of torch.export has."""

    def forward(self, x, tasks=None):
        return super().forward(2 * x if x.mean() > 0.5 else x, tasks)


class Random(Tiny):
    """Adds noise in eval mode, too."""

    def forward(self, x, tasks=None):
        return super().forward(x + torch.rand(()), tasks)


class OneSize(Tiny):
    """Treats a single picture in another way."""

    def forward(self, x, tasks=None):
        return super().forward(2 * x if len(x) == 1 else x, tasks)


def export(*words, code=0):
    assert cli.main(["export", *map(str, words)]) == code


def used(model, shape):
    """Return a model in eval mode whose batch norms have seen something."""
    with torch.no_grad():
        model.train()(torch.rand(4, *shape))
    return model.eval()


def deployed(model, heads, shape, name="own"):
    run = SimpleNamespace(config=SimpleNamespace(model=name))
    return SimpleNamespace(model=model, objectives=heads, shape=shape, run=run)


def alone(folder, *names):
    """Let a process that has torch alone run programs, each on its inputs."""
    done = subprocess.run(
        [sys.executable, "-c", ALONE, *names],
        cwd=folder,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", "")


def tried(folder, names):
    """Return models, and what programs of them gave elsewhere: name -> model, inputs, outputs."""
    made = {}
    for name in names:
        heads, shape, width = FORMS[name]
        torch.manual_seed(0)
        model = used(models.build(name, heads, in_channels=shape[0], width=width), shape)
        made[name] = model, [torch.rand(size, *shape) for size in SIZES]
        (folder / f"{name}.pt2").write_bytes(program(deployed(model, heads, shape)))
        torch.save(made[name][1], folder / f"{name}.inputs")
    alone(folder, *names)
    return {name: (*pair, torch.load(folder / f"{name}.outputs")) for name, pair in made.items()}


def check_same(name, model, inputs, outputs):
    for batch, found in zip(inputs, outputs, strict=True):
        with torch.no_grad():
            expected = model(batch)
        assert list(found) == list(expected) == list(FORMS[name][0])
        for task, output in expected.items():
            largest = output.abs().max()
            assert largest > 0
            assert (found[task] - output).abs().max() <= 1e-6 * largest


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """What all but the largest models gave elsewhere."""
    return tried(tmp_path_factory.mktemp("programs"), [name for name in FORMS if name not in LARGE])


def test_there_is_a_form_for_every_model():
    assert list(FORMS) == list(MODELS)


@pytest.mark.parametrize("name", [name for name in FORMS if name not in LARGE])
def test_torch_alone_gives_the_outputs_of_the_model_for_any_batch(programs, name):
    check_same(name, *programs[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", LARGE)
def test_torch_alone_gives_the_outputs_of_a_large_model(tmp_path, name):
    check_same(name, *tried(tmp_path, [name])[name])


@pytest.mark.parametrize("name", ["lenet", "segnet_mtan", "resnet18_celeba"])
def test_weights_are_the_same_bits_in_a_model_built_anew(programs, name):
    model, heads, (shape, width) = programs[name][0], FORMS[name][0], FORMS[name][1:]
    other = models.build(name, heads, in_channels=shape[0], width=width)
    other.load_state_dict(load(weights(model)))
    for key, value in model.state_dict().items():
        assert torch.equal(other.state_dict()[key], value)
        assert other.state_dict()[key].dtype == value.dtype


def test_weights_that_two_names_share_are_under_both():
    layer = nn.Linear(3, 3)
    found = load(weights(nn.ModuleDict({"a": layer, "b": layer})))
    assert sorted(found) == ["a.bias", "a.weight", "b.bias", "b.weight"]
    assert torch.equal(found["a.weight"], found["b.weight"])


def test_a_state_that_is_no_tensor_is_refused():
    class Counting(nn.Linear):
        def get_extra_state(self):
            return {"seen": 3}

    with pytest.raises(ValueError, match=r"_extra_state of the model's state_dict are no tensors"):
        weights(Counting(2, 2))


@pytest.mark.parametrize("kind", [Branching, Random, OneSize])
def test_a_program_that_would_do_something_else_is_refused(kind, capfd):
    with pytest.raises(Refused, match=r"torch.export (refuses own|takes down something else)"):
        program(deployed(kind({"left": 2}, 1).eval(), {"left": 2}, (1, 8, 8)))
    said = capfd.readouterr()
    assert (said.out, said.err) == ("", "")


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """The folder of a run, and of what it was exported to."""
    out = tmp_path_factory.mktemp("digits")
    path = fit(out / "runs", small_config(epochs=3))
    export(path, "--out", out / "made" / "here")
    return path, out / "made" / "here"


def test_the_files_are_those_of_the_epoch_that_counts(digits, tmp_path):
    path, made = digits
    model = trained(path)
    inputs = [torch.stack([model.dataset[index][0] for index in range(size)]) for size in SIZES]
    torch.save(inputs, tmp_path / "model.inputs")
    (tmp_path / "model.pt2").write_bytes((made / "model.pt2").read_bytes())
    alone(tmp_path, "model")
    for batch, found in zip(inputs, torch.load(tmp_path / "model.outputs"), strict=True):
        with torch.no_grad():
            expected = model.model(batch)
        for task, output in expected.items():
            torch.testing.assert_close(found[task], output, rtol=1e-6, atol=1e-6)
    for key, value in load_file(made / "model.safetensors").items():
        assert torch.equal(model.model.state_dict()[key], value)


def test_the_description_says_what_a_user_has_to_know(digits):
    path, made = digits
    found, run = json.loads((made / "model.json").read_text()), read(path)
    epoch = run.summary["epochs"][0]
    assert (found["run"], found["epoch"], found["model"], found["data"]) == (path.name, epoch, "lenet", "multimnist")
    assert found["input"]["shape"] == run.summary["input"] == [1, 36, 36]
    assert (found["input"]["channels"], found["input"]["range"]) == ("gray", [0.0, 1.0])
    assert found["tasks"]["left"]["classes"] == list("0123456789")
    assert found["tasks"]["right"]["outputs"] == 10
    (row,) = [row for row in lines(path / "metrics.jsonl") if row["epoch"] == epoch]
    assert found["metrics"] == {name: row[name] for name in row if name.startswith(("test/", "validation/"))}
    assert Config.from_dict(found["config"]) == run.config
    assert found["exported_with"]["torch"] == version("torch")
    assert (found["files"], found["refused"]) == (["model.safetensors", "model.pt2"], None)


def test_the_example_of_the_docs_runs_beside_the_files(digits):
    code = example_in("docs/deploy.md", "alone")
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=digits[1],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [f"{task} logits of the classes (softmax) (5, 10)" for task in ("left", "right")]


def test_nothing_is_replaced_unless_it_is_asked_for(digits, capsys):
    path, made = digits
    before = {file.name: file.read_bytes() for file in made.iterdir()}
    export(path, "--out", made, code=2)
    assert "model.json exists. Use --overwrite to replace it, or another --out." in capsys.readouterr().err
    assert {file.name: file.read_bytes() for file in made.iterdir()} == before
    export(path, "--out", made, "--overwrite")
    assert (made / "model.safetensors").read_bytes() == before["model.safetensors"]
    assert capsys.readouterr().out.split() == [str(made / f"model.{end}") for end in ("safetensors", "pt2", "json")]


def test_without_a_folder_it_is_one_of_the_name_of_the_run(digits, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    export(digits[0])
    assert [file.name for file in sorted((tmp_path / "exported" / digits[0].name).iterdir())] == [
        "model.json",
        "model.pt2",
        "model.safetensors",
    ]


def test_a_folder_that_cannot_be_made_is_said_before_anything_is_done(digits, tmp_path, capsys):
    (tmp_path / "file").touch()
    export(digits[0], "--out", tmp_path / "file" / "made", code=2)
    assert "file is no folder that can be written to" in capsys.readouterr().err


def test_a_file_that_cannot_be_written_is_a_message_and_exit_code_1(digits, tmp_path, capsys):
    (tmp_path / "model.json" / "kept").mkdir(parents=True)
    export(digits[0], "--out", tmp_path, "--overwrite", code=1)
    assert "model.json could not be removed" in capsys.readouterr().err


def test_of_a_model_that_is_refused_there_are_weights_and_description(tmp_path, capsys):
    path = fit(tmp_path / "runs", rooms(model="tests.bench.test_deploy_export:Branching", epochs=1))
    made = tmp_path / "made"
    made.mkdir()
    (made / "model.pt2").write_text("of another model")
    export(path, "--out", made, "--overwrite", code=1)
    said = capsys.readouterr()
    assert "model.pt2 is not there: torch.export refuses tests.bench.test_deploy_export:Branching" in said.err
    assert "Write its forward without branches on the values of tensors" in said.err
    assert said.err.count("\n") == 1
    assert sorted(file.name for file in made.iterdir()) == ["model.json", "model.safetensors"]
    found = json.loads((made / "model.json").read_text())
    assert found["files"] == ["model.safetensors"]
    assert "torch.export refuses" in found["refused"]
    state = trained(path).model.state_dict()
    assert all(torch.equal(state[key], value) for key, value in load_file(made / "model.safetensors").items())
    assert sorted(state) == sorted(load_file(made / "model.safetensors"))
