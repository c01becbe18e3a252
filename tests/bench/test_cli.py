"""The command as a user runs it: exit codes, what goes to which stream, and nothing lost."""

import json
import re
import signal
import subprocess
import sys

import pytest
from tests.bench.small import FLAGS, flatmtl, lines, stop_flatmtl

from flatmtl_bench import cli, commands
from flatmtl_bench.recipes import RECIPES, Config

NO_NETWORK = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9")
named = {"ids": lambda value: value if isinstance(value, str) else " ".join(value)}
RUN = ("run", "multimnist_f_cagrad", *FLAGS)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["lis"], "unknown command 'lis'. Did you mean 'list'?"),
        (["data", "shwo"], "unknown command 'data shwo'. Did you mean 'data show'?"),
        (["run"], "name a recipe first"),
        (["run", "multimnist_mgd"], "unknown recipe 'multimnist_mgd'. Did you mean 'multimnist_mgda'?"),
        (["run", "multimnist_f_mgda", "--rho", "-0.5"], "rho must not be negative, got -0.5"),
        (["run", "multimnist_mgda", "--rho", "0.5"], "multimnist_mgda is a plain method"),
        (["run", "multimnist_mgda", "--rho", "much"], "Error parsing --rho: could not convert"),
        (["run", "multimnist_mgda", "--protocol", "nice"], "invalid choice 'nice'"),
        (["run", "multimnist_mgda", "--epoch", "3"], "--epochs"),
        (["list", "nothing_like_it"], "no recipe contains 'nothing_like_it'"),
        (["demo", "--seeds", "0"], "number of seeds must be at least 1, got 0"),
        (["demo", "--rho", "-1"], "rho must not be negative"),
        (["demo", "--rho", "nan"], "rho must be a finite number, got nan"),
        (["demo", "--pairs", "0"], "data.train_samples must be at least 1, got 0"),
        (["run", "--out", "multimnist_mean", "multimnist_f_cagrad"], "name a recipe first"),
        (["run", "../escaped", "--out", "multimnist_mean"], "unknown recipe '../escaped'"),
        (["run", "multimnist_mgda", "--sharpness.rho", "0"], "sharpness is measured with --sharpness.rho above 0"),
        (["run", "multimnist_mgda", "--sharpness.samples", "-5"], "at least one sample, got rho 0.05 and -5 samples"),
        (["run", "multimnist_f_mgda", "--rho", "inf"], "rho must be a finite number, got inf"),
    ],
    **named,
)
def test_a_mistake_is_one_message_and_exit_code_2(tmp_path, words, message):
    done = flatmtl(*words, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in " ".join(done.stderr.replace("│", " ").split())
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_download_without_network_leaves_no_run(tmp_path):
    done = flatmtl("run", "multimnist_mgda", "--source", "full", "--data.download", cwd=tmp_path, **NO_NETWORK)
    assert (done.returncode, done.stdout) == (2, "")
    assert "could not download MNIST" in done.stderr
    assert "Offline?" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--source", "full", "--root", "nowhere"], "no complete MNIST in nowhere"),
        (["--source", "npz", "--root", "."], "no mnist*.npz"),
        (["--source", "mnist5k", "--model", "lenett"], "unknown model 'lenett'. Did you mean 'lenet'?"),
        (["--source", "mnist5k", "--method.aggregator", "mgd"], "unknown aggregator 'mgd'. Did you mean 'mgda'?"),
        (["--source", "mnist5k", "--method.options", "c", "1"], "--method.options alone for none"),
        (
            ["--source", "mnist5k", "--method.aggregator", "rlw", "--method.options", "seed", "0.5"],
            "bad --method.options",
        ),
    ],
    **named,
)
def test_what_cannot_be_built_leaves_no_run(tmp_path, monkeypatch, capsys, words, message):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["run", "multimnist_mgda", *words]) == 2
    said = capsys.readouterr()
    assert message in said.err
    assert said.out == ""
    assert list(tmp_path.iterdir()) == []


def test_help_explains_every_field(tmp_path):
    done = flatmtl("run", "--help", cwd=tmp_path, COLUMNS="80")
    text = " ".join(done.stdout.replace("│", " ").replace("no-same-label", "same-label").split())
    entries = {}
    for entry in re.split(r" --(?=[a-z])", text):
        entries.setdefault(entry.split()[0].rstrip(","), entry)
    for name in field_names(Config().to_dict()):
        assert re.search(r"\w+ \w+ \w+", entries[name.replace("_", "-")]), f"--{name} is not explained"
    assert done.returncode == 0


def field_names(values, prefix=""):
    for name, value in values.items():
        if isinstance(value, dict) and value:
            yield from field_names(value, f"{prefix}{name}.")
        elif name != "recipe":
            yield prefix + name


def test_dry_run_prints_the_full_config_and_does_nothing(tmp_path):
    done = flatmtl("run", "multimnist_f_mgda", "--rho", "0.25", "--seed", "3", "--dry-run", cwd=tmp_path)
    config = Config.from_dict(json.loads(done.stdout))
    assert (config.recipe, config.rho, config.seed, config.model) == ("multimnist_f_mgda", 0.25, 3, "resnet18")
    assert (done.returncode, done.stderr, list(tmp_path.iterdir())) == (0, "", [])


@pytest.mark.parametrize(
    ("words", "options"),
    [
        (["multimnist_cagrad"], {"c": 0.4}),
        (["multimnist_cagrad", "--method.options", "rescale", "1+c2", "c", "1"], {"rescale": "1+c2", "c": 1}),
        (["multimnist_cagrad", "--method.aggregator", "mgda", "--method.options"], {}),
        (["multimnist_pcgrad", "--method.options", "seed", "2"], {"seed": 2}),
        (
            ["multimnist_mean", "--method.aggregator", "fixed", "--method.options", "weights", "[1, 2]"],
            {"weights": [1, 2]},
        ),
    ],
)
def test_options_of_the_aggregator_replace_those_of_the_recipe(capsys, words, options):
    assert cli.main(["run", *words, "--dry-run"]) == 0
    found = json.loads(capsys.readouterr().out)["method"]["options"]
    assert found == options
    assert [type(value) for value in found.values()] == [type(value) for value in options.values()]


def test_list_shows_every_recipe_on_standard_output(tmp_path):
    done = flatmtl("list", "_", cwd=tmp_path)
    assert [line.split()[0] for line in done.stdout.splitlines()] == list(RECIPES)
    assert (done.returncode, done.stderr) == (0, "")


def test_list_alone_shows_how_they_are_named(capsys):
    assert cli.main(["list"]) == 0
    names = set()
    *families, methods, combines, _ = capsys.readouterr().out.splitlines()
    combines = combines.removeprefix("COMBINE: ").partition(" (")[0].split(", ")
    for pattern in [line.split()[0] for line in families]:
        for method in methods.removeprefix("METHOD: ").split(", "):
            named = pattern.replace("METHOD", method)
            forms = [named.replace("[f_]", form) for form in ("", "f_")]
            names |= {form.replace("[_COMBINE]", c) for form in forms for c in ("", *(f"_{c}" for c in combines))}
    assert names >= set(RECIPES)


def test_list_finds_the_names_of_tables_too(capsys):
    assert cli.main(["list", "F-IMTL-G"]) == 0
    assert "scenes_f_imtl_g" in capsys.readouterr().out


def test_what_is_drawn_can_be_had_without_files(capsys):
    assert cli.main(["data", "where", "scenes"]) == 0
    assert "need no files" in capsys.readouterr().out


def test_list_shows_what_a_recipe_leaves_open(capsys):
    assert cli.main(["list", "multimnist_f_cagrad"]) == 0
    assert "  multimnist_f_cagrad leaves open: method.options.c=0.2,0.4,0.6,0.8" in capsys.readouterr().out.splitlines()


@pytest.mark.parametrize(("words", "code"), [([], 2), (["--help"], 0)])
def test_usage_lists_the_commands(tmp_path, words, code):
    done = flatmtl(*words, cwd=tmp_path)
    assert done.returncode == code
    assert all(f"flatmtl {name}" in done.stdout + done.stderr for name in cli.COMMANDS)


def test_every_command_of_the_usage_exists():
    assert list(cli.COMMANDS) == list(commands.COMMANDS)


def test_version_is_that_of_the_package(tmp_path):
    assert re.fullmatch(r"\d+\.\d+\.\d+\S*\n", flatmtl("--version", cwd=tmp_path).stdout)


@pytest.mark.parametrize(("missing", "command"), [("tyro", "list"), ("rich", "demo")])
def test_without_the_extra_the_remedy_is_named(tmp_path, missing, command):
    program = (
        "import sys; sys.modules[sys.argv[1]] = None; from flatmtl_bench.cli import main; sys.exit(main([sys.argv[2]]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, missing, command], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert 'pip install "flatmtl[bench]"' in done.stderr
    assert "Traceback" not in done.stderr


def test_an_error_of_ours_keeps_its_traceback(monkeypatch):
    def broken(_words):
        raise ZeroDivisionError

    monkeypatch.setitem(commands.COMMANDS, "list", broken)
    with pytest.raises(ZeroDivisionError):
        cli.main(["list"])


def test_a_run_is_refused_resumed_and_overwritten(tmp_path, monkeypatch, capsys):
    first = flatmtl(*RUN, cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    (path,) = (tmp_path / "runs").iterdir()
    assert re.fullmatch(r"multimnist_f_cagrad-[0-9a-f]{6}-s0", path.name)
    assert json.loads(first.stdout) == json.loads((path / "summary.json").read_text())
    assert "epoch   2" in first.stderr
    rows, times = lines(path / "metrics.jsonl"), lines(path / "times.jsonl")
    monkeypatch.chdir(tmp_path)

    assert cli.main(RUN) == 2
    message = f"runs/{path.name} already holds 2 finished epochs. Use --resume to go on or --overwrite to start again."
    assert message in capsys.readouterr().err
    assert lines(path / "metrics.jsonl") == rows

    assert cli.main([*RUN, "--resume"]) == 0
    said = capsys.readouterr()
    assert (said.out, "is finished" in said.err) == (first.stdout, True)
    assert lines(path / "metrics.jsonl") == rows

    assert cli.main([*RUN, "--overwrite"]) == 0
    assert lines(path / "metrics.jsonl") == rows
    assert lines(path / "times.jsonl") != times


@pytest.mark.parametrize(
    ("by", "code", "remedy"),
    [(signal.SIGINT, 130, True), (signal.SIGKILL, -signal.SIGKILL, False)],
    ids=["int", "kill"],
)
def test_an_interrupted_run_keeps_its_epochs(tmp_path, by, code, remedy):
    words = [*RUN, "--epochs", "40", "--data.train-samples", "512"]
    ended, said = stop_flatmtl(*words, cwd=tmp_path, at="epoch   2", by=by)
    assert ended == code
    assert ("The same command with --resume goes on." in said) == remedy
    assert "Traceback" not in said
    (path,) = (tmp_path / "runs").iterdir()
    assert 2 <= len(lines(path / "metrics.jsonl")) < 40
    assert not (path / "summary.json").exists()


@pytest.mark.parametrize("words", ["list", "run --help"])
def test_output_that_nobody_reads_to_the_end_is_no_error(words):
    line = f"{sys.executable} -m flatmtl_bench {words} | head -n 1"
    done = subprocess.run(["bash", "-c", f"set -o pipefail; {line}"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
