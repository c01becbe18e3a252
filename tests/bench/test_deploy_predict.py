"""`flatmtl predict`: a picture becomes the input that it was in training, and answers are what the model gives."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from tests.bench.small import fit, small_config
from tests.bench.test_trainer_scenes import config as rooms
from tests.bench.written_data import write_celeba, write_cityscapes, write_nyuv2

from flatmtl_bench import cli, data, recipes
from flatmtl_bench.analysis.trained import trained
from flatmtl_bench.data.form import form
from flatmtl_bench.deploy import predict as command
from flatmtl_bench.deploy.model import deployed
from flatmtl_bench.deploy.pictures import read_picture
from flatmtl_bench.recipes.config import Data, Sharpness

FACES = Data("faces40", size=[32, 32], train_samples=8, validation_samples=4, test_samples=4)


def save(picture, path, **options):
    """Write an input, whose numbers are those of 8 bits, as a picture."""
    pixels = (picture * 255).round().to(torch.uint8)
    Image.fromarray((pixels[0] if len(pixels) == 1 else pixels.movedim(0, -1)).numpy()).save(path, **options)
    return path


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    return trained(fit(tmp_path_factory.mktemp("digits"), small_config(epochs=1)))


@pytest.fixture(scope="module")
def scenes(tmp_path_factory):
    return trained(fit(tmp_path_factory.mktemp("scenes"), rooms(epochs=1)))


def of_faces(out, logits):
    made = {"data": replace(FACES, logits=logits), "model": "tests.bench.tiny:Tiny", "epochs": 1, "batch_size": 4}
    config = replace(recipes.build("celeba_ls"), source="faces40", sharpness=Sharpness(samples=4), device="cpu", **made)
    return trained(fit(out, config))


@pytest.fixture
def pictures(tmp_path):
    """Write items of a model's data as pictures; return their folder."""

    def write(model, count=3):
        folder = tmp_path / "pictures"
        folder.mkdir()
        for index in range(count):
            save(model.dataset[index][0], folder / f"{index}.png")
        return folder

    return write


@pytest.fixture
def predict(capsys):
    """Return what the command prints as JSON holds it; `predict.err` is what it says."""

    def run(*words, code=0):
        assert cli.main(["predict", *map(str, words), "--json"]) == code
        said = capsys.readouterr()
        run.err = said.err
        return json.loads(said.out) if said.out else None

    return run


def outputs(model, index):
    return model.outputs([index])[index]


class TestForms:
    """What is known of a data set without its files is what the data set says."""

    @pytest.mark.parametrize(
        ("options", "source"),
        [
            (Data("multimnist"), "mnist5k"),
            (Data("faces40"), "auto"),
            (Data("faces40", size=[32, 48], logits=2), "auto"),
            (Data("celeba", preprocessing="official"), "faces40"),
            (Data("faces40", size=[36, 36], preprocessing="imagenet"), "auto"),
            (Data("scenes"), "auto"),
            (Data("streets", size=[32, 64]), "auto"),
        ],
        ids=lambda value: value if isinstance(value, str) else value.name,
    )
    def test_pictures_of_data_made_on_the_spot_become_the_items(self, tmp_path, options, source):
        dataset = data.build(options.name, "test", source=source, **options.options("test") | {"samples": 3})
        known = form(options)
        check(known, dataset)
        assert known.size == dataset[0][0].shape[1:]
        for index in range(3):
            item = dataset[index][0]
            raw = dataset.picture(index) / 255 if hasattr(dataset, "picture") else item
            picture = read_picture(save(raw, tmp_path / f"{index}.png"), gray=known.gray)
            assert torch.equal(known.prepare(picture, known.size), item)
            assert known.range[0] <= item.min() <= item.max() <= known.range[1]

    @pytest.mark.parametrize("preprocessing", ["rgb", "imagenet", "official"])
    def test_the_range_of_inputs_is_that_of_black_and_white(self, preprocessing):
        known = form(Data("faces40", preprocessing=preprocessing))
        both = torch.zeros(3, 8, 8, dtype=torch.uint8)
        both[..., 4:] = 255
        assert known.prepare(both, (8, 8)).aminmax() == known.range

    @pytest.mark.parametrize("preprocessing", ["rgb", "imagenet", "official"])
    def test_photographs_become_the_items_of_celeba(self, tmp_path, preprocessing):
        dataset = data.build("celeba", "test", root=write_celeba(tmp_path), preprocessing=preprocessing)
        known = form(Data("celeba", preprocessing=preprocessing))
        check(known, dataset)
        assert known.channels == {"rgb": "RGB", "imagenet": "RGB", "official": "BGR"}[preprocessing]
        for index, name in enumerate(dataset.names):
            picture = read_picture(dataset.folder / name, gray=known.gray)
            assert torch.equal(known.prepare(picture, known.size), dataset[index][0])

    @pytest.mark.parametrize(("name", "write"), [("nyuv2", write_nyuv2), ("cityscapes", write_cityscapes)])
    def test_files_of_maps_have_the_tasks_of_the_rendered_kind_and_a_size_of_their_own(self, tmp_path, name, write):
        known = form(Data(name))
        check(known, data.build(name, "test", root=write(tmp_path)))
        assert known.size is None

    @pytest.mark.parametrize("name", ["multifashion", "multifashionmnist"])
    def test_garments_have_their_names(self, name):
        known = form(Data(name)).objectives
        assert known["right"].classes[9] == "Ankle boot"
        assert known["left"].classes[9] == ("Ankle boot" if name == "multifashion" else "9")


def check(known, dataset):
    assert dict(known.objectives) == dict(dataset.objectives)
    assert list(known.objectives) == list(dataset.objectives)
    assert (1 if known.gray else 3) == len(dataset[0][0])


class TestAnswers:
    def test_classes_come_with_the_probabilities_of_the_model(self, digits, pictures, predict):
        found = predict(digits.run.path, pictures(digits))
        assert [picture["picture"][-5:] for picture in found["pictures"]] == ["0.png", "1.png", "2.png"]
        for index, picture in enumerate(found["pictures"]):
            for task, output in outputs(digits, index).items():
                answer, shares = picture["tasks"][task], output.double().softmax(0)
                assert answer["label"] == "0123456789"[output.argmax()]
                assert answer["probability"] == pytest.approx(float(shares.max()), rel=1e-5)
                assert list(answer["probabilities"].values()) == pytest.approx(shares.tolist(), rel=1e-4)
        assert (found["left_out"], predict.err) == ([], "")

    @pytest.mark.parametrize("logits", [1, 2])
    def test_attributes_are_there_if_they_are_likelier_than_not(self, tmp_path, pictures, predict, logits):
        model = of_faces(tmp_path / "runs", logits)
        found = predict(model.run.path, pictures(model))
        for index, picture in enumerate(found["pictures"]):
            assert len(picture["tasks"]) == 40
            for task, output in outputs(model, index).items():
                raised = (output - output.max()).exp()
                yes = float(raised[1] / raised.sum()) if logits == 2 else float(1 / (1 + (-output).exp()))
                assert picture["tasks"][task]["probability"] == pytest.approx(yes, rel=1e-4)
                assert picture["tasks"][task]["present"] == (yes > 0.5)

    def test_maps_are_files_that_hold_what_the_model_gives(self, scenes, pictures, tmp_path, predict):
        out = tmp_path / "made"
        found = predict(scenes.run.path, pictures(scenes), "--out", out)
        assert json.loads((out / "predictions.json").read_text()) == found
        assert "32 x 32 pixels" in found["tasks"]["depth"]["files"]
        for index, picture in enumerate(found["pictures"]):
            given, said = outputs(scenes, index), picture["tasks"]
            labels = Image.open(out / "segmentation" / f"{index}.png")
            assert labels.mode == "P"
            assert np.array_equal(np.array(labels), given["segmentation"].argmax(0).numpy())
            assert sum(said["segmentation"]["shares"].values()) == pytest.approx(1)
            depth = np.load(out / "depth" / f"{index}.npy")
            np.testing.assert_allclose(depth, given["depth"][0].numpy(), rtol=1e-4, atol=1e-5)
            deep = Image.open(said["depth"]["file"])
            assert np.array_equal(np.array(deep), np.clip(np.rint(depth.astype(float) * 1000), 0, 65535))
            normals = np.array(Image.open(out / "normals" / f"{index}.png")) / 127.5 - 1
            unit = given["normals"] / given["normals"].norm(dim=0)
            np.testing.assert_allclose(normals, unit.movedim(0, -1).numpy(), atol=1 / 127)

    def test_lines_say_the_same_in_words(self, digits, pictures, predict, capsys):
        folder = pictures(digits)
        found = predict(digits.run.path, folder)
        assert cli.main(["predict", str(digits.run.path), str(folder)]) == 0
        lines = capsys.readouterr().out.splitlines()
        for line, picture in zip(lines, found["pictures"], strict=True):
            said = [f"{t} {a['label']} ({a['probability']:.0%})" for t, a in picture["tasks"].items()]
            assert line == f"{picture['picture']}: {', '.join(said)}"

    def test_how_pictures_fall_into_batches_changes_nothing(self, digits, pictures, predict, monkeypatch):
        folder = pictures(digits, 5)
        whole = predict(digits.run.path, folder)
        monkeypatch.setattr(command, "BATCH", 2)
        for one, other in zip(predict(digits.run.path, folder)["pictures"], whole["pictures"], strict=True):
            assert one["picture"] == other["picture"]
            for task in ("left", "right"):
                assert one["tasks"][task]["probabilities"] == pytest.approx(
                    other["tasks"][task]["probabilities"], rel=1e-4
                )

    def test_a_model_that_gives_no_numbers_has_no_answer(self, digits, pictures):
        model = deployed(digits.run.path)
        torch.nn.init.constant_(next(model.model.parameters()), float("nan"))
        asked = command.Asked(model, None)
        assert list(asked.about(sorted(pictures(digits).iterdir()))) == []
        assert all("not finite" in left["reason"] for left in asked.left_out)
        assert len(asked.left_out) == 3


class TestWithoutData:
    def test_pictures_of_the_recorded_size_are_asked_about_when_the_data_are_gone(self, tmp_path, predict):
        root = write_nyuv2(tmp_path / "data", size=(32, 64))
        path = fit(tmp_path / "runs", rooms("nyuv2_ls", Data("nyuv2"), root=str(root), epochs=1))
        shutil.rmtree(root)
        save(torch.rand(3, 50, 90), tmp_path / "room.png")
        found = predict(path, tmp_path / "room.png", "--out", tmp_path / "made")
        assert found["input"]["shape"] == [3, 32, 64]
        assert np.load(tmp_path / "made" / "depth" / "room.npy").shape == (32, 64)

    @pytest.mark.parametrize(("shape", "code"), [(None, 2), ("no", 2), ([3, 0, 32], 2), ([3, 32, 64], 0)])
    def test_a_summary_that_does_not_tell_the_size_of_files_is_refused(self, tmp_path, capsys, shape, code):
        root = write_nyuv2(tmp_path / "data", size=(32, 64))
        path = fit(tmp_path / "runs", rooms("nyuv2_ls", Data("nyuv2"), root=str(root), epochs=1))
        summary = json.loads((path / "summary.json").read_text())
        (path / "summary.json").write_text(json.dumps(summary | {"input": shape}))
        save(torch.rand(3, 32, 64), tmp_path / "room.png")
        words = [str(path), str(tmp_path / "room.png"), "--out", str(tmp_path / "made")]
        assert cli.main(["predict", *words]) == code
        assert ("does not say which shape inputs have" in capsys.readouterr().err) == (code == 2)


class TestPictures:
    @pytest.mark.parametrize("ending", ["png", "bmp", "tif", "webp", "gif", "ppm"])
    @pytest.mark.parametrize("mode", ["L", "RGB"])
    def test_any_kind_of_file_is_the_same_picture(self, tmp_path, ending, mode):
        pixels = np.random.RandomState(0).randint(256, size=(6, 4)).astype(np.uint8)
        options = {"lossless": True} if ending == "webp" else {}
        path = tmp_path / f"a.{ending}"
        Image.fromarray(pixels).convert(mode).save(path, **options)
        assert np.array_equal(read_picture(path, gray=True)[0], pixels)
        assert np.array_equal(read_picture(path, gray=False), np.stack([pixels] * 3))

    @pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "CMYK"])
    def test_any_kind_of_pixels_is_the_same_picture(self, tmp_path, mode):
        pixels = np.random.RandomState(0).randint(256, size=(6, 4)).astype(np.uint8)
        Image.fromarray(pixels).convert("RGB" if mode == "CMYK" else "L").convert(mode).save(tmp_path / "a.tif")
        assert np.array_equal(read_picture(tmp_path / "a.tif", gray=True)[0], pixels)

    def test_a_photograph_is_turned_the_right_way_up(self, tmp_path):
        pixels = np.arange(24, dtype=np.uint8).reshape(6, 4)
        turned = Image.fromarray(np.rot90(pixels))
        exif = Image.Exif()
        exif[0x0112] = 6  # shown after a quarter turn clockwise
        turned.save(tmp_path / "a.png", exif=exif)
        assert np.array_equal(read_picture(tmp_path / "a.png", gray=True)[0], pixels)

    def test_another_size_is_resized_with_antialias_and_said_once(self, digits, tmp_path, predict):
        big = np.random.RandomState(0).randint(256, size=(90, 100)).astype(np.uint8)
        for name in ("a.png", "b.png"):
            Image.fromarray(big).save(tmp_path / name)
        predict(digits.run.path, tmp_path)
        assert predict.err.count("\n") == 1
        assert "a.png has 90 x 100 pixels; it and others that have not 36 x 36 are resized" in predict.err
        found = deployed(digits.run.path).prepare(read_picture(tmp_path / "a.png", gray=True))
        expected = np.array(Image.fromarray(big).resize((36, 36), Image.Resampling.BILINEAR))
        np.testing.assert_allclose(255 * found[0], expected, atol=1.01)

    def test_what_cannot_be_read_is_named_and_left_out_and_the_others_are_done(self, digits, pictures, predict):
        folder = pictures(digits)
        alone = predict(digits.run.path, folder)["pictures"]
        content = (folder / "0.png").read_bytes()
        (folder / "00_cut.png").write_bytes(content[: len(content) // 2])
        (folder / "00_text.jpg").write_text("no picture")
        (folder / "00_empty.png").touch()
        Image.fromarray(np.full((36, 36), 40_000, np.uint16)).save(folder / "00_deep.png")
        Image.new("RGBA", (36, 36), (255, 255, 255, 7)).save(folder / "00_clear.png")
        (folder / "notes.txt").touch()
        (folder / "more").mkdir()
        found = predict(digits.run.path, folder, code=1)
        assert [p["picture"] for p in found["pictures"]] == [p["picture"] for p in alone]
        broken = [f"00_{name}" for name in ("clear.png", "cut.png", "deep.png", "empty.png", "text.jpg")]
        assert [left["picture"] for left in found["left_out"]] == [str(folder / name) for name in broken]
        assert all(f"{folder / name} " in predict.err for name in broken)
        assert f"{folder}: left out as no pictures: more, notes.txt." in predict.err
        for reason in ("more than 8 bits", "transparent in places", "cannot be read"):
            assert reason in predict.err

    def test_nothing_to_ask_about_is_an_error(self, digits, tmp_path, capsys):
        (tmp_path / "notes.txt").touch()
        for words, message in (([tmp_path], "no picture in"), ([tmp_path / "gone.png"], "is not there")):
            assert cli.main(["predict", str(digits.run.path), *map(str, words)]) == 2
            assert message in capsys.readouterr().err

    def test_a_picture_that_is_named_twice_is_asked_about_once(self, digits, pictures, predict):
        folder = pictures(digits)
        assert len(predict(digits.run.path, folder, folder / "0.png")["pictures"]) == 3


class TestFiles:
    def test_nothing_is_replaced_unless_it_is_asked_for(self, scenes, pictures, tmp_path, capsys):
        words = ["predict", str(scenes.run.path), str(pictures(scenes)), "--out", str(tmp_path / "made")]
        (tmp_path / "made" / "depth").mkdir(parents=True)
        (tmp_path / "made" / "depth" / "2.npy").write_text("mine")
        assert cli.main(words) == 2
        assert "2.npy exists. Use --overwrite" in capsys.readouterr().err
        assert (tmp_path / "made" / "depth" / "2.npy").read_text() == "mine"
        assert [file.name for file in (tmp_path / "made").rglob("*") if file.is_file()] == ["2.npy"]
        assert cli.main([*words, "--overwrite"]) == 0
        assert len([file for file in (tmp_path / "made").rglob("*") if file.is_file()]) == 3 * 4 + 1

    def test_maps_need_a_folder(self, scenes, pictures, predict):
        predict(scenes.run.path, pictures(scenes), code=2)
        assert "segmentation, depth, normals of" in predict.err
        assert "--out FOLDER" in predict.err

    def test_maps_of_one_name_are_refused(self, scenes, pictures, tmp_path, predict):
        folder = pictures(scenes)
        shutil.copy(folder / "0.png", folder / "0.bmp")
        predict(scenes.run.path, folder, "--out", tmp_path / "made", code=2)
        assert "would have maps of one name, 0" in predict.err
        assert not (tmp_path / "made").exists()

    def test_a_file_that_cannot_be_written_is_a_message_and_exit_code_1(self, digits, pictures, tmp_path, predict):
        (tmp_path / "made" / "predictions.json").mkdir(parents=True)
        words = [digits.run.path, pictures(digits), "--out", tmp_path / "made", "--overwrite"]
        predict(*words, code=1)
        assert "predictions.json could not be written" in predict.err

    def test_a_folder_that_cannot_be_made_is_said_before_anything_is_asked(self, digits, pictures, tmp_path, predict):
        (tmp_path / "file").touch()
        predict(digits.run.path, pictures(digits), "--out", tmp_path / "file", code=2)
        assert "file is no folder that can be written to" in predict.err


def test_no_picture_at_all_is_a_mistake_in_what_was_typed(capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(["predict", "runs/any"])
    assert end.value.code == 2
    assert "name pictures" in capsys.readouterr().err


def test_a_picture_whose_name_is_a_dot_has_no_maps(scenes, tmp_path, capsys):
    picture = save(scenes.dataset[0][0], tmp_path / "a.png").rename(tmp_path / "..png")
    out = tmp_path / "out"
    assert cli.main(["predict", str(scenes.run.path), str(picture), "--out", str(out)]) == 2
    assert "no name that a map could have" in capsys.readouterr().err
    assert not out.exists()


def test_colours_that_cannot_be_converted_are_named_with_the_picture(tmp_path):
    Image.new("LAB", (8, 8)).save(tmp_path / "lab.tif")
    with pytest.raises(ValueError, match=r"lab\.tif cannot be read"):
        read_picture(tmp_path / "lab.tif", gray=True)
