"""What loggers are told, above all by a run that was interrupted."""

import csv
import math
import time

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from flatmtl_bench import loggers
from flatmtl_bench.loggers import Logs, check_installed
from flatmtl_bench.recipes.config import DEFAULT_LOGGERS, Config

ROWS = [{"epoch": epoch, "train/loss/left": 1.0 / epoch, "test/accuracy": 0.1 * epoch} for epoch in range(1, 5)]


def in_csv(folder):
    with open(folder / "logs" / "csv" / "metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    return [{"epoch": int(row.pop("step")), **{name: float(v) for name, v in row.items() if v}} for row in rows]


def in_tensorboard(folder):
    """Return the rows in all event files, whatever an interruption left in them."""
    events = EventAccumulator(str(folder / "logs" / "tensorboard")).Reload()
    found = [(event.step, name, event.value) for name in events.Tags()["scalars"] for event in events.Scalars(name)]
    return [
        {"epoch": epoch, **{name: pytest.approx(value) for step, name, value in found if step == epoch}}
        for epoch, _ in sorted((step, name) for step, name, _ in found if name == "test/accuracy")
    ]


def log(folder, rows, names=DEFAULT_LOGGERS, record=()):
    logs = Logs(names, folder, record)
    for row in rows:
        logs.append(row)
    return logs


@pytest.mark.parametrize("read", [in_csv, in_tensorboard])
class TestEveryLog:
    def test_it_has_one_row_for_each_epoch(self, tmp_path, read):
        log(tmp_path, ROWS).close()
        assert read(tmp_path) == ROWS

    def test_it_can_be_read_before_the_run_ends(self, tmp_path, read):
        logs = log(tmp_path, ROWS[:2])
        assert read(tmp_path) == ROWS[:2]
        logs.close()

    @pytest.mark.parametrize("told", [1, 2, 3])
    def test_a_run_that_goes_on_after_epoch_2_neither_loses_nor_repeats_rows(self, tmp_path, read, told):
        """Killed when the logs had fewer epochs than the record, as many, or more."""
        log(tmp_path, ROWS[:told])
        log(tmp_path, ROWS[2:], record=ROWS[:2]).close()
        assert read(tmp_path) == ROWS

    def test_a_run_begun_again_forgets_the_former_one(self, tmp_path, read):
        log(tmp_path, ROWS).close()
        log(tmp_path, ROWS[:1]).close()
        assert read(tmp_path) == ROWS[:1]

    @pytest.mark.parametrize("value", [None, math.nan, math.inf])
    def test_what_is_no_finite_number_is_left_out(self, tmp_path, read, value):
        log(tmp_path, [*ROWS[:1], {**ROWS[1], "train/loss/left": value}]).close()
        assert read(tmp_path) == [ROWS[0], {name: ROWS[1][name] for name in ("epoch", "test/accuracy")}]

    def test_metrics_that_come_later_get_their_place(self, tmp_path, read):
        rows = [ROWS[0], {**ROWS[1], "train/conflict": 0.5}]
        log(tmp_path, rows).close()
        assert read(tmp_path) == rows


def test_by_default_there_are_tensorboard_and_csv(tmp_path):
    log(tmp_path, ROWS, Config().loggers).close()
    assert {path.name for path in (tmp_path / "logs").iterdir()} == {"tensorboard", "csv"}


def test_without_loggers_the_logs_of_a_former_run_go(tmp_path):
    log(tmp_path, ROWS).close()
    log(tmp_path, ROWS, names=[]).close()
    assert list((tmp_path / "logs").iterdir()) == []


def in_live_log(folder):
    """Return step -> value of one statistic, as TensorBoard shows it."""
    events = EventAccumulator(str(folder / "logs" / "live")).Reload()
    return {event.step: event.value for event in events.Scalars("conflict")}


class TestLive:
    def logs(self, folder, points, done=0, **options):
        logs = Logs(DEFAULT_LOGGERS, folder, (), done, **options)
        for step in points:
            logs.show({"conflict": step / 100, "cosine": math.nan}, step)
        return logs

    def test_points_can_be_read_as_the_run_goes_on(self, tmp_path):
        self.logs(tmp_path, [20, 40]).close()
        assert in_live_log(tmp_path) == {20: pytest.approx(0.2), 40: pytest.approx(0.4)}

    def test_a_run_that_goes_on_from_an_earlier_step_has_each_point_once(self, tmp_path):
        self.logs(tmp_path, [20, 40, 60]).close()
        time.sleep(1.0)  # TensorBoard reads its files in the order of their names, which tell the second
        self.logs(tmp_path, [40, 60, 80], done=30).close()
        assert in_live_log(tmp_path) == {step: pytest.approx(step / 100) for step in (20, 40, 60, 80)}

    def test_without_it_or_without_tensorboard_there_is_none(self, tmp_path):
        self.logs(tmp_path, [20]).close()
        logs = Logs(["csv"], tmp_path, (), 0)
        logs.show({"conflict": 0.5}, 20)
        logs.close()
        assert not (tmp_path / "logs" / "live").exists()


def test_nothing_but_logs_is_removed(tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "notes.txt").write_text("mine")
    (tmp_path / "metrics.jsonl").write_text("{}")
    log(tmp_path, ROWS).close()
    assert (tmp_path / "logs" / "notes.txt").read_text() == "mine"
    assert (tmp_path / "metrics.jsonl").read_text() == "{}"


@pytest.mark.parametrize("name", ["tensorboard", "mlflow", "wandb"])
def test_a_package_that_is_missing_is_named_with_what_to_do(monkeypatch, name):
    monkeypatch.setattr(loggers, "find_spec", lambda package: None)
    check_installed(["csv"])
    with pytest.raises(ValueError, match=f"--loggers {name} needs the package {name}.* pip install {name}"):
        check_installed(["csv", name])
