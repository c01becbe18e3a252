"""Sweeps: what is run, that every run is what `flatmtl run` makes of it, and that nothing is lost."""

import json
import signal
from dataclasses import replace
from itertools import product

import pytest
from rich.console import Console
from tests.bench.small import FLAGS, flatmtl, made_run, small_config, stop_flatmtl

from flatmtl_bench import cli, sweep
from flatmtl_bench.commands.training import Run
from flatmtl_bench.reports import overview
from flatmtl_bench.reports.reading import read
from flatmtl_bench.runs import RunFolder, run_name
from flatmtl_bench.sweep.board import Board
from flatmtl_bench.sweep.grid import axes
from flatmtl_bench.sweep.pools import LocalPool, ProcessDied
from flatmtl_bench.sweep.work import Outcome

TIMES = ("seconds", "step_seconds")
SMALL = [*FLAGS, "--device", "cpu", "--loggers"]
LOCAL = ("--jobs", "2", "--threads", "1")
SWEEP = ("sweep", "multimnist_f_cagrad", "multimnist_f_mgda", "--grid", "rho=0.05,0.5", "--seeds", "2", *SMALL)


def summaries(out):
    """Return the results of all finished runs by name, without the times."""
    found = {path.parent.name: json.loads(path.read_text()) for path in out.glob("*/summary.json")}
    return {name: without_time(summary) for name, summary in found.items()}


def without_time(summary):
    return {name: value for name, value in summary.items() if name not in TIMES}


def without(flag, words):
    """Return the words without a flag and its value."""
    where = words.index(flag)
    return [*words[:where], *words[where + 2 :]]


def metrics(out):
    return {path.parent.name: path.read_bytes() for path in out.glob("*/metrics.jsonl")}


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """A folder in which the sweep was done once, in processes of this machine, and what the command said."""
    folder = tmp_path_factory.mktemp("sweep")
    return folder, flatmtl(*SWEEP, *LOCAL, cwd=folder)


class TestResults:
    def test_every_recipe_is_trained_with_every_combination_and_seed(self, swept):
        folder, done = swept
        assert done.returncode == 0, done.stderr
        configs = [json.loads(path.read_text()) for path in folder.glob("runs/*/config.json")]
        assert sorted((c["recipe"], c["rho"], c["seed"]) for c in configs) == list(
            product(("multimnist_f_cagrad", "multimnist_f_mgda"), (0.05, 0.5), (0, 1))
        )
        assert len(summaries(folder / "runs")) == 8

    def test_they_are_printed_as_a_line_for_each_recipe_and_setting(self, swept):
        heading, *rows = [line.split() for line in swept[1].stdout.splitlines()]
        assert heading[:3] == ["recipe", "rho", "seeds"]
        assert [row[:3] for row in rows] == [
            [recipe, rho, "2"] for recipe, rho in product(("multimnist_f_cagrad", "multimnist_f_mgda"), ("0.05", "0.5"))
        ]

    def test_each_state_of_a_run_is_a_line_where_there_is_no_terminal(self, swept):
        folder, done = swept
        for name in summaries(folder / "runs"):
            assert f"{name}: finished" in done.stderr.splitlines()

    def test_they_equal_those_of_single_runs_bit_for_bit(self, swept, tmp_path):
        folder, _ = swept
        words = ["run", "multimnist_f_mgda", "--rho", "0.5", "--seed", "1", "--out", str(tmp_path), *SMALL]
        assert cli.main(words) == 0
        ((name, single),) = metrics(tmp_path).items()
        assert metrics(folder / "runs")[name] == single
        assert summaries(folder / "runs")[name] == summaries(tmp_path)[name]

    @pytest.mark.slow
    def test_they_are_the_same_on_ray(self, swept, tmp_path):
        pytest.importorskip("ray", reason='SWEEPS ON RAY ARE NOT TESTED: pip install "flatmtl[sweep]"')
        folder, _ = swept
        done = flatmtl(*SWEEP, "--jobs", "2", "--threads", "1", "--ray", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert summaries(tmp_path / "runs") == summaries(folder / "runs")
        assert metrics(tmp_path / "runs") == metrics(folder / "runs")


class TestInterruption:
    def test_a_killed_sweep_does_only_what_is_left(self, tmp_path):
        """The board may be half a second late, and so may the end of the processes: the other run takes longer."""
        words = ("sweep", "multimnist_f_mgda", "--grid", "epochs=2,25", *without("--epochs", SMALL))
        ended, _ = stop_flatmtl(*words, *LOCAL, cwd=tmp_path, at=": finished", by=signal.SIGKILL)
        assert ended == -signal.SIGKILL
        (done,) = tmp_path.glob("runs/*/summary.json")
        before = done.stat().st_mtime_ns
        again = flatmtl(*words, *LOCAL, cwd=tmp_path)
        assert again.returncode == 0, again.stderr
        assert done.stat().st_mtime_ns == before
        assert cli.main(["run", "multimnist_f_mgda", *SMALL, "--epochs", "25", "--out", str(tmp_path / "single")]) == 0
        for found in (summaries, metrics):
            ((name, single),) = found(tmp_path / "single").items()
            assert found(tmp_path / "runs")[name] == single
            assert len(found(tmp_path / "runs")) == 2

    def test_a_stopped_sweep_saves_what_is_running_and_leaves_no_process(self, tmp_path):
        words = ("sweep", "multimnist_f_mgda", "--seeds", "3", *SMALL, "--epochs", "4000", *LOCAL)
        ended, said = stop_flatmtl(*words, cwd=tmp_path, at=": epoch", by=signal.SIGINT)
        assert ended == 130
        assert "flatmtl: stopped with 0 of 3 runs finished. The same command goes on." in said
        assert "Traceback" not in said
        assert len([line for line in said.splitlines() if line.endswith(": stopped")]) == 2, said
        assert list(tmp_path.glob("runs/*/checkpoints/*.pt"))


class Here:
    """A pool of this process, for the laws that do not concern processes."""

    def __init__(self, _jobs, _threads):
        self.stopping = False

    def map(self, work, items):
        for item in items:
            if not self.stopping:
                yield item, work(item)

    def stop(self):
        self.stopping = True

    def close(self):
        pass


@pytest.fixture
def here(monkeypatch, tmp_path):
    """The command in a folder of its own, without further processes."""
    monkeypatch.setattr(sweep, "LocalPool", Here)
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("here")
class TestRecord:
    SWEEP = ("sweep", "multimnist_mgda", "--seeds", "2", *SMALL)

    def test_finished_runs_are_not_trained_again(self, tmp_path, capsys):
        assert cli.main([*self.SWEEP]) == 0
        before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("runs/*/*")}
        capsys.readouterr()
        assert cli.main([*self.SWEEP, "--json"]) == 0
        assert {path: path.stat().st_mtime_ns for path in tmp_path.glob("runs/*/*")} == before
        found = {run["run"]: without_time(run["summary"]) for run in json.loads(capsys.readouterr().out)}
        assert found == summaries(tmp_path / "runs")

    def test_they_are_if_asked_for(self, tmp_path):
        made = []
        for words in ([], ["--overwrite"]):
            assert cli.main([*self.SWEEP, *words]) == 0
            made.append({path: path.stat().st_mtime_ns for path in tmp_path.glob("runs/*/summary.json")})
        assert len(made[0]) == 2
        assert all(made[1][path] > made[0][path] for path in made[0])

    def test_a_failure_is_recorded_and_the_others_finish(self, tmp_path, capsys):
        assert cli.main([*self.SWEEP, "--grid", "optimizer.lr=1e30,0.001"]) == 1
        said = capsys.readouterr()
        assert len(summaries(tmp_path / "runs")) == 2
        failed = [path.parent.name for path in tmp_path.glob("runs/*/error.txt")]
        assert len(failed) == 2
        assert not set(failed) & set(summaries(tmp_path / "runs"))
        for name in failed:
            assert "Traceback" in (tmp_path / "runs" / name / "error.txt").read_text()
            assert f"{name}: failed: FloatingPointError" in said.err
        assert "2 of 4 runs are not finished; the folder of one that failed has its error.txt." in said.err
        assert [line.split()[:3] for line in said.out.splitlines()[1:]] == [["multimnist_mgda", "0.001", "2"]]

    def test_its_record_goes_when_the_run_succeeds(self, tmp_path):
        with RunFolder(tmp_path, small_config("multimnist_mgda", loggers=[])) as folder:
            folder.write_error("Traceback")
        assert (folder.path / "error.txt").exists()
        assert cli.main([*self.SWEEP, "--out", str(tmp_path)]) == 0
        assert not (folder.path / "error.txt").exists()

    def test_a_run_in_use_is_left_alone(self, tmp_path, capsys):
        config = small_config("multimnist_mgda", loggers=[])
        with RunFolder(tmp_path, config) as folder:
            assert cli.main([*self.SWEEP, "--out", str(tmp_path)]) == 1
        assert f"{folder.path.name}: in use: {folder.path} is in use by another process." in capsys.readouterr().err
        assert list(summaries(tmp_path)) == [run_name(replace(config, seed=1))]

    def test_a_run_with_other_data_stops_the_sweep_before_it_begins(self, tmp_path, capsys):
        made_run(tmp_path, small_config("multimnist_mgda", loggers=[]), [0.5])
        assert cli.main([*self.SWEEP, "--out", str(tmp_path)]) == 2
        assert "was made with other data" in capsys.readouterr().err
        assert len(summaries(tmp_path)) == 1

    @pytest.mark.parametrize(
        ("grid", "message"),
        [
            ("method.aggregator=mgda,mgd", "unknown aggregator 'mgd'. Did you mean 'mgda'?"),
            ("model=lenet,lenett", "unknown model 'lenett'. Did you mean 'lenet'?"),
            ("method.options.normalise=l2,l3", "l3"),
        ],
    )
    def test_what_only_training_needs_is_checked_for_all_runs_first(self, tmp_path, capsys, grid, message):
        words = [word for word in self.SWEEP if word not in ("--model", "lenet")]
        assert cli.main([*words, "--grid", grid]) == 2
        said = capsys.readouterr()
        assert message in said.err
        assert said.out == ""
        assert not list(tmp_path.glob("runs/*/env.json"))

    @pytest.mark.parametrize(
        ("words", "jobs", "threads"),
        [
            ([], 2, 1),
            (["--jobs", "3"], 2, 5),
            (["--jobs", "1"], 1, 16),
            (["--jobs", "32"], 2, 1),
            (["--threads", "16"], 1, 16),
            (["--jobs", "2", "--threads", "2"], 2, 2),
        ],
    )
    def test_the_cores_are_divided_among_the_jobs_however_many_runs_there_are(self, monkeypatch, words, jobs, threads):
        made = []

        def pool(*arguments):
            made.append(arguments)
            return Here(*arguments)

        monkeypatch.setattr(sweep, "cpu_count", lambda: 16)
        monkeypatch.setattr(sweep, "LocalPool", pool)
        monkeypatch.setattr(sweep, "train", lambda run: Outcome("in use"))
        assert cli.main([*self.SWEEP, *words]) == 1
        assert made == [(jobs, threads)]

    def test_the_source_of_the_data_is_known_before_runs_are_compared(self, tmp_path):
        words = [word for word in self.SWEEP if word not in ("--source", "mnist5k")]
        assert cli.main([*words, "--grid", "source=auto,mnist5k"]) == 0
        assert len(list(tmp_path.glob("runs/*"))) == 2


class TestProcesses:
    def test_one_that_dies_takes_only_its_own_item_with_it(self):
        pool = LocalPool(jobs=2, threads=1)
        killed = "__import__('os').kill(__import__('os').getpid(), 9)"
        items = ["1 + 1", killed, "2 + 2"]
        try:
            found = dict(pool.map(eval, items))
        finally:
            pool.close()
        died = found.pop(killed)
        assert isinstance(died, ProcessDied)
        assert "SIGKILL" in str(died)
        assert found == {"1 + 1": 2, "2 + 2": 4}


class TestGrid:
    @pytest.mark.parametrize(
        ("words", "message"),
        [
            ([], "name recipes first"),
            (["multimnist_mgd"], "unknown recipe 'multimnist_mgd'. Did you mean 'multimnist_mgda'?"),
            (["multimnist_f_mgda", "--grid", "rho"], "--grid 'rho' is no name with values"),
            (["multimnist_f_mgda", "--grid", "rho=0.1,"], "--grid 'rho=0.1,' is no name with values"),
            (
                ["multimnist_f_mgda", "--grid", "rho=1", "--grid", "rho=2"],
                "rho twice. Give all its values at once: rho=1,2",
            ),
            (["multimnist_f_mgda", "--grid", "rho=0.1,much"], "Error parsing --rho: could not convert"),
            (["multimnist_f_mgda", "--grid", "rho=0.1,-1"], "rho must not be negative, got -1"),
            (["multimnist_f_mgda", "--grid", "rh=0.1"], "--rho"),
            (["multimnist_mgda", "--grid", "rho=0.1"], "multimnist_mgda is a plain method"),
            (
                ["multimnist_mgda", "--grid", "batch-size=4,8", "--batch_size", "2"],
                "--batch_size is given for all runs",
            ),
            (["multimnist_mgda", "--grid", "out=a,b"], "Give --out once, for all runs"),
            (["nyuv2_f_mgda_paper", "--tune", "--grid", "rho=1"], "nyuv2_f_mgda_paper holds none out"),
            (["multimnist_f_mgda", "--tune", "--rho", "1"], "--rho is given for all runs and varied"),
            (["multimnist_mgda", "--grid", "help=1"], "not help; see `flatmtl run --help`"),
            (["multimnist_mgda", "--grid", "h=1"], "not h; see `flatmtl run --help`"),
            (["multimnist_mgda", "--grid", "tyro-print-completion=bash"], "not tyro_print_completion"),
            (["multimnist_f_mgda", "--grid", "rho=0.1'"], "--grid rho: cannot read the value 0.1' (No closing"),
            (
                ["multimnist_cagrad", "--grid", "method.options.c='a,b'"],
                "--grid method.options.c: cannot read the value 'a (No closing quotation)",
            ),
            (["multimnist_f_mgda", "--grid", "rho=0.1 --seed 9"], "--grid rho: --seed is a flag, not a value"),
            (
                ["multimnist_cagrad", "--grid", "method.options.c=0.2", "--method.options", "c", "0.5"],
                "--method.options is given for all runs and varied by --grid",
            ),
            (["multimnist_mgda", "--grid", "root=a,b"], "they differ in root only"),
            (["multimnist_mgda", "--seeds", "0"], "--seeds must be a whole number from 1, got 0"),
            (
                ["multimnist_mgda", "--jobs", "2", "--ray-address", "auto"],
                "--threads says how many CPUs each run takes",
            ),
            (["multimnist_mgda", "--devices", "2"], "a sweep trains each run in one process"),
        ],
        ids=lambda value: value if isinstance(value, str) else " ".join(value),
    )
    def test_a_mistake_is_told_before_anything_is_done(self, tmp_path, monkeypatch, capsys, words, message):
        monkeypatch.chdir(tmp_path)
        try:
            code = cli.main(["sweep", *words])
        except SystemExit as stop:  # of tyro
            code = stop.code
        said = capsys.readouterr()
        assert (code, said.out) == (2, "")
        assert message in " ".join(said.err.replace("│", " ").split())
        assert list(tmp_path.iterdir()) == []

    def configs(self, capsys, *words):
        assert cli.main(["sweep", *words, "--dry-run"]) == 0
        return json.loads(capsys.readouterr().out)

    def test_a_dry_run_prints_every_config(self, capsys, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        found = self.configs(
            capsys, "multimnist_f_mgda", "--grid", "rho=0.1,0.2", "epochs=3", "--seeds", "2", "--seed", "7"
        )
        assert [(c["rho"], c["epochs"], c["seed"]) for c in found] == [
            (0.1, 3, 7),
            (0.1, 3, 8),
            (0.2, 3, 7),
            (0.2, 3, 8),
        ]
        assert list(tmp_path.iterdir()) == []

    def test_equal_combinations_are_one_run(self, capsys):
        assert len(self.configs(capsys, "multimnist_f_mgda", "multimnist_f_mgda", "--grid", "rho=0.5,0.50,1")) == 2

    def test_what_a_recipe_leaves_open_is_varied_if_asked(self, capsys):
        found = self.configs(capsys, "multimnist_f_cagrad", "multimnist_f_mgda", "--tune", "--grid", "rho=0.1,1")
        chosen = [(c["method"]["aggregator"], c["rho"], c["method"]["options"].get("c")) for c in found]
        cagrad = [("cagrad", rho, c) for c in (0.2, 0.4, 0.6, 0.8) for rho in (0.1, 1.0)]
        assert chosen == [*cagrad, ("mgda", 0.1, None), ("mgda", 1.0, None)]

    def test_one_option_of_the_aggregator_changes_and_the_others_stay(self, capsys):
        found = self.configs(capsys, "multimnist_cagrad_official", "--grid", "method.options.c=0.2,0.6")
        assert [c["method"]["options"] for c in found] == [{"c": c, "rescale": "1+c2"} for c in (0.2, 0.6)]

    def test_a_flag_is_varied_by_true_and_false(self, capsys):
        found = self.configs(capsys, "multimnist_mgda", "--grid", "data.same_label=True,False")
        assert [c["data"]["same_label"] for c in found] == [True, False]

    def test_commas_in_brackets_belong_to_a_value(self):
        assert axes(["a=[1,2],3"]) == {"a": ["[1,2]", "3"]}


class TestBoard:
    @pytest.fixture
    def board(self, tmp_path):
        """Three runs: one is finished, one has failed, and one is waiting until its environment is written."""
        runs = {run_name(c): Run(c, out=str(tmp_path)) for c in (small_config(seed=seed) for seed in range(3))}
        finished, failed, _ = runs
        made_run(tmp_path, runs[finished].config, [0.5, 0.75])
        return Board(runs, {finished: Outcome("finished"), failed: Outcome("failed", "ValueError: bad")})

    def test_a_run_is_running_when_its_training_has_begun(self, board):
        waiting = list(board.runs)[2]
        assert board.outcome(waiting).state == "waiting"
        with RunFolder(board.runs[waiting].out, board.runs[waiting].config) as folder:
            folder.write_environment({})
        assert board.outcome(waiting).state == "running"

    def test_the_table_shows_states_epochs_and_accuracies_and_fits_the_screen(self, board):
        console = Console(width=100)
        with console.capture() as capture:
            console.print(board.table(height=20))
        text = capture.get()
        assert "3 runs: 1 failed, 1 finished, 1 waiting" in text
        (line,) = [line for line in text.splitlines() if next(iter(board.runs)) in line]
        assert line.split()[1:] == ["finished", "2/2", "validation", "75.0%", "test", "65.0%"]
        with console.capture() as capture:
            console.print(board.table(height=6))
        assert len(capture.get().splitlines()) <= 6

    def test_news_are_told_once(self, board):
        finished, failed, waiting = board.runs
        assert list(board.news()) == [f"{finished}: finished", f"{failed}: failed: ValueError: bad"]
        with RunFolder(board.runs[waiting].out, board.runs[waiting].config) as folder:
            folder.write_environment({})
            folder.append({"epoch": 1, "train/loss/left": 1.0, "test/accuracy": 0.5})
        assert list(board.news()) == [f"{waiting}: epoch   1  loss 1.000  test 50.0%"]
        assert list(board.news()) == []

    def test_a_result_that_is_nowhere_to_be_seen_is_a_failure(self, board):
        name = list(board.runs)[2]
        board.record(name, Outcome("finished"))
        assert "Choose an --out that all machines share" in board.outcome(name).message


def test_the_overview_takes_means_over_seeds_and_says_what_is_not_known(tmp_path):
    runs = [
        read(made_run(tmp_path, small_config("multimnist_mgda", seed=seed), [0.5, accuracy], conflict=0.25))
        for seed, accuracy in enumerate((0.7, 0.9))
    ]
    unknown = replace(runs[0], config=replace(runs[0].config, epochs=9), summary={**runs[0].summary, "sharpness": None})
    rows = overview.table([*runs, unknown], ["epochs"])
    assert rows[0][:5] == ["recipe", "epochs", "seeds", "accuracy, %", "conflict, %"]
    assert rows[1] == ["multimnist_mgda", "2", "2", "70.00 ± 14.14", "25.0 ± 0.0", "0.2500 ± 0.0000", "100.0 ± 0.0"]
    assert rows[2] == ["multimnist_mgda", "9", "1", "60.00", "25.0", "-", "100.0"]
