"""What a run saves: enough to end as if it had never stopped, noticed when damaged, and never executed."""

import hashlib
import os
import pickle
import resource
import shutil
import signal
from contextlib import contextmanager
from functools import cache
from itertools import count
from pathlib import Path

import pytest
import torch
from tests.bench.small import FLAGS, small_config
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from flatmtl_bench import cli, models
from flatmtl_bench.checkpoints import Checkpoints
from flatmtl_bench.data.batches import BatchIndices
from flatmtl_bench.files import WriteError
from flatmtl_bench.position import Position
from flatmtl_bench.runs import RunError, RunFolder
from flatmtl_bench.signals import FirstSignal
from flatmtl_bench.trainer import Stopped, Trainer

RECIPES = [
    *("multimnist_pcgrad", "multimnist_f_cagrad", "multimnist_f_uw", "multimnist_famo", "multimnist_f_dwa"),
    *("multimnist_f_gradvac", "multimnist_f_graddrop", "multimnist_rlw"),
]
STEPS = 3  # of an epoch
DAMAGES = {
    "truncated": lambda content: content[:-100],
    "bit-flipped": lambda content: content[:5000] + bytes([content[5000] ^ 4]) + content[5001:],
    "empty": lambda _content: b"",
    "text": lambda _content: b"no checkpoint",
}


def quiet_config(recipe="multimnist_f_cagrad", **changes):
    return small_config(recipe, **{"loggers": [], "epochs": 3, **changes})


def train(out, config, watch=None, *, resume=True, **saving):
    """Train as the command does and return the folder."""
    trainer = Trainer(config)
    watched = [] if watch is None else [lambda *told: watch(trainer, *told)]
    with RunFolder(out, trainer.config, resume=resume) as folder:
        trainer.fit(folder, *watched, **saving)
    return folder


def stopped_after(steps):
    """Ask the run to stop after some steps in all."""

    def watch(trainer, done, _total, row):
        if row is None and done == steps:
            trainer.stop()

    return watch


class Killed(BaseException):
    """Ends a run without a chance to save."""


def killed_after(steps):
    def watch(_trainer, done, _total, row):
        if row is None and done == steps:
            raise Killed

    return watch


def names(folder, kind="checkpoints"):
    """Return the names of saved files without their checksums."""
    return sorted(file.name.rpartition("-")[0] for file in (folder.path / kind).iterdir())


def newest(folder):
    return Checkpoints(folder.path).newest()[0]


def weights(folder):
    return Checkpoints(folder.path).newest()[1]["model"]


def assert_same(one, other):
    assert (one.path / "metrics.jsonl").read_bytes() == (other.path / "metrics.jsonl").read_bytes()
    torch.testing.assert_close(weights(one), weights(other), rtol=0, atol=0)
    ends = [{name: v for name, v in f.summary().items() if "seconds" not in name} for f in (one, other)]
    assert ends[0] == ends[1]


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    """Return the folder of a run of a recipe that was never interrupted."""
    return cache(lambda recipe: train(tmp_path_factory.mktemp("whole"), quiet_config(recipe)))


@pytest.fixture
def whole(whole_run):
    return whole_run("multimnist_f_cagrad")


@pytest.fixture
def stopped(tmp_path):
    """A run with three checkpoints: of an end of an epoch, of one step later, and of two; best is epoch 1."""
    with pytest.raises(Stopped):
        train(tmp_path, quiet_config(), stopped_after(STEPS + 2), checkpoint_every=1)
    return RunFolder(tmp_path, Trainer(quiet_config()).config, resume=True)


class TestStop:
    @pytest.mark.parametrize("recipe", RECIPES)
    @pytest.mark.parametrize("step", [1, STEPS])
    def test_a_run_stopped_at_any_step_ends_as_if_it_had_not(self, tmp_path, whole_run, recipe, step):
        config = quiet_config(recipe)
        with pytest.raises(Stopped, match=rf"after 1 finished epochs and {step} of {STEPS} steps"):
            train(tmp_path, config, stopped_after(STEPS + step))
        assert_same(train(tmp_path, config), whole_run(recipe))

    def test_one_stopped_while_it_is_evaluated_does_too(self, tmp_path, whole):
        trainer = Trainer(quiet_config())

        def stop_in_evaluation(model, *_):
            if not model.training and trainer.position.epochs == 1:
                trainer.stop()

        trainer.model.register_forward_hook(stop_in_evaluation)
        with RunFolder(tmp_path, trainer.config) as folder, pytest.raises(Stopped):
            trainer.fit(folder)
        assert names(folder)[-1] == f"epoch-0001-step-{STEPS:04}"
        assert_same(train(tmp_path, quiet_config()), whole)

    def test_one_stopped_at_every_step_does_too(self, tmp_path, whole):
        for step in range(1, 3 * STEPS + 1):
            with pytest.raises(Stopped):
                train(tmp_path, quiet_config(), stopped_after(step))
        assert_same(train(tmp_path, quiet_config()), whole)

    def test_dropout_goes_on_where_it_stood(self, tmp_path, monkeypatch):
        lenet = models.MODELS["lenet"]

        def with_dropout(heads, channels):
            model = lenet(heads, channels)
            model.encoder.append(nn.Dropout(0.5))
            return model

        monkeypatch.setitem(models.MODELS, "lenet", with_dropout)
        with pytest.raises(Stopped):
            train(tmp_path / "torn", quiet_config(), stopped_after(4))
        assert_same(train(tmp_path / "torn", quiet_config()), train(tmp_path / "whole", quiet_config()))


def test_the_time_between_does_not_count(monkeypatch):
    now = 0.0
    monkeypatch.setattr("flatmtl_bench.position.perf_counter", lambda: now)
    before, after = Position(), Position()
    before.end_step(1.0)
    now = 5.0
    state = before.state_dict()
    now = 1000.0
    after.load_state_dict(state)
    after.end_step(2.0)
    now = 1003.0
    after.end_epoch({"epoch": 1})
    assert after.times == [{"epoch": 1, "seconds": 8.0, "step_seconds": 1.5}]


class TestCheckpointEvery:
    @pytest.mark.parametrize(("killed", "expected"), [(1, 0), (3, 2), (4, 3), (6, 5)])
    def test_a_killed_run_goes_on_from_the_last_one(self, tmp_path, whole, killed, expected):
        """Every second step of an epoch is saved, and the end of each epoch."""
        with pytest.raises(Killed):
            train(tmp_path, quiet_config(), killed_after(killed), checkpoint_every=2)
        first = []
        folder = train(tmp_path, quiet_config(), lambda _trainer, done, *_: first.append(done))
        assert first[0] == expected + 1
        assert_same(folder, whole)

    def test_without_it_there_is_one_an_epoch(self, whole):
        assert {name.rpartition("-")[2] for name in names(whole)} == {"0000"}


class TestKept:
    def test_the_last_two_and_the_best_are_kept(self, tmp_path):
        checkpoints = Checkpoints(tmp_path)
        for epoch, best in enumerate([1, 2, 2, 2, 2], start=1):
            checkpoints.save({"epoch": epoch}, epoch, 0, best)
            checkpoints.save({"epoch": epoch}, epoch, 7, best)
        kept = sorted(file.name.rpartition("-")[0] for file in checkpoints.path.iterdir())
        assert kept == ["epoch-0002-step-0000", "epoch-0005-step-0000", "epoch-0005-step-0007"]

    @pytest.mark.parametrize(("protocol", "part"), [("honest", "validation"), ("official", "test")])
    def test_the_best_is_that_of_the_protocol(self, tmp_path, protocol, part):
        folder = train(tmp_path, quiet_config(epochs=5, protocol=protocol))
        best = max(folder.rows(), key=lambda row: row[f"{part}/accuracy"])["epoch"]
        assert folder.summary()["epochs"] == [best]
        assert set(names(folder)) == {f"epoch-{epoch:04}-step-0000" for epoch in (best, 4, 5)}

    def test_later_is_by_number(self, tmp_path):
        checkpoints = Checkpoints(tmp_path)
        for epoch in (9_999, 10_000):
            checkpoints.save({"epoch": epoch}, epoch, 0, None)
        assert checkpoints.newest()[1] == {"epoch": 10_000}

    def test_the_file_is_one_for_torch_load_and_bears_its_checksum(self, whole):
        path = newest(whole)
        assert path.stem.endswith(hashlib.sha256(path.read_bytes()).hexdigest()[:16])
        assert torch.load(path, weights_only=True)["position"]["epochs"] == 3

    def test_snapshots_are_the_weights_of_every_kth_epoch(self, tmp_path):
        folder = train(tmp_path, quiet_config(epochs=5), keep_every=2)
        assert names(folder, "snapshots") == ["epoch-0002", "epoch-0004"]
        (path,) = (folder.path / "snapshots").glob("epoch-0004-*.pt")
        trainer = Trainer(quiet_config())
        trainer.model.load_state_dict(torch.load(path, weights_only=True))
        assert trainer.evaluate("test")["loss"] == folder.rows()[3]["test/loss"]

    def test_a_snapshot_made_again_replaces_the_first(self, tmp_path):
        with pytest.raises(Killed):
            train(tmp_path, quiet_config(), killed_after(STEPS + 2), keep_every=1)
        folder = RunFolder(tmp_path, Trainer(quiet_config()).config, resume=True)
        for path in folder.path.glob("checkpoints/*"):
            path.unlink()
        (folder.path / "metrics.jsonl").unlink()
        folder.close()
        assert names(train(tmp_path, quiet_config(), keep_every=1), "snapshots") == [f"epoch-000{n}" for n in (1, 2, 3)]

    def test_overwrite_removes_them_and_nothing_else(self, tmp_path):
        folder = train(tmp_path, quiet_config(), keep_every=1)
        (folder.path / "snapshots" / "notes.txt").write_text("mine")
        RunFolder(tmp_path, Trainer(quiet_config()).config, overwrite=True).close()
        assert [
            str(f.relative_to(folder.path)) for f in folder.path.rglob("*") if f.is_file() and f.name[0] != "."
        ] == [
            "config.json",
            "snapshots/notes.txt",
        ]


class TestDamage:
    @pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
    @pytest.mark.parametrize("count", [1, 2])
    def test_the_one_before_is_used_and_the_end_is_the_same(self, stopped, whole, damage, count):
        stopped.close()
        files = sorted((stopped.path / "checkpoints").iterdir())[-count:]
        for path in files:
            path.write_bytes(damage(path.read_bytes()))
        with pytest.warns(UserWarning, match="is damaged: .*The one before it") as warned:
            ended = train(stopped.path.parent, quiet_config())
        assert {str(w.message).split(" is damaged")[0] for w in warned} == {str(path) for path in files}
        assert sorted(path.name for path in ended.path.glob("checkpoints/*.damaged")) == [
            f"{p.name}.damaged" for p in files
        ]
        assert_same(ended, whole)

    @pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
    def test_with_none_left_the_run_is_not_started_again(self, stopped, damage):
        stopped.close()
        before = (stopped.path / "metrics.jsonl").read_bytes()
        for path in (stopped.path / "checkpoints").iterdir():
            path.write_bytes(damage(path.read_bytes()))
        for _ in range(2):
            with pytest.raises(RunError, match=r"every checkpoint in .*checkpoints is damaged\. Use --overwrite"):
                train(stopped.path.parent, quiet_config())
        assert (stopped.path / "metrics.jsonl").read_bytes() == before

    def test_nor_is_it_in_its_first_epoch(self, tmp_path):
        with pytest.raises(Stopped):
            train(tmp_path, quiet_config(), stopped_after(2))
        (path,) = tmp_path.glob("*/checkpoints/*")
        path.write_bytes(b"")
        for _ in range(2):
            with pytest.raises(RunError, match="every checkpoint"):
                train(tmp_path, quiet_config())

    def test_what_a_kill_left_half_written_is_removed(self, stopped, whole):
        stopped.close()
        (stopped.path / "checkpoints" / ".epoch-0002-step-0000-0123456789abcdef.pt.part").write_bytes(b"half")
        ended = train(stopped.path.parent, quiet_config())
        assert not list(ended.path.rglob("*.part"))
        assert_same(ended, whole)

    def test_metrics_that_were_lost_or_torn_come_from_the_checkpoint(self, stopped, whole):
        stopped.close()
        (stopped.path / "metrics.jsonl").write_text('{"epo')
        (stopped.path / "times.jsonl").unlink()
        assert_same(train(stopped.path.parent, quiet_config()), whole)

    def test_a_file_with_another_name_is_no_checkpoint(self, stopped, whole):
        stopped.close()
        for name in ("notes.txt", "epoch-9999.pt", "epoch-0009-step-0000.pt", "model-epoch-0009-step-0000-abc.pt"):
            (stopped.path / "checkpoints" / name).write_text("mine")
        assert_same(train(stopped.path.parent, quiet_config()), whole)


class Hostile:
    """Makes whoever unpickles it write a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def put(folder, content):
    """Put a file among the checkpoints, the last of them, with a checksum that is right."""
    digest = hashlib.sha256(content).hexdigest()[:16]
    path = folder.path / "checkpoints" / f"epoch-0002-step-0001-{digest}.pt"
    path.write_bytes(content)
    return path


class TestHostile:
    def contents(self, trap, path):
        torch.save({"model": Hostile(trap)}, path)
        yield path.read_bytes()
        torch.save({"model": Hostile(trap)}, path, _use_new_zipfile_serialization=False)
        yield path.read_bytes()
        yield pickle.dumps(Hostile(trap))

    def test_a_checkpoint_that_would_execute_something_is_refused(self, stopped, tmp_path):
        stopped.close()
        for content in self.contents(tmp_path / "trapped", tmp_path / "made"):
            path = put(stopped, content)
            with pytest.raises(
                RunError, match=f"{path.name} is no checkpoint of a run, and nothing in it was executed"
            ):
                train(stopped.path.parent, quiet_config())
            path.unlink()
        assert not (tmp_path / "trapped").exists()

    def test_the_trap_is_one(self, tmp_path):
        (content, *_) = self.contents(tmp_path / "trapped", tmp_path / "made")
        assert content
        torch.load(tmp_path / "made", weights_only=False)
        assert (tmp_path / "trapped").exists()

    @pytest.mark.parametrize(
        ("state", "message"),
        [
            (torch.zeros(3), "is no checkpoint of a run but a Tensor"),
            ({"epoch": 3}, "is no checkpoint of this version of flatmtl"),
        ],
        ids=["tensor", "dictionary"],
    )
    def test_a_harmless_file_of_something_else_is_named(self, stopped, tmp_path, state, message):
        stopped.close()
        torch.save(state, tmp_path / "made")
        path = put(stopped, (tmp_path / "made").read_bytes())
        with pytest.raises(RunError, match=f"{path.name} {message}"):
            train(stopped.path.parent, quiet_config())

    @pytest.mark.parametrize(
        "change",
        [
            {"model": {}},
            {"model": {"encoder.0.weight": torch.zeros(1)}},
            {"optimizer": None},
            {"mtl": {"branches": 3}},
            {"position": {"epochs": "many"}},
            {"random": []},
        ],
        ids=str,
    )
    def test_a_state_of_another_shape_is_named(self, stopped, tmp_path, change):
        stopped.close()
        _, state = Checkpoints(stopped.path).newest()
        torch.save({**state, **change}, tmp_path / "made")
        path = put(stopped, (tmp_path / "made").read_bytes())
        with pytest.raises(RunError, match=rf"{path.name} does not fit this run"):
            train(stopped.path.parent, quiet_config())


class TestOfAnotherRun:
    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"seed": 1}, "seed '1' instead of '0'"),
            ({"rho": 0.125}, "config '[0-9a-f]{6}' instead of '[0-9a-f]{6}'"),
        ],
        ids=str,
    )
    def test_a_run_does_not_go_on_from_it(self, stopped, tmp_path, changes, message):
        stopped.close()
        other = train(tmp_path / "other", quiet_config(**changes))
        shutil.rmtree(stopped.path / "checkpoints")
        shutil.copytree(other.path / "checkpoints", stopped.path / "checkpoints")
        before = (stopped.path / "metrics.jsonl").read_bytes()
        with pytest.raises(RunError, match=f"is a checkpoint of another run: {message}"):
            train(stopped.path.parent, quiet_config())
        assert (stopped.path / "metrics.jsonl").read_bytes() == before

    @pytest.mark.parametrize("name", ["config", "seed"])
    def test_it_must_say_so_in_words(self, stopped, tmp_path, name):
        stopped.close()
        _, state = Checkpoints(stopped.path).newest()
        torch.save({**state, name: torch.zeros(3)}, tmp_path / "made")
        put(stopped, (tmp_path / "made").read_bytes())
        with pytest.raises(RunError, match=f"is a checkpoint of another run: {name} tensor"):
            train(stopped.path.parent, quiet_config())


def test_a_folder_that_is_removed_and_made_again_belongs_to_the_second_run(tmp_path):
    def begun_again(_trainer, done, _total, _row):
        if done == STEPS + 1:
            shutil.rmtree(next(tmp_path.iterdir()))
            train(tmp_path, quiet_config())

    with pytest.raises(WriteError, match="was removed or replaced while this process had it"):
        train(tmp_path, quiet_config(), begun_again)
    (folder,) = tmp_path.iterdir()
    assert [line[:11] for line in (folder / "metrics.jsonl").read_text().splitlines()] == [
        f'{{"epoch": {epoch}' for epoch in (1, 2, 3)
    ]
    assert (folder / "summary.json").exists()


@contextmanager
def files_up_to(size):
    """Within it a file cannot grow above a size, as if the disk were full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


RUN = ("run", "multimnist_f_cagrad", *FLAGS, "--device", "cpu", "--epochs", "3", "--loggers")


class TestWritesThatFail:
    def test_a_full_disk_stops_the_run_and_leaves_the_last_checkpoint(self, tmp_path, monkeypatch, capsys, whole):
        monkeypatch.chdir(tmp_path)
        with pytest.raises(Stopped):
            train(tmp_path / "runs", quiet_config(), stopped_after(STEPS + 1))
        (path,) = (tmp_path / "runs").iterdir()
        before = {file.name: file.read_bytes() for file in (path / "checkpoints").iterdir()}
        with files_up_to(100_000):
            code = cli.main([*RUN, "--resume"])
        said = " ".join(capsys.readouterr().err.split())
        assert code == 1
        assert "could not be written: [Errno 27] File too large" in said
        assert f"{path.name} keeps 1 finished epochs. Make room, or let it be written to." in said
        assert "The same command with --resume goes on." in said
        assert "Traceback" not in said
        assert {file.name: file.read_bytes() for file in (path / "checkpoints").iterdir()} == before
        assert_same(train(tmp_path / "runs", quiet_config()), whole)

    @pytest.mark.parametrize(
        ("name", "message"),
        [
            ("checkpoints/.epoch.part/", r"checkpoints/.epoch.part could not be removed: "),
            (".metrics.jsonl.part/", ".metrics.jsonl.part could not be removed: "),
            ("logs/csv", "logs could not be written: [Errno 20] Not a directory"),
            ("logs", "logs could not be written: "),
        ],
    )
    def test_what_is_in_the_way_is_a_message_and_exit_code_1(self, tmp_path, monkeypatch, capsys, whole, name, message):
        monkeypatch.chdir(tmp_path)
        path = tmp_path / "runs" / whole.path.name
        shutil.copytree(whole.path, path)
        (path / "summary.json").unlink()
        if name.endswith("/"):
            (path / name).mkdir()
        else:
            (path / name).parent.mkdir(exist_ok=True)
            (path / name).write_text("in the way")
        code = cli.main([*RUN, "csv", "--resume"])
        said = " ".join(capsys.readouterr().err.split())
        assert (code, message in said, "Traceback" in said) == (1, True, False), said
        assert (path / name).exists()

    def test_an_old_checkpoint_that_cannot_be_removed_stops_the_run(self, tmp_path, monkeypatch, capsys):
        monkeypatch.chdir(tmp_path)
        unlink = Path.unlink

        def forbidden(path, *, missing_ok=False):
            if path.name.startswith("epoch-"):
                raise PermissionError(1, "Operation not permitted", str(path))
            unlink(path, missing_ok=missing_ok)

        monkeypatch.setattr(Path, "unlink", forbidden)
        assert cli.main([*RUN, "--epochs", "5"]) == 1
        said = " ".join(capsys.readouterr().err.split())
        assert "could not be removed: [Errno 1] Operation not permitted" in said
        assert "The same command with --resume goes on." in said
        monkeypatch.undo()
        monkeypatch.chdir(tmp_path)
        assert cli.main([*RUN, "--epochs", "5", "--resume"]) == 0

    def test_a_folder_that_cannot_be_made_stops_the_run(self, tmp_path):
        trainer = Trainer(quiet_config())
        with RunFolder(tmp_path, trainer.config) as folder:
            (folder.path / "checkpoints").write_text("in the way")
            with pytest.raises(WriteError, match=r"checkpoints could not be made: .*File exists"):
                trainer.fit(folder)
        assert not folder.rows()

    @pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
    def test_a_folder_that_is_read_only_stops_the_run(self, stopped):
        stopped.close()
        folder = stopped.path / "checkpoints"
        before = sorted(folder.iterdir())
        folder.chmod(0o500)
        try:
            with pytest.raises(WriteError, match="could not be written: .*Permission denied"):
                train(stopped.path.parent, quiet_config())
        finally:
            folder.chmod(0o700)
        assert sorted(folder.iterdir()) == before


class TestSignals:
    @pytest.mark.parametrize(("by", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["int", "term"])
    def test_a_signal_ends_the_step_saves_and_says_how_to_go_on(self, tmp_path, monkeypatch, capsys, whole, by, code):
        monkeypatch.chdir(tmp_path)
        steps = count(1)
        hook = register_optimizer_step_post_hook(lambda *_: next(steps) == STEPS + 2 and signal.raise_signal(by))
        try:
            assert cli.main(RUN) == code
        finally:
            hook.remove()
        said = " ".join(capsys.readouterr().err.split())
        assert "flatmtl: stopped after 1 finished epochs and 2 of 3 steps. It is saved." in said
        assert "The same command with --resume goes on." in said
        assert cli.main([*RUN, "--resume"]) == 0
        assert_same(train(tmp_path / "runs", quiet_config()), whole)

    def test_the_second_signal_acts_as_it_always_does(self):
        asked = []
        with FirstSignal(lambda: asked.append(1)) as first:
            signal.raise_signal(signal.SIGINT)
            assert (asked, first.number) == ([1], signal.SIGINT)
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
        assert asked == [1]

    def test_afterwards_signals_act_as_before(self):
        before = [signal.getsignal(kind) for kind in (signal.SIGINT, signal.SIGTERM)]
        with FirstSignal(lambda: None):
            assert [signal.getsignal(kind) for kind in (signal.SIGINT, signal.SIGTERM)] != before
        assert [signal.getsignal(kind) for kind in (signal.SIGINT, signal.SIGTERM)] == before

    def test_a_signal_that_is_ignored_stays_so(self):
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            with FirstSignal(lambda: None) as first:
                signal.raise_signal(signal.SIGINT)
            assert first.number is None
        finally:
            signal.signal(signal.SIGINT, before)


class TestBatches:
    @pytest.mark.parametrize("start", range(5))
    def test_from_a_batch_on_they_are_the_rest(self, start):
        def batches(start):
            return BatchIndices(30, 8, generator=torch.Generator().manual_seed(3), start=start)

        assert list(batches(start)) == list(batches(0))[start:]
        assert len(batches(start)) == 4 - start

    def test_every_item_comes_once(self):
        order = [index for batch in BatchIndices(30, 8, generator=torch.Generator().manual_seed(3)) for index in batch]
        assert sorted(order) == list(range(30)) != order

    def test_what_was_trained_on_is_not_loaded_again(self, stopped):
        stopped.close()
        trainer, loaded = Trainer(quiet_config()), []
        get = type(trainer.data["train"]).__getitems__

        def noted(data, indices):
            if data is trainer.data["train"]:
                loaded.append(len(indices))
            return get(data, indices)

        with (
            pytest.MonkeyPatch.context() as patch,
            RunFolder(stopped.path.parent, trainer.config, resume=True) as folder,
        ):
            patch.setattr(type(trainer.data["train"]), "__getitems__", noted)
            trainer.fit(folder)
        assert loaded == [32] * (1 + STEPS)


@pytest.mark.parametrize("flag", ["--checkpoint-every", "--keep-every"])
def test_a_negative_number_is_a_mistake(tmp_path, monkeypatch, capsys, flag):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="2"):
        cli.main([*RUN, flag, "-1"])
    assert f"{flag} must be a whole number from 0, got -1." in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
