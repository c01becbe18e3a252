import json
import os
import re
import shutil
from dataclasses import replace

import pytest

from flatmtl_bench import recipes
from flatmtl_bench.config_file import read_config
from flatmtl_bench.files import WriteError, write_whole
from flatmtl_bench.recipes import Config
from flatmtl_bench.recipes.config import Data, Method, Optimizer
from flatmtl_bench.runs import FILES, RunError, RunFolder, digest, run_name

CONFIG = recipes.build("multimnist_f_cagrad")


def files(path):
    return {entry.name: entry.read_bytes() for entry in path.iterdir() if entry.name != ".lock"}


def with_epochs(out, count, config=CONFIG):
    with RunFolder(out, config) as folder:
        for epoch in range(1, count + 1):
            folder.append({"epoch": epoch})
    return folder.path


class TestName:
    def test_it_has_recipe_hash_and_seed(self):
        assert re.fullmatch(r"multimnist_f_cagrad-[0-9a-f]{6}-s3", run_name(replace(CONFIG, seed=3)))

    def test_seed_and_place_do_not_change_the_hash(self):
        moved = replace(CONFIG, seed=7, root="elsewhere", device="cpu", data=Data(download=True))
        assert digest(moved) == digest(CONFIG)

    @pytest.mark.parametrize(
        "change",
        [
            {"epochs": 3},
            {"rho": 0.25},
            {"source": "mnist5k"},
            {"precision": "bf16-mixed"},
            {"data": Data(same_label=False)},
            {"method": Method("cagrad", {"c": 0.5}, "asam")},
            {"optimizer": Optimizer(lr=0.1)},
        ],
        ids=lambda change: next(iter(change)),
    )
    def test_everything_else_does(self, change):
        assert digest(replace(CONFIG, **change)) != digest(CONFIG)

    def test_hash_is_of_the_values_not_of_their_order(self):
        one, other = {"c": 0.4, "rescale": "1+c2"}, {"rescale": "1+c2", "c": 0.4}
        assert digest(Config("a", method=Method("cagrad", one))) == digest(Config("a", method=Method("cagrad", other)))

    def test_hash_survives_the_file(self):
        assert digest(Config.from_dict(json.loads(json.dumps(CONFIG.to_dict())))) == digest(CONFIG)


class TestExistingFolder:
    def test_it_is_refused(self, tmp_path):
        path = with_epochs(tmp_path, 1)
        before = files(path)
        message = rf"{re.escape(str(path))} already holds 1 finished epoch\. Use --resume to go on or --overwrite"
        with pytest.raises(FileExistsError, match=message):
            RunFolder(tmp_path, CONFIG)
        assert files(path) == before

    def test_resume_keeps_what_is_there(self, tmp_path):
        with_epochs(tmp_path, 2)
        with RunFolder(tmp_path, CONFIG, resume=True) as folder:
            assert folder.rows() == [{"epoch": 1}, {"epoch": 2}]

    def test_resume_starts_a_run_that_is_not_there(self, tmp_path):
        with RunFolder(tmp_path, CONFIG, resume=True) as folder:
            assert Config.from_dict(json.loads((folder.path / "config.json").read_text())) == CONFIG

    def test_overwrite_removes_the_files_of_the_run_and_no_others(self, tmp_path):
        path = with_epochs(tmp_path, 2)
        (path / "notes.txt").write_text("mine")
        with RunFolder(tmp_path, CONFIG, overwrite=True) as folder:
            assert set(files(folder.path)) == {"config.json", "notes.txt"}

    def test_resume_and_overwrite_exclude_each_other(self, tmp_path):
        with pytest.raises(ValueError, match="use one of them"):
            RunFolder(tmp_path, CONFIG, resume=True, overwrite=True)

    @pytest.mark.parametrize("options", [{}, {"resume": True}, {"overwrite": True}], ids=str)
    @pytest.mark.parametrize("content", ["not json", "[]", '{"recipe": "cake"}'])
    def test_a_folder_that_is_no_run_is_left_alone(self, tmp_path, options, content):
        path = tmp_path / run_name(CONFIG)
        path.mkdir()
        (path / "config.json").write_text(content)
        with pytest.raises(FileExistsError, match=r"no config\.json of a run, so it is left alone"):
            RunFolder(tmp_path, CONFIG, **options)
        assert os.listdir(path) == ["config.json"]

    def test_a_file_in_its_place_is_named(self, tmp_path):
        (tmp_path / run_name(CONFIG)).write_text("")
        with pytest.raises(FileExistsError, match="is a file; expected a folder"):
            RunFolder(tmp_path, CONFIG)

    def test_another_config_is_not_gone_on_with(self, tmp_path):
        path = with_epochs(tmp_path, 1)
        changed = {**CONFIG.to_dict(), "rho": 3.0, "epochs": 7}
        (path / "config.json").write_text(json.dumps(changed))
        with pytest.raises(ValueError, match="another config: epochs, rho differ"):
            RunFolder(tmp_path, CONFIG, resume=True)

    def test_nor_is_another_seed_under_this_name(self, tmp_path):
        other = with_epochs(tmp_path, 1, replace(CONFIG, seed=1))
        other.rename(tmp_path / run_name(CONFIG))
        with pytest.raises(ValueError, match="another config: seed differ"):
            RunFolder(tmp_path, CONFIG, resume=True)

    def test_two_at_a_time_are_refused(self, tmp_path):
        with RunFolder(tmp_path, CONFIG):
            for options in ({}, {"resume": True}, {"overwrite": True}):
                with pytest.raises(BlockingIOError, match="in use by another process"):
                    RunFolder(tmp_path, CONFIG, **options)
        RunFolder(tmp_path, CONFIG, resume=True).close()


class TestLockedFolder:
    """Somebody removes the folder of a run that is being written, and starts the run again."""

    @pytest.mark.parametrize("again", [True, False], ids=["made again", "gone"])
    def test_nothing_is_written_once_it_is_another_one(self, tmp_path, again):
        with RunFolder(tmp_path, CONFIG) as first:
            shutil.rmtree(first.path)
            if again:
                with_epochs(tmp_path, 2)
            before = files(first.path) if again else None
            with pytest.raises(WriteError, match="was removed or replaced while this process had it"):
                first.append({"epoch": 7})
        assert (files(first.path) if first.path.exists() else None) == before

    def test_one_replaced_while_it_is_being_locked_is_not_entered(self, tmp_path, monkeypatch):
        path = with_epochs(tmp_path, 1)

        def replaced(*_):
            shutil.rmtree(path)
            path.mkdir()

        monkeypatch.setattr("fcntl.flock", replaced)
        with pytest.raises(WriteError, match="was removed or replaced"):
            RunFolder(tmp_path, CONFIG, overwrite=True)
        assert list(path.iterdir()) == []


LINKED = [
    *FILES,
    "error.txt",
    ".lock",
    ".metrics.jsonl.part",
    ".error.txt.part",
    "checkpoints",
    "snapshots",
    "logs",
    "checkpoints/epoch-0009-step-0000-0123456789abcdef.pt",
    "checkpoints/.epoch-0009-step-0000-0123456789abcdef.pt.part",
    "snapshots/epoch-0009-0123456789abcdef.pt",
    "logs/csv",
]


def everything(path):
    return {str(entry.relative_to(path)): entry.is_file() and entry.read_bytes() for entry in path.rglob("*")}


class TestHostileFiles:
    """A run folder that anybody may have packed."""

    @pytest.mark.parametrize("options", [{"resume": True}, {"overwrite": True}, {}], ids=str)
    @pytest.mark.parametrize("to", ["file", "folder", "nothing"])
    @pytest.mark.parametrize("name", LINKED)
    def test_a_link_that_leads_out_of_the_run_is_refused(self, tmp_path, name, to, options):
        run = with_epochs(tmp_path / "runs", 1)
        mine = tmp_path / "mine"
        (mine / "folder" / "csv").mkdir(parents=True)
        (mine / "file").write_text("precious")
        (mine / "folder" / "csv" / "epoch-0001-step-0000-0123456789abcdef.pt").write_text("precious")
        (run / name).parent.mkdir(exist_ok=True)
        (run / name).unlink(missing_ok=True)
        (run / name).symlink_to(mine / to)
        before = everything(mine)
        message = rf"{re.escape(str(run / name))} is a symbolic link to .*{to}; .* Remove it, or choose another --out"
        with pytest.raises(RunError, match=message):
            RunFolder(tmp_path / "runs", CONFIG, **options)
        assert everything(mine) == before

    @pytest.mark.parametrize("options", [{"resume": True}, {"overwrite": True}, {}], ids=str)
    @pytest.mark.parametrize("name", LINKED)
    def test_a_pipe_is_refused_and_not_waited_for(self, tmp_path, name, options):
        run = with_epochs(tmp_path, 1)
        (run / name).parent.mkdir(exist_ok=True)
        (run / name).unlink(missing_ok=True)
        os.mkfifo(run / name)
        with pytest.raises(RunError, match=rf"{re.escape(str(run / name))} is neither a file nor a folder"):
            RunFolder(tmp_path, CONFIG, **options)

    def test_links_that_are_nothing_of_a_run_stay(self, tmp_path):
        run = with_epochs(tmp_path, 1)
        (run / "data").symlink_to(tmp_path / "elsewhere")
        (run / "logs" / "wandb").mkdir(parents=True)
        (run / "logs" / "wandb" / "latest-run").symlink_to("run-1")
        with RunFolder(tmp_path, CONFIG, overwrite=True) as folder:
            assert (folder.path / "data").is_symlink()

    @pytest.mark.parametrize("link", [os.symlink, os.link], ids=["symbolic", "hard"])
    def test_a_draft_that_is_a_link_is_replaced_and_not_followed(self, tmp_path, link):
        precious = tmp_path / "precious.txt"
        precious.write_text("precious")
        link(precious, tmp_path / ".summary.json.part")
        write_whole(tmp_path / "summary.json", "new")
        assert (precious.read_text(), (tmp_path / "summary.json").read_text()) == ("precious", "new")
        assert not (tmp_path / "summary.json").is_symlink()

    @pytest.mark.parametrize("content", ["[]", "7", "null", '"text"', "{", "[" * 100_000, b"\xff\xfe"], ids=str)
    def test_a_result_that_is_no_object_is_named(self, tmp_path, content):
        run = with_epochs(tmp_path, 1)
        (run / "summary.json").write_bytes(content if isinstance(content, bytes) else content.encode())
        with (
            RunFolder(tmp_path, CONFIG, resume=True) as folder,
            pytest.raises(RunError, match=r"summary\.json is broken \(.*Use --overwrite to start again"),
        ):
            folder.summary()


class TestContent:
    def test_metrics_are_put_back_to_those_of_the_checkpoint(self, tmp_path):
        with_epochs(tmp_path, 3)
        with RunFolder(tmp_path, CONFIG, resume=True) as folder:
            folder.write_rows([{"epoch": 1}, {"epoch": 2}])
            assert folder.rows() == [{"epoch": 1}, {"epoch": 2}]

    def test_metrics_without_a_checkpoint_are_an_error(self, tmp_path):
        with_epochs(tmp_path, 1)
        message = "metrics of 1 finished epoch but no checkpoint"
        with RunFolder(tmp_path, CONFIG, resume=True) as folder, pytest.raises(ValueError, match=message):
            folder.check_fresh()

    def test_numbers_that_are_not_finite_are_null(self, tmp_path):
        with RunFolder(tmp_path, CONFIG) as folder:
            folder.append({"epoch": 1, "loss": float("nan"), "parts": [float("inf"), 1.0]})
            assert folder.rows() == [{"epoch": 1, "loss": None, "parts": [None, 1.0]}]

    def test_numbers_are_exact(self, tmp_path):
        with RunFolder(tmp_path, CONFIG) as folder:
            folder.append({"epoch": 1, "loss": 0.1 + 0.2})
            assert folder.rows()[0]["loss"] == 0.1 + 0.2

    def test_a_write_that_fails_leaves_the_old_file(self, tmp_path, monkeypatch):
        path = tmp_path / "summary.json"
        write_whole(path, "old")

        def full(_file):
            raise OSError("no space left on device")

        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="no space left"):
            write_whole(path, "new")
        assert path.read_text() == "old"

    def test_what_a_crash_left_does_not_disturb(self, tmp_path):
        path = tmp_path / run_name(CONFIG)
        path.mkdir()
        for name in FILES:
            (path / f".{name}.part").write_text("ha")
        with RunFolder(tmp_path, CONFIG) as folder:
            assert folder.rows() == []
            assert not folder.finished


def changed(*path, to):
    """Return the JSON of a config with one value changed."""
    values = CONFIG.to_dict()
    within = values
    for name in path[:-1]:
        within = within[name]
    within[path[-1]] = to
    return json.dumps(values)


class TestHostileConfig:
    """A config.json that anybody may have written."""

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (changed("recipe", to="../../etc/passwd"), r"a recipe's name is .*got '\.\./\.\./etc/passwd'"),
            (changed("recipe", to="/etc/passwd"), "a recipe's name is .*got '/etc/passwd'"),
            (changed("recipe", to="..\\\\windows"), "a recipe's name is"),
            (changed("recipe", to=".."), "a recipe's name is"),
            (changed("recipe", to="a" * 101), "a recipe's name is up to 100"),
            (changed("recipe", to=""), "a recipe's name is"),
            (changed("recipe", to="a\0b"), "a recipe's name is"),
            (changed("recipe", to=["a"]), r"recipe must be str, got \['a'\]"),
            (changed("seed", to="0/../../x"), "seed must be int, got '0/../../x'"),
            (changed("seed", to=True), "seed must be int, got True"),
            (changed("seed", to=0.5), "seed must be int, got 0.5"),
            (changed("epochs", to=None), "epochs must be int, got None"),
            (changed("epochs", to=-1), "number of epochs must be at least 1, got -1"),
            (changed("rho", to="nan"), "rho must be float, got 'nan'"),
            (changed("rho", to=float("nan")), "rho must be a finite number"),
            (changed("device", to="cuda:0; rm -rf"), "device must be Literal"),
            (changed("root", to={"a": 1}), "root must be str | None"),
            (changed("method", to=[]), "method must be an object"),
            (changed("method", "aggregator", to=7), "method.aggregator must be str, got 7"),
            (changed("method", "options", to={"c": {"deep": 1}}), "method.options must be dict"),
            (changed("method", "options", to={"weights": ["a"]}), "method.options must be dict"),
            (changed("data", "train_samples", to="many"), "data.train_samples must be int | None, got 'many'"),
            (changed("data", "extra", to=1), "unknown .*'extra'"),
            ("{}", "missing .*'recipe'"),
            ("[1]", r"it must be an object, got \[1\]"),
            ("not json", "Expecting value"),
            ("[" * 100_000, "nested too deep"),
            ("9" * 5_000, "4300"),
            ('{"recipe": "' + "a" * 2_000_000 + '"}', "has 2,000,014 bytes"),
        ],
        ids=lambda value: value[:12],
    )
    def test_it_is_refused(self, tmp_path, content, message):
        path = tmp_path / "config.json"
        path.write_text(content)
        with pytest.raises(ValueError, match=message):
            read_config(path)

    def test_one_of_ours_is_read(self, tmp_path):
        for name in recipes.RECIPES:
            config = recipes.build(name)
            (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
            assert read_config(tmp_path / "config.json") == config

    @pytest.mark.parametrize("options", [{"resume": True}, {"overwrite": True}, {}], ids=str)
    @pytest.mark.parametrize("recipe", ["../escaped", "/tmp/escaped", "a/b", "..", ""])
    def test_no_recipe_leads_out_of_the_folder_of_runs(self, tmp_path, recipe, options):
        out = tmp_path / "runs"
        with pytest.raises(ValueError, match="a recipe's name is up to 100 letters"):
            RunFolder(out, replace(CONFIG, recipe=recipe), **options)
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize("content", [changed("seed", to="0/../x"), changed("recipe", to="../x")])
    def test_a_run_does_not_go_on_from_one(self, tmp_path, content):
        path = with_epochs(tmp_path, 1)
        (path / "config.json").write_text(content)
        before = files(path)
        with pytest.raises(ValueError, match=r"config\.json is no config of a run: .* Use --overwrite"):
            RunFolder(tmp_path, CONFIG, resume=True)
        assert files(path) == before
        assert [entry.name for entry in tmp_path.iterdir()] == [path.name]
