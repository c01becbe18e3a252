"""What is seen while a run trains, in a terminal of 80 columns."""

import io
import re

import pytest
from rich.console import Console

from flatmtl_bench import progress
from flatmtl_bench.progress import RunBar, epoch_line, state, training_bars

ROW = {
    "epoch": 3,
    "train/loss/left": 1.0,
    "train/loss/right": 2.0,
    "train/conflict": 0.45,
    "validation/accuracy": 0.981,
    "test/accuracy": 0.972,
}


class Terminal:
    """Bars on 80 columns, and the line that they show."""

    def __init__(self, monkeypatch):
        self.now = 100.0
        monkeypatch.setattr(progress, "monotonic", lambda: self.now)
        self.file = io.StringIO()
        self.bars = training_bars(Console(file=self.file, width=80, force_terminal=True, color_system=None))
        self.bars.get_time = lambda: self.now

    def line(self):
        with self.bars.console.capture() as seen:
            self.bars.console.print(self.bars.get_renderable())
        return seen.get().rstrip("\n")


@pytest.fixture
def terminal(monkeypatch):
    return Terminal(monkeypatch)


def run_bar(terminal, means):
    return RunBar(terminal.bars, "F-Aligned-MTL, seed 123", lambda: means)


def test_a_bar_shows_loss_accuracy_conflict_and_time_left_on_80_columns(terminal):
    bar = run_bar(terminal, {})
    for step in range(1, 13):
        terminal.now += 60.0
        bar(step, 100, ROW if step == 12 else None)
    line = terminal.line()
    assert re.fullmatch(r"F-Aligned-MTL, se… \S+ +12% loss 1\.500  test 97\.2%  conflict 45% 1:28:00", line)
    assert len(line) <= 80


@pytest.mark.parametrize("loss", [0.0, 12.3456, 1234.5])
def test_it_fits_80_columns_whatever_the_numbers(terminal, loss):
    row = {"train/loss/a": loss, "test/accuracy": 1.0, "train/conflict": 1.0}
    run_bar(terminal, {})(99, 100, row)
    line = terminal.line()
    assert "\n" not in line
    assert line.endswith(f"loss {loss:.3f}  test 100.0%  conflict 100% -:--:--")


def test_during_an_epoch_it_shows_the_means_so_far_and_the_accuracy_of_the_epoch_before(terminal):
    means = {"loss/left": 3.0, "loss/right": 4.0, "conflict": 0.5}
    bar = run_bar(terminal, means)
    bar(1, 100, None)
    assert "1% loss 3.500  conflict 50%" in terminal.line()
    bar(2, 100, ROW)
    terminal.now += 1.0
    means |= {"loss/left": 1.0, "loss/right": 1.5}
    bar(3, 100, None)
    assert "3% loss 1.250  test 97.2%  conflict 50%" in terminal.line()


def test_steps_that_follow_at_once_are_not_all_shown(terminal):
    asked = []
    bar = RunBar(terminal.bars, "", lambda: asked.append(1) or {})
    for step in range(1, 1001):
        terminal.now += 0.001
        bar(step, 1000, None)
    assert len(asked) == 5


def test_steps_of_an_earlier_process_do_not_count_for_the_time_left(terminal):
    bar = run_bar(terminal, {})
    for step in range(51, 55):
        terminal.now += 10.0
        bar(step, 100, None)
    assert terminal.line().endswith("0:07:40")


@pytest.mark.parametrize(
    ("missing", "expected"),
    [
        ("train/conflict", "epoch   3  loss 1.500  validation 98.1%  test 97.2%"),
        ("validation/accuracy", "epoch   3  loss 1.500  test 97.2%  conflict 45%"),
        ("nothing", "epoch   3  loss 1.500  validation 98.1%  test 97.2%  conflict 45%"),
    ],
)
def test_an_epoch_is_told_on_one_line(missing, expected):
    assert epoch_line({name: value for name, value in ROW.items() if name != missing}) == expected


def test_what_is_not_known_is_left_out():
    assert state({}) == ""
    assert state({"test/accuracy": 0.5}) == "test 50.0%"
    assert state({"train/loss/a": None, "train/conflict": None}) == ""
