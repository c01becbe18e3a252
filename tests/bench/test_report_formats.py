"""The numbers of a report, recomputed by pandas from the metrics of each epoch; and its formats."""

import csv
import io
import json
import os
import re
import shutil
import subprocess
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from tests.bench.small import drawn_run

from flatmtl_bench import cli, recipes
from flatmtl_bench.reports import latex, markdown
from flatmtl_bench.reports.grid import Cell, Grid

PAIRS = {"accuracy/left": "higher", "accuracy/right": "higher"}
MIXED = {"miou/segmentation": "higher", "abs_err/depth": "lower", "mean/normals": "lower"}


def config(recipe, protocol="honest", **changes):
    built = recipes.build(recipe)
    held_out = built.data if protocol == "honest" else replace(built.data, validation_share=0.0)
    return replace(built, protocol=protocol, data=held_out, device="cpu", epochs=15, **changes)


def write(out, data, better, protocol="honest", seeds=3, **changes):
    """Write single-task learning, and two methods with their flat forms."""
    for task in (name.partition("/")[2] for name in better):
        own = {name: direction for name, direction in better.items() if name.endswith(f"/{task}")}
        for seed in range(seeds):
            drawn_run(out, config(f"{data}_stl", protocol, task=task, seed=seed, **changes), own)
    for method in ("mgda", "f_mgda", "cagrad", "f_cagrad"):
        for seed in range(seeds):
            drawn_run(out, config(f"{data}_{method}", protocol, seed=seed, **changes), better)


def recomputed(out):
    """Return the test metrics of every run as pandas finds them in the files of epochs and configs alone."""
    rows = []
    for path in out.iterdir():
        settings = json.loads((path / "config.json").read_text())
        epochs = pd.read_json(path / "metrics.jsonl", lines=True)
        by = {"honest": "validation/score", "official": "test/score"}
        if settings["protocol"] == "paper":
            counting = epochs.tail(10)
        else:
            counting = epochs.loc[[epochs[by[settings["protocol"]]].idxmax()]]
        form = "F-" if settings["method"]["perturbation"] != "none" else ""
        label = {"mgda": "MGDA", "cagrad": "CAGrad", "ls": "STL"}[settings["method"]["aggregator"]]
        for name in counting.filter(regex=r"^test/\w+/").columns:
            value = counting[name].mean(skipna=False)
            rows.append((form + label, settings["seed"], name.removeprefix("test/"), value))
    found = pd.DataFrame(rows, columns=["method", "seed", "metric", "value"])
    return found.pivot(index=["method", "seed"], columns="metric", values="value")


@pytest.fixture
def report(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)

    def run(*words, code=0):
        assert cli.main(["report", *words]) == code
        run.said = capsys.readouterr()
        return run.said.out

    return run


@pytest.fixture
def out(tmp_path):
    return tmp_path / "runs"


class TestRecomputation:
    @pytest.mark.parametrize(
        ("protocol", "data", "better", "source"),
        [
            ("honest", "multimnist", PAIRS, "mnist5k"),
            ("paper", "multimnist", PAIRS, "mnist5k"),
            ("official", "multimnist", PAIRS, "mnist5k"),
            ("honest", "scenes", MIXED, "scenes"),
        ],
    )
    def test_every_number_is_that_of_pandas(self, out, report, protocol, data, better, source):
        write(out, data, better, protocol, source=source)
        found = recomputed(out)[list(better)]
        baseline = found.loc["STL"].mean()
        signs = np.array([-1 if direction == "higher" else 1 for direction in better.values()])
        delta = (100 * signs * (found - baseline) / baseline).mean(axis=1)
        (table,) = json.loads(report("--json"))
        assert table["protocol"] == protocol
        assert [row["method"] for row in table["rows"]] == ["STL", "MGDA", "F-MGDA", "CAGrad", "F-CAGrad"]
        for row in table["rows"]:
            own = found.loc[row["method"]]
            for name in better:
                numbers = row["metrics"][name]
                assert numbers["values"] == pytest.approx(own[name].tolist(), rel=1e-12)
                assert numbers["mean"] == pytest.approx(own[name].mean(), rel=1e-12)
                assert numbers["sd"] == pytest.approx(own[name].std(ddof=1), rel=1e-12)
            assert row["delta_m"]["values"] == pytest.approx(delta.loc[row["method"]].tolist(), rel=1e-9, abs=1e-9)
        for pair, method in zip(table["pairs"], ("MGDA", "CAGrad"), strict=True):
            differences = found.loc[f"F-{method}"] - found.loc[method]
            for name, direction in better.items():
                self.check(pair["differences"][name], differences[name], direction)
            self.check(pair["delta_m"], delta.loc[f"F-{method}"] - delta.loc[method], "lower")

    def check(self, found, expected, direction):
        """Student's t for two degrees of freedom is 4.302653 at 97.5 %."""
        half = 4.302652729911275 * expected.std(ddof=1) / np.sqrt(3)
        assert found["values"] == pytest.approx(expected.tolist(), rel=1e-9, abs=1e-9)
        assert (found["mean"], found["low"], found["high"]) == pytest.approx(
            (expected.mean(), expected.mean() - half, expected.mean() + half), rel=1e-9
        )
        assert found["wins"] == ((expected > 0) if direction == "higher" else (expected < 0)).sum()

    def test_what_is_printed_is_that_rounded(self, out, report):
        write(out, "multimnist", PAIRS, source="mnist5k")
        own = recomputed(out).loc["F-CAGrad"]["accuracy/left"]
        assert f"{100 * own.mean():.2f} ± {100 * own.std(ddof=1):.2f}" in report()

    def test_a_run_that_failed_is_never_the_best_nor_in_a_difference(self, out, report):
        write(out, "multimnist", PAIRS, source="mnist5k")
        shutil.rmtree(next(out.glob("multimnist_f_mgda-*-s1")))
        drawn_run(out, config("multimnist_f_mgda", seed=1, source="mnist5k"), PAIRS, failed="accuracy/left")
        (table,) = json.loads(report("--json"))
        failed = next(row for row in table["rows"] if row["method"] == "F-MGDA")
        assert failed["metrics"]["accuracy/left"]["mean"] is failed["delta_m"]["mean"] is None
        pair = table["pairs"][0]
        assert pair["differences"]["accuracy/left"] is pair["differences"]["accuracy"] is pair["delta_m"] is None
        (line,) = [line for line in report().splitlines() if line.startswith("F-MGDA  ")]
        assert line.count("failed 1/3") == 3  # of the task, the average and Delta m


class TestBroken:
    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (b'{"epoch": 1, "a": 0.5}\n{"epoch": 2, "a"', "line 2: "),
            (b'{"epoch": 1}\n[1]\n', "line 2 is no object with an epoch, but '[1]'"),
            (b'{"a": 0.5}\n', "line 1 is no object with an epoch"),
            (b'{"epoch": "1"}\n', "line 1 is no object with an epoch"),
            (b'{"epoch": 1, "a": "high"}\n', "'a' is 'high', which is no number."),
            (b'{"epoch": 1, "a": true}\n', "'a' is True, which is no number."),
            (b'{"epoch": 1, "a": [1]}\n', "'a' is [1], which is no number."),
            (b'{"epoch": 1, "a": 1' + b"0" * 400 + b"}\n", "a value of 'a' is too large."),
            (b'{"epoch": 2}\n{"epoch": 1}\n', "expected the epochs from 1 on, got [2, 1]"),
            (b"", "expected the epochs from 1 on, got []"),
            (b"\xff\xfe", "codec can't decode"),
            (b"[" * 100_000, "line 1"),
        ],
        ids=lambda value: repr(value)[:30],
    )
    def test_damaged_metrics_are_named_and_the_rest_is_reported(self, out, report, content, message):
        paths = [drawn_run(out, config("multimnist_ls", seed=s, source="mnist5k"), PAIRS) for s in range(2)]
        (paths[0] / "metrics.jsonl").write_bytes(content)
        (table,) = json.loads(report("--json"))
        assert [row["seeds"] for row in table["rows"]] == [[1]]
        (line,) = report.said.err.splitlines()
        assert f"{paths[0].name}/metrics.jsonl is broken: " in line
        assert message in line


class TestFormats:
    @pytest.fixture
    def written(self, out):
        write(out, "multimnist", PAIRS, source="mnist5k")
        return out

    def test_markdown_has_the_cells_of_the_tables_the_best_in_bold(self, written, report):
        rows = [line.strip("| ").split(" | ") for line in report("--format", "markdown").splitlines() if "|" in line]
        widths = {len(row) for row in rows}
        assert widths == {6, 9}
        (table,) = json.loads(report("--json"))
        best = max(table["rows"], key=lambda row: row["metrics"]["accuracy/left"]["mean"])
        strong = [row[0] for row in rows if row[2].startswith("**") and "±" in row[2]]
        assert strong == [best["method"]]
        assert [row[0] for row in rows[:3]] == ["method", ":--", "STL"]

    def test_what_would_be_a_mark_is_text(self):
        odd = Grid("results", [], ["a|b"], [[Cell("x_1 *y* [z]")]])
        assert markdown.table(odd).splitlines()[0] == r"| a\|b |"
        assert markdown.table(odd).splitlines()[2] == r"| x\_1 \*y\* \[z\] |"

    def test_latex_has_as_many_cells_in_each_row_as_columns(self, written, report):
        text = report("--format", "latex")
        assert text.splitlines()[0].startswith("%")
        assert r"\usepackage{booktabs,graphicx}" in text.splitlines()[0]
        tables = re.findall(r"\\begin{tabular}{([lr]+)}(.*?)\\end{tabular}", text, re.DOTALL)
        assert len(tables) == 3
        for columns, body in tables:
            rows = [line for line in body.splitlines() if line.endswith(r"\\")]
            assert {len(re.findall(r"(?<!\\)&", row)) + 1 for row in rows} == {len(columns)}
            assert body.count(r"\toprule") == body.count(r"\midrule") == body.count(r"\bottomrule") == 1
        assert tables[0][1].count(r"\addlinespace") == 2  # three methods, each with its flat form
        assert r"$\pm$" in text
        assert "±" not in text.replace("% ", "")

    def test_latex_escapes_what_it_would_read_as_a_command(self):
        special = "".join(map(chr, range(32, 127)))
        for letter in "&%$#_{}":
            assert latex.escaped(letter) == f"\\{letter}"
        bare = re.sub(r"\\([a-zA-Z]+({})?|[&%$#_{}])|\$[^$]*\$", "", latex.escaped(special + "±°"))
        assert not {*"&%$#_{}\\~^<>|±°"} & {*bare}
        assert latex.escaped("-0.5 [-1.0, +2.0] F-LS 1e-05") == "$-$0.5 [$-$1.0, $+$2.0] F-LS 1e-05"

    @pytest.mark.skipif(shutil.which("pdflatex") is None, reason="pdflatex is not here to set the tables with")
    def test_latex_can_be_set(self, written, report, tmp_path):
        report("--out", "tables.tex")
        head = r"\documentclass{article}\usepackage{booktabs,graphicx}\begin{document}\input{tables}\end{document}"
        (tmp_path / "paper.tex").write_text(head)
        subprocess.run(["pdflatex", "-halt-on-error", "paper.tex"], cwd=tmp_path, check=True, capture_output=True)
        assert (tmp_path / "paper.pdf").exists()

    def test_csv_is_what_pandas_needs_for_the_means_of_the_table(self, written, report):
        found = pd.read_csv(io.StringIO(report("--format", "csv")))
        (table,) = json.loads(report("--json"))
        metrics = found.pivot(index=["method", "seed"], columns="metric", values="value")
        for row in table["rows"]:
            for name in PAIRS:
                values = metrics.loc[row["method"]][name].tolist()
                assert values == pytest.approx(row["metrics"][name]["values"], rel=1e-14)
            deltas = metrics.loc[row["method"]]["delta_m"].tolist()
            assert deltas == pytest.approx(row["delta_m"]["values"], rel=1e-14)
        assert {*found["flat"]} == {True, False}
        assert {*found["protocol"]} == {"honest"}
        assert "conflict_percent" not in {*found[found.method == "STL"].metric}

    def test_csv_leaves_what_is_not_finite_empty(self, out, report):
        drawn_run(out, config("multimnist_ls", source="mnist5k"), PAIRS, failed="accuracy/left")
        values = {row["metric"]: row["value"] for row in csv.DictReader(io.StringIO(report("--format", "csv")))}
        assert values["accuracy/left"] == ""
        assert float(values["accuracy/right"]) > 0

    def test_two_tables_of_one_name_are_told_apart_in_every_format(self, out, report):
        for k in range(2):
            made = config("multimnist_ls", seed=k, source="mnist5k")
            drawn_run(out, made, PAIRS, fingerprints={"test": f"data{k}"})
        for name in ("terminal", "markdown", "latex", "csv"):
            text = report("--format", name)
            assert "data0" in text
            assert "data1" in text

    @pytest.mark.parametrize("protocol", ["honest", "paper", "official"])
    def test_every_table_says_what_its_protocol_counts(self, out, report, protocol):
        drawn_run(out, config("multimnist_ls", protocol, source="mnist5k"), PAIRS)
        counted = {"honest": "on validation data", "paper": "the last ten epochs", "official": "they are optimistic"}
        for name in ("terminal", "markdown", "latex"):
            text = report("--format", name)
            assert f"protocol {protocol}" in text
            assert [words for words in counted.values() if words in text] == [counted[protocol]]


class TestOut:
    @pytest.fixture(autouse=True)
    def written(self, out):
        write(out, "multimnist", PAIRS, seeds=2, source="mnist5k")

    @pytest.mark.parametrize(
        ("ending", "words"),
        [
            ("md", ("--format", "markdown")),
            ("tex", ("--format", "latex")),
            ("csv", ("--format", "csv")),
            ("json", ("--json",)),
        ],
    )
    def test_the_ending_chooses_the_format(self, report, tmp_path, ending, words):
        assert report("--out", f"new/report.{ending}") == f"new/report.{ending}\n"
        assert (tmp_path / "new" / f"report.{ending}").read_text() == report(*words)

    def test_a_page_links_to_figures_from_where_it_lies(self, report, tmp_path):
        (tmp_path / "drawn").mkdir()
        (tmp_path / "drawn" / "rho.png").write_bytes(b"")
        report("--out", "pages/report.html", "--figures", "drawn")
        text = (tmp_path / "pages" / "report.html").read_text()
        assert text.lstrip().startswith("<!doctype html>")
        assert 'href="../drawn/rho.png"' in text

    def test_a_file_is_replaced_only_if_that_is_asked_for(self, report, tmp_path):
        (tmp_path / "report.md").write_text("mine")
        assert report("--out", "report.md", code=2) == ""
        assert "report.md exists. Use --overwrite to replace it" in report.said.err
        assert (tmp_path / "report.md").read_text() == "mine"
        report("--out", "report.md", "--overwrite")
        assert "MGDA" in (tmp_path / "report.md").read_text()

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (("--out", "report.doc"), "ends in '.doc'; expected one of .md, .tex, .csv, .json, .html."),
            (("--out", "report"), "ends in 'nothing'; expected one of"),
            (("--out", "file/report.md"), "file is no folder that can be written to"),
            (("--out", "runs.md"), "runs.md is a folder"),
            (("--out", "report.md", "--json"), "the ending of --out chooses its format"),
            (("--out", "report.md", "--format", "csv"), "the ending of --out chooses its format"),
            (("--json", "--format", "csv"), "are two formats"),
        ],
    )
    def test_what_cannot_be_written_is_a_mistake_before_the_work(self, report, tmp_path, monkeypatch, words, message):
        (tmp_path / "file").write_text("")
        (tmp_path / "runs.md").mkdir()
        monkeypatch.setattr("flatmtl_bench.reports.command.find", lambda _: pytest.fail("it has begun"))
        assert report(*words, code=2) == ""
        assert message in report.said.err

    @pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
    def test_a_folder_without_the_right_to_write_is_a_mistake(self, report, tmp_path):
        (tmp_path / "closed").mkdir(mode=0o500)
        report("--out", "closed/report.md", code=2)
        assert "closed is no folder that can be written to" in report.said.err
