"""Several processes on this machine train one model, as on several devices: to the numbers of one process."""

import json
import signal
import subprocess
import sys
from dataclasses import replace
from itertools import chain
from pathlib import Path

import pytest
import torch
from tests.bench.small import COMMAND, ENVIRONMENT, FLAGS, lines, small_config, stop_flatmtl

from flatmtl_bench import cli
from flatmtl_bench.commands import training
from flatmtl_bench.data.batches import BatchIndices
from flatmtl_bench.recipes import Config
from flatmtl_bench.runs import RunFolder, digest
from flatmtl_bench.trainer import Trainer

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
DOUBLE = ("--device", "cpu", "--precision", "64-true")
RUN = ("run", "multimnist_f_cagrad", *FLAGS, *DOUBLE, "--data.train-samples", "97", "--epochs", "6")
TIMEOUT = 300
"""Seconds after which processes that wait for each other have failed."""


def started(*words, cwd):
    """Run a command to its end; return what it said and its exit code."""
    options = {"capture_output": True, "text": True, "timeout": TIMEOUT}
    return subprocess.run(words, cwd=cwd, env=ENVIRONMENT, check=False, **options)


def launched(*words, cwd):
    """Run `flatmtl`, which starts further ranks itself."""
    return started(*COMMAND, *words, cwd=cwd)


def torchrun(count, *words, cwd):
    """Run `flatmtl` as `torchrun` starts it."""
    return started(*TORCHRUN, str(count), *COMMAND[COMMAND.index("-m") :], *words, cwd=cwd)


def program(folder, body, count=2):
    """Run a program on so many ranks, which Fabric starts."""
    start = (
        "import torch",
        "from flatmtl_bench import ranks",
        "from flatmtl_bench.recipes import Config",
        f"fabric = ranks.launch(Config(device='cpu', devices={count}))",
        "rank = fabric.global_rank",
    )
    (folder / "program.py").write_text("\n".join([*start, body]))
    return started(sys.executable, "-W", "error", "program.py", cwd=folder)


def batches(size, batch_size, count, start=0):
    """Return for every rank its slices of the same shuffled batches."""

    def of(rank):
        return BatchIndices(
            size, batch_size, generator=torch.Generator().manual_seed(3), start=start, rank=rank, ranks=count
        )

    return [of(rank) for rank in range(count)]


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize(("size", "batch_size"), [(12, 6), (13, 5), (7, 16), (10, 3), (5, 2)])
class TestSlices:
    def test_together_they_are_the_batches_of_one_process(self, size, batch_size, count):
        mine = [
            [items if share else [] for items, share in zip(slices, slices.shares(), strict=True)]
            for slices in batches(size, batch_size, count)
        ]
        whole = list(batches(size, batch_size, 1)[0])
        assert [list(chain(*parts)) for parts in zip(*mine, strict=True)] == whole

    def test_the_mean_over_the_ranks_is_that_over_the_batch(self, size, batch_size, count):
        values = torch.arange(size, dtype=torch.float64) ** 2
        means = [
            torch.stack([share * values[items].mean() for items, share in zip(slices, slices.shares(), strict=True)])
            for slices in batches(size, batch_size, count)
        ]
        expected = torch.stack([values[items].mean() for items in batches(size, batch_size, 1)[0]])
        torch.testing.assert_close(torch.stack(means).mean(dim=0), expected)

    def test_every_rank_has_as_many_and_none_is_empty(self, size, batch_size, count):
        parts = [list(slices) for slices in batches(size, batch_size, count)]
        assert {len(part) for part in parts} == {len(slices) for slices in batches(size, batch_size, count)}
        assert all(chain(*parts))

    def test_from_a_batch_on_they_are_the_rest(self, size, batch_size, count):
        for slices, rest in zip(batches(size, batch_size, count), batches(size, batch_size, count, 1), strict=True):
            assert list(rest) == list(slices)[1:]
            assert list(rest.shares()) == list(slices.shares())[1:]
            assert len(rest) == len(slices) - 1


@pytest.mark.parametrize("changes", [{"devices": 2}, {"num_nodes": 2}, {"strategy": "ddp"}, {"loggers": []}])
def test_how_a_run_is_spread_and_logged_is_no_part_of_its_name(changes):
    assert digest(replace(Config(), **changes)) == digest(Config())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"devices": 0}, "number of devices must be at least 1, got 0"),
        ({"num_nodes": 0}, "number of machines must be at least 1, got 0"),
    ],
)
def test_ranks_that_cannot_be_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        Config(**changes)


AGREEMENT = """
assert fabric.world_size == 2
assert ranks.any_rank(fabric, rank == 1) and not ranks.any_rank(fabric, False)
assert ranks.gather(fabric, rank) == [0, 1]
assert ranks.from_rank_zero(fabric, lambda: ["rank", rank]) == ["rank", 0]
expected = {0: FileExistsError, 1: ranks.ToldRankZero}[rank]
for guilty in (0, 1):
    try:
        with ranks.together(fabric):
            if rank == guilty:
                raise FileExistsError("it is there")
    except expected as error:
        assert str(error) == "it is there"
    else:
        raise AssertionError("no error")
try:
    ranks.check_same(fabric, "data", rank)
except (ValueError, ranks.ToldRankZero) as error:
    assert str(error) == "rank 1 has other data than rank 0: 1 instead of 0. Give all machines the same."
else:
    raise AssertionError("no error")
model = torch.nn.BatchNorm1d(2)
torch.nn.init.constant_(model.weight, rank)
model.running_mean += rank
ranks.take_from_rank_zero(fabric, model)
assert model.weight.tolist() == [0.0, 0.0] and model.running_mean.tolist() == [0.0, 0.0]
model.running_mean += rank
ranks.average_buffers(fabric, model)
assert model.running_mean.tolist() == [0.5, 0.5]
part = torch.optim.SGD([torch.zeros(1)], lr=rank + 1.0)
state = ranks.EachRank(fabric, part).state_dict()
assert [one["param_groups"][0]["lr"] for one in state["ranks"]] == [1.0, 2.0]
part.param_groups[0]["lr"] = 5.0
ranks.EachRank(fabric, part).load_state_dict(state)
assert part.param_groups[0]["lr"] == rank + 1.0
"""


def test_ranks_agree(tmp_path):
    done = program(tmp_path, AGREEMENT)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("guilty", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_an_error_that_nobody_expects_on_one_rank_ends_all(tmp_path, guilty):
    body = f"""
if rank == {guilty}:
    raise RuntimeError("out of order")
ranks.any_rank(fabric, True)
"""
    done = program(tmp_path, body)
    assert done.returncode != 0
    assert "RuntimeError: out of order" in done.stderr


EVALUATION = """
import json
from tests.bench.test_ranks import uneven
from flatmtl_bench.trainer import Trainer
trainer = Trainer(uneven(devices=3))
with open(f"{rank}.json", "w") as file:
    json.dump([trainer.evaluate(split) for split in ("validation", "test")], file)
"""


def uneven(**changes):
    """Return a config whose last batches have items for some of three ranks."""
    config = small_config(precision="64-true", **changes)
    return replace(config, data=replace(config.data, validation_samples=65, test_samples=34))


def test_evaluation_counts_every_sample_once(tmp_path):
    done = program(tmp_path, EVALUATION, count=3)
    assert done.returncode == 0, done.stderr
    trainer = Trainer(uneven())
    expected = [trainer.evaluate(split) for split in ("validation", "test")]
    for rank in range(3):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert found == [pytest.approx(values, rel=1e-6) for values in expected]


class TestMistakes:
    """Each is one message and an exit code, whoever finds it, and no process is left waiting."""

    def test_of_a_config(self, tmp_path):
        done = launched(*RUN, "--devices", "2", "--model", "lenett", cwd=tmp_path)
        assert done.returncode == 2
        assert done.stderr.count("unknown model 'lenett'. Did you mean 'lenet'?") == 1
        assert not (tmp_path / "runs").exists()

    def test_of_which_only_rank_0_knows(self, tmp_path):
        RunFolder(tmp_path / "runs", run_config()).close()
        done = launched(*RUN, "--devices", "2", cwd=tmp_path)
        assert done.returncode == 2
        assert done.stderr.count("already holds 0 finished epochs. Use --resume") == 1
        assert "Traceback" not in done.stderr

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (["--devices", "3"], "torchrun has started 2 processes on each of 1 machines. Leave both out"),
            pytest.param(["--no-such-flag", "3"], "Unrecognized options: --no-such-flag", marks=pytest.mark.slow),
        ],
    )
    def test_rank_0_alone_says_it_however_late_it_is(self, tmp_path, words, message):
        late = "import os, sys, time; time.sleep(8 * (os.environ['RANK'] == '0')); from flatmtl_bench import cli; "
        program = f"{late}sys.exit(cli.main({[*RUN, *words]}))"
        (tmp_path / "late.py").write_text(program)
        done = started(*TORCHRUN, "2", "late.py", cwd=tmp_path)
        assert done.returncode != 0
        assert done.stderr.count(message) == 1

    def test_what_another_rank_knows_alone_is_said_by_it_in_the_end(self, monkeypatch, capsys):
        monkeypatch.setenv("RANK", "1")
        waited = []
        monkeypatch.setattr(training, "sleep", waited.append)
        assert cli.main(["run", "multimnist_f_cagard"]) == 2
        assert waited == [training.PATIENCE]
        assert "multimnist_f_cagard" in capsys.readouterr().err

    def test_that_ends_in_numbers_that_are_not_finite(self, tmp_path):
        done = launched(*RUN, "--devices", "2", "--optimizer.lr", "1e300", cwd=tmp_path)
        assert done.returncode == 1
        assert done.stderr.count("epoch 1, step 2: the loss of task 'left' is nan") == 1
        assert "Traceback" not in done.stderr


def run_config():
    """Return the config that the words of `RUN` say, in which the last batch of an epoch has one item."""
    config = small_config(precision="64-true", epochs=6)
    return replace(config, data=replace(config.data, train_samples=97))


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The folder of a run on one process."""
    return finished(launched(*RUN, cwd=(path := tmp_path_factory.mktemp("alone"))), path)


def finished(done, path):
    """Return the folder of the one run that a command made, which it has printed the summary of."""
    assert done.returncode == 0, done.stderr
    (folder,) = (path / "runs").iterdir()
    assert json.loads(done.stdout) == json.loads((folder / "summary.json").read_text())
    return folder


def assert_same_run(folder, other):
    """The metrics agree to 1e-6: sums of losses over a split are float32, what training says is float64."""
    assert folder.name == other.name
    for row, expected in zip(lines(folder / "metrics.jsonl"), lines(other / "metrics.jsonl"), strict=True):
        assert row == pytest.approx(expected, rel=1e-6)
        train, expected = ({k: v for k, v in r.items() if k.startswith("train/")} for r in (row, expected))
        assert train == pytest.approx(expected, rel=1e-8)
    results = [json.loads((f / "summary.json").read_text()) for f in (folder, other)]
    assert results[0]["test"] == pytest.approx(results[1]["test"], rel=1e-6)
    assert results[0]["sharpness"] == pytest.approx(results[1]["sharpness"], rel=1e-6)
    assert {f.name for f in folder.iterdir()} == {f.name for f in other.iterdir()}


class TestRuns:
    """The last batch of an epoch is too small for a share each, where there are three ranks."""

    @pytest.mark.parametrize("count", [2, pytest.param(3, marks=pytest.mark.slow)])
    def test_under_torchrun_they_end_with_the_numbers_of_one_process(self, tmp_path, alone, count):
        assert_same_run(finished(torchrun(count, *RUN, cwd=tmp_path), tmp_path), alone)
        (path,) = tmp_path.glob("runs/*/env.json")
        assert json.loads(path.read_text())["ranks"] == count

    def test_started_by_the_command_itself_stopped_and_resumed_too(self, tmp_path, alone):
        words = (*RUN, "--devices", "2")
        code, said = stop_flatmtl(*words, cwd=tmp_path, at="epoch   1", by=signal.SIGTERM)
        assert code == 128 + signal.SIGTERM
        assert said.count("It is saved.") == 1
        assert_same_run(finished(launched(*words, "--resume", cwd=tmp_path), tmp_path), alone)

    @pytest.mark.slow
    def test_under_fabric_run(self, tmp_path, alone):
        fabric, command = (Path(sys.executable).with_name(name) for name in ("fabric", "flatmtl"))
        done = started(fabric, "run", "--devices", "2", command, "--", *RUN, cwd=tmp_path)
        assert_same_run(finished(done, tmp_path), alone)
