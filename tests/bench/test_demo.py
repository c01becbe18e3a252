"""The demonstration, on little data."""

import signal

import pytest
from tests.bench.small import flatmtl, lines, stop_flatmtl, without_times

from flatmtl_bench.demo import Demo
from flatmtl_bench.runs import FILES

WORDS = ("demo", "--epochs", "2", "--pairs", "256")


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    """A folder in which the demonstration was run once, and what it printed."""
    folder = tmp_path_factory.mktemp("demo")
    return folder, flatmtl(*WORDS, cwd=folder)


def metrics(folder):
    return {path.parent.name: lines(path) for path in folder.glob("runs/*/metrics.jsonl")}


def test_it_trains_both_methods_from_equal_seeds(shown):
    folder, done = shown
    assert done.returncode == 0, done.stderr
    names = sorted(path.name for path in (folder / "runs").iterdir())
    assert [(name.rsplit("-", 2)[0], name[-2:]) for name in names] == [
        (method, seed) for method in ("multimnist_cagrad", "multimnist_f_cagrad") for seed in ("s0", "s1")
    ]
    assert all({file.name for file in path.iterdir()} >= set(FILES) for path in (folder / "runs").iterdir())


def test_it_prints_table_finding_and_page(shown):
    _, done = shown
    for text in ("left, %", "right, %", "average, %", "conflict, %", "sharpness", "ms per step", "±", "F-CAGrad"):
        assert text in done.stdout
    assert "average test accuracy" in " ".join(done.stdout.split())
    assert max(map(len, done.stdout.splitlines()[:-1])) <= 80


def test_it_writes_the_page(shown):
    folder, _ = shown
    html = (folder / "report.html").read_text()
    assert "<title>F-CAGrad against CAGrad</title>" in html


def test_a_second_time_shows_the_same_without_training(shown):
    folder, done = shown
    before = metrics(folder)
    (folder / "report.html").unlink()
    again = flatmtl(*WORDS, cwd=folder)
    assert (again.returncode, again.stdout) == (0, done.stdout)
    assert "4 of 4 runs in runs are finished; --overwrite trains them again" in again.stderr
    assert metrics(folder) == before
    assert (folder / "report.html").exists()


def test_a_foreign_page_is_left_alone(tmp_path):
    (tmp_path / "report.html").write_text("my thesis")
    done = flatmtl(*WORDS, cwd=tmp_path)
    assert done.returncode == 2
    assert "report.html exists and is no page of flatmtl. Choose another --report." in done.stderr
    assert (tmp_path / "report.html").read_text() == "my thesis"
    assert not (tmp_path / "runs").exists()


def test_interrupted_and_then_killed_it_goes_on_with_the_same_numbers(shown, tmp_path):
    whole, _ = shown
    for by, code in ((signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)):
        ended, said = stop_flatmtl(*WORDS, "--seeds", "1", cwd=tmp_path, at=": epoch   ", by=by)
        assert ended == code
        assert ("goes on where it stopped." in said) == (by is signal.SIGINT)
        assert "Traceback" not in said
        assert len(list(tmp_path.glob("runs/*/summary.json"))) < 2
    done = flatmtl(*WORDS, "--seeds", "1", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    expected = {name: without_times(rows) for name, rows in metrics(whole).items() if name.endswith("s0")}
    assert {name: without_times(rows) for name, rows in metrics(tmp_path).items()} == expected


def test_plain_and_flat_differ_in_the_perturbation_only():
    plain, flat = Demo(seeds=1).configs()
    values = [c.to_dict() for c in (plain, flat)]
    assert {k for k in values[0] if values[0][k] != values[1][k]} == {"recipe", "rho", "method"}
    assert {k for k in values[0]["method"] if values[0]["method"][k] != values[1]["method"][k]} == {"perturbation"}
