"""What `flatmtl data check` finds in a folder, and what `flatmtl data where` says."""

import hashlib
import re
import shutil

import numpy as np
import pytest
from tests.bench.written_data import write_cityscapes, write_nyuv2

from flatmtl_bench import cli
from flatmtl_bench.data.check import CHECKS, check
from flatmtl_bench.data.cityscapes import CityScapes
from flatmtl_bench.data.nyuv2 import NYUv2
from flatmtl_bench.data.where import SOURCES


@pytest.fixture(scope="module")
def rooms(tmp_path_factory):
    return write_nyuv2(tmp_path_factory.mktemp("rooms"))


@pytest.fixture
def broken(rooms, tmp_path):
    """Rooms with five faults of three kinds, and the lines that tell them."""
    root = shutil.copytree(rooms, tmp_path / "rooms")
    for number in (1, 4, 5, 6, 7):
        path = root / "train" / "depth" / f"{number}.npy"
        np.save(path, -np.load(path))
    (root / "val" / "label" / "2.npy").unlink()
    (root / "val" / "normal" / "1.npy").write_bytes(b"")
    return root


def content(root):
    """Return the names, times and bytes of all files."""
    paths = sorted(path for path in root.rglob("*") if path.is_file())
    return [(path, path.stat().st_mtime_ns, hashlib.sha256(path.read_bytes()).digest()) for path in paths]


class TestCheck:
    def test_whole_data_have_no_finding_and_exit_code_0(self, rooms, capsys):
        assert cli.main(["data", "check", str(rooms), "--dataset", "nyuv2"]) == 0
        said = capsys.readouterr()
        assert said.out.splitlines()[-1] == "0 findings"
        assert said.err == ""

    def test_counts_sizes_types_ranges_and_shares_are_those_of_the_arrays(self, rooms):
        lines = check(rooms, "nyuv2").facts
        assert lines[0] == f"nyuv2 in {rooms}"
        assert lines[1] == "train: 8 pictures of 32x64 (the full data have 795)"
        assert lines[6] == "val: 4 pictures of 32x64 (the full data have 654)"
        arrays = {
            folder: np.stack([np.load(path) for path in sorted((rooms / "train" / folder).iterdir())])
            for folder in ("image", "label", "depth", "normal")
        }
        assert lines[2] == f"  image: float32 from {arrays['image'].min():.4g} to {arrays['image'].max():.4g}"
        shares = dict(re.findall(r"(\w+) ([0-9.]+)%", lines[3]))
        assert list(shares) == ["void", *NYUv2.layout.maps["segmentation"].classes]
        for label, share in enumerate(shares.values(), start=-1):
            assert float(share) == pytest.approx(100 * (arrays["label"] == label).mean(), abs=0.05)
        valid = arrays["depth"][arrays["depth"] > 0]
        invalid = 1 - len(valid) / arrays["depth"].size
        assert lines[4] == f"  depth: float32 from {valid.min():.4g} to {valid.max():.4g}, invalid {invalid:.1%}"
        invalid = 1 - arrays["normal"].any(axis=-1).mean()
        assert lines[5].endswith(f", invalid {invalid:.1%}, shorter than 1 0.0%")

    def test_each_kind_of_fault_is_one_line_with_its_files(self, broken):
        lines = str(check(broken, "nyuv2")).splitlines()
        depth, label, normal = (
            next(line for line in lines[-4:] if f"/{name}/" in line) for name in ("depth", "label", "normal")
        )
        assert depth.startswith(f"{broken}/train/depth/1.npy: values from -")
        assert depth.endswith(" The same in 4 more files: 4.npy, 5.npy, 6.npy, ....")
        assert label.startswith(f"{broken}/val/label/2.npy: there is no such file")
        assert normal.startswith(f"{broken}/val/normal/1.npy: cannot be read")
        assert lines[-1] == "3 findings"

    def test_findings_are_exit_code_1_and_results(self, broken, capsys):
        assert cli.main(["data", "check", str(broken), "--dataset", "nyuv2"]) == 1
        said = capsys.readouterr()
        assert said.out == f"{check(broken, 'nyuv2')}\n"
        assert said.err == ""

    def test_files_with_findings_do_not_count(self, broken, rooms):
        facts, whole = check(broken, "nyuv2").facts, check(rooms, "nyuv2").facts
        assert facts[2:4] == whole[2:4]
        assert "from 0.5" in facts[4]

    def test_nothing_is_changed(self, broken):
        before = content(broken)
        check(broken, "nyuv2")
        assert content(broken) == before

    def test_what_the_data_set_refuses_is_found(self, broken):
        with pytest.raises(ValueError, match=r"train/depth/1.npy: values from .* The same in 4 more files") as caught:
            NYUv2("train", broken, validation_share=0)
        assert str(caught.value) in str(check(broken, "nyuv2"))
        with pytest.raises(
            FileNotFoundError, match=rf"There is 1 more finding; `flatmtl data check {broken} --dataset nyuv2`"
        ):
            NYUv2("test", broken)

    def test_a_run_on_broken_data_ends_before_it_starts(self, broken, tmp_path, capsys):
        words = ["run", "nyuv2_mgda", "--root", str(broken), "--out", str(tmp_path / "runs"), "--device", "cpu"]
        assert cli.main(words) == 2
        said = capsys.readouterr()
        assert said.out == ""
        assert f"{broken}/train/depth/" in said.err
        assert "expected floats from 0 (invalid)" in said.err
        assert not (tmp_path / "runs").exists()

    def test_a_folder_that_is_missing_is_one_finding(self, broken):
        shutil.rmtree(broken / "val")
        shutil.rmtree(broken / "train" / "normal")
        report = check(broken, "nyuv2")
        found = [str(finding.path.relative_to(broken)) for finding in report.findings]
        assert found[0] == "train/normal"
        assert found[-4:] == [f"val/{name}" for name in ("image", "label", "depth", "normal")]
        assert "  normal: no file that can be read as it is" in report.facts

    @pytest.mark.parametrize("label", ["label", "label_7"])
    def test_streets_may_lie_in_a_folder_of_their_name(self, tmp_path, label):
        write_cityscapes(tmp_path / "cityscapes", label=label)
        report = check(tmp_path, "cityscapes")
        assert report.findings == []
        assert report.facts[0] == f"cityscapes in {tmp_path / 'cityscapes'}"
        assert report.facts[3].startswith(f"  {label}: float32 from -1 to 6, void ")

    def test_rooms_are_no_streets(self, rooms):
        findings = check(rooms, "cityscapes").findings
        assert {finding.kind for finding in findings} == {"range"}
        assert {finding.path.parent.name for finding in findings} == {"label"}

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (["nowhere", "--dataset", "nyuv2"], "nowhere does not exist; expected a folder of data"),
            ([".", "--dataset", "nyuv2"], "no nyuv2 in . or nyuv2; expected train/ and val/ with the folders image"),
            ([".", "--dataset", "nyu"], "unknown dataset 'nyu'. Did you mean 'nyuv2'?"),
        ],
        ids=" ".join,
    )
    def test_a_mistake_is_a_message_and_exit_code_2(self, tmp_path, monkeypatch, capsys, words, message):
        monkeypatch.chdir(tmp_path)
        assert cli.main(["data", "check", *words]) == 2
        said = capsys.readouterr()
        assert said.out == ""
        assert message in said.err


class TestWhere:
    def test_each_data_set_that_can_be_checked_can_be_obtained(self, capsys):
        assert cli.main(["data", "where"]) == 0
        said = capsys.readouterr().out
        assert set(CHECKS) <= set(SOURCES)
        for name in SOURCES:
            assert f"\n{name}\n" in f"\n{said}"

    @pytest.mark.parametrize("name", SOURCES)
    def test_links_terms_size_and_layout_are_told(self, capsys, name):
        assert cli.main(["data", "where", name]) == 0
        said = capsys.readouterr().out
        assert said.splitlines()[0] == name
        assert said.count("https://") >= len(SOURCES[name].links)
        for word in ("  Terms: ", "  Size: ", "  Without it: ", "  Layout, <root> is --root:\n    <root>/"):
            assert word in said

    @pytest.mark.parametrize(("layout", "size"), [(NYUv2.layout, (288, 384)), (CityScapes.layout, (128, 256))])
    def test_sizes_are_those_of_float32_arrays(self, layout, size):
        numbers = sum(int(np.prod(kind.values)) for kind in layout.maps.values())
        gigabytes = sum(layout.pictures.values()) * size[0] * size[1] * numbers * 4 / 1e9
        assert f"about {gigabytes:.1f} GB of arrays if they are float32" in SOURCES[layout.name].size

    def test_an_unknown_name_is_answered_with_the_likeliest(self, capsys):
        assert cli.main(["data", "where", "nyu"]) == 2
        assert "unknown dataset 'nyu'. Did you mean 'nyuv2'?" in capsys.readouterr().err
