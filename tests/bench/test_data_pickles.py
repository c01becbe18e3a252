import builtins
import contextlib
import copyreg
import functools
import operator
import os
import pickle
import pickletools
import struct
import subprocess
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from tests.bench.written_data import PAIRS, draw_pairs, write_pairs

from flatmtl_bench import data
from flatmtl_bench.data.check import check
from flatmtl_bench.data.pickles import read_arrays

PROTOCOLS = range(pickle.HIGHEST_PROTOCOL + 1)
SPLITS = ["train", "validation", "test"]
ARRAY = np.arange(12, dtype=np.uint8).reshape(3, 4)
NUMBERS = st.sampled_from(["b1", "i1", "u1", "<i2", ">i4", "<i8", "u8", "f2", ">f4", "<f8"]).map(np.dtype)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "multi_mnist.pickle"


def read(path, content):
    path.write_bytes(content)
    return read_arrays(path)


def assert_same_arrays(actual, expected):
    assert len(actual) == len(expected)
    for one, other in zip(actual, expected, strict=True):
        assert (one.shape, one.dtype) == (np.shape(other), np.asarray(other).dtype)
        np.testing.assert_array_equal(one, other)


class TestArrays:
    @given(
        st.lists(hnp.arrays(NUMBERS, hnp.array_shapes(min_dims=0, min_side=0)), max_size=4), st.sampled_from(PROTOCOLS)
    )
    def test_they_are_what_pickle_reads(self, tmp_path_factory, arrays, protocol):
        path = tmp_path_factory.mktemp("pickles") / "a.pickle"
        assert_same_arrays(read(path, pickle.dumps(arrays, protocol)), arrays)

    @pytest.mark.parametrize("protocol", PROTOCOLS)
    def test_order_strides_and_scalars_do_not_matter(self, path, protocol):
        arrays = (np.asfortranarray(ARRAY), ARRAY.T, ARRAY[::2, ::-1], np.float32(0.5), np.int64(7))
        assert_same_arrays(read(path, pickle.dumps(arrays, protocol)), arrays)

    @pytest.mark.parametrize("protocol", PROTOCOLS)
    def test_the_same_array_twice_is_read_twice(self, path, protocol):
        assert_same_arrays(read(path, pickle.dumps([ARRAY, ARRAY], protocol)), [ARRAY, ARRAY])

    @pytest.mark.parametrize("protocol", [0, 1, 2, 3])
    @pytest.mark.parametrize("module", [b"numpy.core.multiarray", b"numpy._core.multiarray"])
    def test_numpy_1_and_2_call_their_modules_differently(self, path, protocol, module):
        content = pickle.dumps([ARRAY], protocol)
        content = content.replace(b"numpy._core.multiarray", module).replace(b"numpy.core.multiarray", module)
        assert module in content
        assert_same_arrays(read(path, content), [ARRAY])

    def test_pickles_of_python_2_are_read(self, path):
        """As its cPickle writes them with protocol 2: text of one byte a character, numbers for truth values."""
        content = (
            b"\x80\x02]q\x01cnumpy.core.multiarray\n_reconstruct\nq\x02cnumpy\nndarray\nq\x03K\x00\x85U\x01b\x87Rq\x04"
            b"(K\x01K\x02K\x02\x86cnumpy\ndtype\nq\x05U\x02u1K\x00K\x01\x87Rq\x06(K\x03U\x01|NNNJ\xff\xff\xff\xff"
            b"J\xff\xff\xff\xffK\x00tb\x89U\x04\x00\x7f\x80\xfftba."
        )
        assert_same_arrays(read(path, content), [np.array([[0, 127], [128, 255]], np.uint8)])

    def test_they_cannot_be_written_to(self, path):
        (array,) = read(path, pickle.dumps([ARRAY]))
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1


class Payload:
    """Calls a function when it is unpickled."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call

    def __call__(self):
        """What it becomes may be called, and pickle wants to see that."""


def payloads(mark):
    """Return objects that make a file or folder when they are unpickled, each by another way."""
    shell, mkdir = f"touch {mark}", Payload(os.mkdir, str(mark))
    code = f"__import__('os').mkdir({str(mark)!r})"
    return [
        mkdir,
        Payload(os.system, shell),
        Payload(subprocess.call, ["touch", str(mark)]),
        Payload(eval, code),
        Payload(exec, code),
        Payload(Payload(getattr, Payload(builtins.__import__, "os"), "mkdir"), str(mark)),
        Payload(functools.partial(os.mkdir, str(mark))),
        Payload(operator.methodcaller("touch"), mark),
        Payload(np.ndarray.tofile, ARRAY, str(mark)),
        Payload(np.save, str(mark), ARRAY),
        np.array([mkdir, 1], dtype=object),
        np.array([(mkdir, 1)], dtype=[("a", "O"), ("b", "i4")]),
        {"trainX": ARRAY, "b": mkdir},
        np.ma.array([1, mkdir]),
    ]


def short(text):
    return b"\x8c" + bytes([len(text)]) + text


SYSTEM = b"X\x0c\x00\x00\x00touch opened"
BY_HAND = {
    "GLOBAL": b"cposix\nsystem\n(" + SYSTEM + b"tR.",
    "INST": b"(" + SYSTEM + b"iposix\nsystem\n.",
    "OBJ": b"(cposix\nsystem\n" + SYSTEM + b"o.",
    "STACK_GLOBAL": b"\x80\x04" + short(b"posix") + short(b"system") + b"\x93(" + SYSTEM + b"tR.",
    "names from the memo": b"\x80\x04"
    + short(b"system")
    + b"\x940"
    + short(b"posix")
    + b"h\x00\x93("
    + SYSTEM
    + b"tR.",
    "a dotted name": b"\x80\x04" + short(b"numpy") + short(b"os.system") + b"\x93(" + SYSTEM + b"tR.",
    "a dotted name of an array": b"\x80\x04" + short(b"numpy") + short(b"ndarray.tofile") + b"\x93(" + SYSTEM + b"tR.",
    "a name of both cores": b"cnumpy.core.numpy._core.multiarray\nscalar\n(" + SYSTEM + b"tR.",
    "an array that is called": b"cnumpy.core.multiarray\n_reconstruct\n)R(" + SYSTEM + b"tR.",
    "a function made of a function": b"cnumpy\nndarray\n}X\x08\x00\x00\x00functioncposix\nsystem\nsb.",
    "a function that is changed": b"cnumpy\ndtype\n}X\x08\x00\x00\x00functionX\x01\x00\x00\x00asb.",
    "slots that are changed": b"cnumpy\ndtype\nN}X\x08\x00\x00\x00functionX\x01\x00\x00\x00as\x86b.",
    "NEWOBJ": b"\x80\x02cnumpy\nndarray\n(" + SYSTEM + b"t\x81.",
    "NEWOBJ_EX": b"\x80\x04cnumpy\nndarray\n(" + SYSTEM + b"t}\x92.",
    "a persistent name": b"Pposix.system\n.",
    "a persistent object": b"X\x01\x00\x00\x00aQ.",
    "a buffer from elsewhere": b"\x80\x05]\x97a.",
    "an extension": b"\x82\x01(" + SYSTEM + b"tR.",
}


class TestCode:
    @pytest.mark.parametrize("protocol", PROTOCOLS)
    def test_nothing_runs(self, path, tmp_path, protocol):
        mark = tmp_path / "opened.npy"
        for payload in payloads(mark):
            for content in (payload, [ARRAY, payload], [[payload]]):
                with pytest.raises(ValueError, match=f"{path} is no pickle of NumPy arrays alone: .* was run"):
                    read(path, pickle.dumps(content, protocol))
                assert not mark.exists()
            pickle.loads(path.read_bytes())
            assert mark.exists(), "the pickle does what it was made for"
            mark.rmdir() if mark.is_dir() else mark.unlink()

    @pytest.mark.parametrize("case", BY_HAND)
    def test_nothing_runs_that_is_written_by_hand(self, path, tmp_path, monkeypatch, case):
        monkeypatch.chdir(tmp_path)
        for content in (BY_HAND[case], b"]" + BY_HAND[case][:-1] + b"a."):
            with pytest.raises(ValueError, match="is no pickle of NumPy arrays alone: .* Nothing in it was run"):
                read(path, content)
        assert not (tmp_path / "opened").exists()
        assert_same_arrays(read(path, pickle.dumps([ARRAY])), [ARRAY])  # nothing was changed for the next one

    def test_extensions_that_others_have_loaded_are_not_called(self, path, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        copyreg.add_extension("posix", "system", 1)
        try:
            assert pickle.loads(BY_HAND["an extension"]) == 0
            assert (tmp_path / "opened").exists()
            with pytest.raises(ValueError, match="it names a function by the number 1"):
                read(path, BY_HAND["an extension"])
        finally:
            copyreg.remove_extension("posix", "system", 1)
            copyreg.clear_extension_cache()

    @pytest.mark.parametrize("protocol", PROTOCOLS)
    def test_the_function_is_named(self, path, protocol):
        with pytest.raises(ValueError, match=f"{path} .*: it names 'posix.system', which makes no array"):
            read(path, pickle.dumps([ARRAY, Payload(os.system, "exit")], protocol))


OTHERS = {
    "text": ("abc", "it holds one str"),
    "one array": (ARRAY, "it holds one array"),
    "a dict": ({"a": ARRAY}, "it holds one dict"),
    "a nested list": ([ARRAY, [ARRAY]], "it holds a list with a list in it"),
    "a number": ((1, ARRAY), "it holds a tuple with a int in it"),
    "objects": ([np.array([1, "a"], dtype=object)], "it has numbers of the type 'O8'"),
    "strings": ([np.array(["a"])], "it has numbers of the type 'U1'"),
    "fields": ([np.zeros(2, [("a", "i4")])], "it has numbers of the type 'V4'"),
    "complex": ([np.zeros(2, complex)], "it has numbers of the type 'c16'"),
    "dates": ([np.array(["2020"], "M8[D]")], "it has numbers of the type 'M8'"),
    "a matrix": ([np.ma.zeros(3)], "it names 'numpy.ma.core._mareconstruct', which makes no array"),
    "a type": ([np.dtype("u1")], "it holds a list with a dtype in it"),
}
EMPTY = b"cnumpy.core.multiarray\n_reconstruct\n)R"
BYTES = b"cnumpy\ndtype\n(X\x02\x00\x00\x00u1tR"
BOMBS = {
    "memory places": b"]r\xf0\xff\xff\xff.",
    "memory places in text": b"]p4000000000\n.",
    "long bytes": b"\x80\x04\x8e" + struct.pack("<Q", 2**40) + b".",
    "a long frame": b"\x80\x04\x95" + struct.pack("<Q", 2**40) + b"].",
    "long text": b"\x80\x04\x8d" + struct.pack("<Q", 2**40) + b".",
    "a long bytearray": b"\x80\x05\x96" + struct.pack("<Q", 2**40) + b".",
    "a long number": b"\x8b\xff\xff\xff\x7f.",
    "a large array": b"]" + EMPTY + b"(K\x01(J\xff\xff\xff\x7fJ\xff\xff\xff\x7ft" + BYTES + b"\x89C\x01atba.",
    "many steps": b"](" + b"]" * 20_000 + b"e.",
    "deep lists": b"]" * 20_000 + b"a" * 19_999 + b".",
    "doubled lists": b"]" + b"2\x86" * 4_000 + b".",
}


class TestOtherFiles:
    @pytest.mark.parametrize("protocol", PROTOCOLS)
    @pytest.mark.parametrize("case", OTHERS)
    def test_what_is_not_a_list_of_arrays_is_named(self, path, case, protocol):
        content, message = OTHERS[case]
        with pytest.raises(ValueError, match=f"{path} is no pickle of NumPy arrays alone: {message}"):
            read(path, pickle.dumps(content, protocol))

    @pytest.mark.parametrize("case", BOMBS)
    def test_a_small_file_takes_little_memory(self, path, case):
        tracemalloc.start()
        try:
            with pytest.raises(ValueError, match="is no pickle of NumPy arrays alone"):
                read(path, BOMBS[case])
            assert tracemalloc.get_traced_memory()[1] < 2**24
        finally:
            tracemalloc.stop()

    @pytest.mark.parametrize("state", [b"N", b")", b"(K\x01K\x02t", b"(K\x01N" + BYTES + b"\x89C\x01at"], ids=repr)
    def test_an_odd_array_is_named(self, path, state):
        with pytest.raises(ValueError, match=f"{path} .*: it has an array without a shape"):
            read(path, b"]" + EMPTY + state + b"ba.")

    @pytest.mark.parametrize("shape", [b"J\xff\xff\xff\xff\x85", b"K\x02\x85", b"\x88\x85", b"G?\xf0\0\0\0\0\0\0\x85"])
    def test_a_shape_must_fit(self, path, shape):
        with pytest.raises(ValueError, match=r"without a shape|of shape \(2,\) and type uint8, but 1 bytes for it"):
            read(path, b"\x80\x02]" + EMPTY + b"(K\x01" + shape + BYTES + b"\x89C\x01atba.")

    @pytest.mark.parametrize("content", [b"", b"no pickle", b"\x80\x63."])
    def test_what_is_no_pickle_is_named(self, path, content):
        with pytest.raises(ValueError, match=f"{path} is no pickle of NumPy arrays alone"):
            read(path, content)

    @given(st.data(), st.sampled_from(PROTOCOLS))
    def test_a_damaged_file_is_named_or_read(self, tmp_path_factory, data, protocol):
        path = tmp_path_factory.mktemp("pickles") / "a.pickle"
        content = bytearray(pickle.dumps((ARRAY, ARRAY / 2), protocol))
        for _ in range(data.draw(st.integers(1, 3))):
            content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
        with contextlib.suppress(ValueError):  # nothing else may be raised; some damage is harmless
            assert all(isinstance(array, np.ndarray) for array in read(path, content))

    @given(st.lists(st.sampled_from([o.code.encode("latin1") for o in pickletools.opcodes]) | st.binary(max_size=4)))
    def test_any_program_is_named_or_read(self, tmp_path_factory, steps):
        path = tmp_path_factory.mktemp("pickles") / "a.pickle"
        with contextlib.suppress(ValueError):
            assert all(isinstance(array, np.ndarray) for array in read(path, b"".join(steps)))

    def test_a_cut_file_is_named(self, path):
        whole = pickle.dumps((ARRAY, ARRAY))
        for size in range(len(whole)):
            with pytest.raises(ValueError, match=f"{path} is no pickle of NumPy arrays alone"):
                read(path, whole[:size])


def pairs_of(root, split, name="multimnist", **options):
    return data.build(name, split, root=root, source="pickle", **options)


def content(dataset):
    return [
        (picture.numpy().tobytes(), *targets.items())
        for picture, targets in map(dataset.__getitem__, range(len(dataset)))
    ]


class TestReadyMadePairs:
    @pytest.mark.parametrize("name", PAIRS)
    def test_items_are_the_pairs_of_the_file(self, tmp_path, name):
        _, _, pictures, labels = draw_pairs()
        path = write_pairs(tmp_path, name)
        dataset = pairs_of(tmp_path, "test", name)
        assert [tuple(targets.items()) for _, targets in map(dataset.__getitem__, range(4))] == [
            (("left", left), ("right", right)) for left, right in labels.tolist()
        ]
        for index, picture in enumerate(pictures):
            assert np.array_equal(dataset[index][0][0].numpy(), picture / np.float32(255))
        assert str(dataset) == f"{name} test: 4 ready-made pairs of the 8 + 4 in {path}"

    @pytest.mark.parametrize("protocol", PROTOCOLS)
    @pytest.mark.parametrize("made", ["flat", "floats to 255", "floats to 1", "float32", "Fortran", "small labels"])
    def test_all_ways_to_store_them_are_the_same(self, tmp_path, made, protocol):
        write_pairs(tmp_path, "multimnist")
        changes = {
            "flat": lambda x: x.reshape(len(x), 1296),
            "floats to 255": lambda x: x.astype(float),
            "floats to 1": lambda x: x / 255,
            "float32": lambda x: (x / 255).astype(np.float32),
            "Fortran": np.asfortranarray,
            "small labels": lambda x: x,
        }
        arrays = [
            array.astype(np.int8) if made == "small labels" and array.ndim == 2 else array for array in draw_pairs()
        ]
        arrays = [changes[made](array) if array.ndim == 3 else array for array in arrays]
        (tmp_path / "other").mkdir()
        write_pairs(tmp_path / "other", "multimnist", arrays, protocol=protocol)
        for split in SPLITS:
            one, other = (pairs_of(root, split, validation_share=0.25) for root in (tmp_path, tmp_path / "other"))
            assert content(one) == content(other)
            assert one.fingerprint == other.fingerprint

    def test_validation_is_held_out_of_train_and_the_same_for_all_seeds(self, tmp_path):
        write_pairs(tmp_path, "multimnist", draw_pairs({"train": 40, "val": 4}))
        train, validation = (content(pairs_of(tmp_path, split)) for split in ("train", "validation"))
        assert (len(train), len(validation)) == (36, 4)
        everything = content(pairs_of(tmp_path, "train", validation_share=0.0))
        assert set(train) | set(validation) == set(everything)
        assert train == content(pairs_of(tmp_path, "train", seed=5))
        assert content(pairs_of(tmp_path, "train", samples=10)) == train[:10]

    def test_auto_takes_the_file_where_it_is(self, tmp_path):
        path = write_pairs(tmp_path, "multimnist")
        assert data.build("multimnist", "test", root=tmp_path).source == "pickle"
        assert data.build("multimnist", "test", root=path).source == "pickle"
        assert data.build("multimnist", "test", root=tmp_path, source="mnist5k").source == "mnist5k"
        other = path.rename(tmp_path / "mine.pkl")
        with pytest.raises(FileNotFoundError, match="neither MNIST/raw nor ready-made pairs"):
            data.build("multimnist", "test", root=tmp_path)
        assert data.build("multimnist", "test", root=other).source == "pickle"
        assert pairs_of(other.rename(tmp_path / "mine"), "test").source == "pickle"

    def test_the_file_must_be_there_and_the_right_one(self, tmp_path):
        with pytest.raises(
            FileNotFoundError, match=f"no multi_mnist.pickle in {tmp_path}: source='pickle' expects one"
        ):
            pairs_of(tmp_path, "test")
        path = write_pairs(tmp_path, "multifashion")
        with pytest.raises(ValueError, match=f"root {path} is of another data set; expected multi_mnist.pickle"):
            pairs_of(path, "test")

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"download": True}, "nothing is fetched for the pairs in .*multi_mnist.pickle. Omit download"),
            ({"samples": 8}, "samples=8, but train has 7 pairs. Ask for as many, or fewer"),
            ({"samples": 0}, "samples must be a whole number from 1, got 0"),
            ({"split": "validation", "validation_share": 0.0}, "no pictures for split 'validation'"),
        ],
        ids=str,
    )
    def test_options_that_do_not_fit_are_refused(self, tmp_path, options, message):
        write_pairs(tmp_path, "multimnist")
        with pytest.raises(ValueError, match=message):
            pairs_of(tmp_path, **{"split": "train", **options})

    @pytest.mark.parametrize(
        ("place", "change", "message"),
        [
            (0, lambda x: x[:, :28, :28], r"images have shape \(8, 28, 28\); expected \(N, 36, 36\), N > 0"),
            (2, lambda x: x[:0], r"images have shape \(0, 36, 36\); expected"),
            (2, lambda x: x - 1.0, "pixels from -1.0 to 254.0; expected floats in 0..1 or 0..255"),
            (0, lambda x: x * np.nan, "pixels from nan to nan"),
            (0, lambda x: x.astype(int), "images have dtype int64; expected uint8, or floats"),
            (1, lambda y: y[1:], r"labels have shape \(7, 2\); expected \(8, 2\), one for each image and task"),
            (3, lambda y: y[:, 0], r"labels have shape \(4,\); expected \(4, 2\)"),
            (3, lambda y: y + 10, r"label 1\d at position 0; expected 0..9"),
            (1, lambda y: y - np.eye(8, 2, dtype=int) * 10, r"label -\d+ at position 0; expected 0..9"),
            (1, lambda y: y / 2, "labels have dtype float64; expected integers 0..9"),
        ],
    )
    def test_arrays_that_are_not_as_they_should_be_are_named_with_the_file(self, tmp_path, place, change, message):
        arrays = draw_pairs()
        arrays[place] = change(arrays[place])
        path = write_pairs(tmp_path, "multimnist", arrays)
        for split in SPLITS:
            with pytest.raises(ValueError, match=f"{path}: {message}"):
                pairs_of(tmp_path, split)

    def test_a_check_says_what_there_is_and_what_is_wrong(self, tmp_path):
        path = write_pairs(tmp_path, "multifashion")
        (fact,) = check(tmp_path, "multifashion").facts
        assert fact.startswith(f"ready-made pairs: 8 + 4 in {path}, each label on ")
        path.write_bytes(path.read_bytes()[:100])
        with pytest.raises(ValueError, match=f"{path} is no pickle of NumPy arrays alone"):
            check(path, "multifashion")
        with pytest.raises(FileNotFoundError, match="no complete MNIST in"):
            check(tmp_path, "multimnist")
        np.savez(tmp_path / "mnist.npz", images=np.zeros((10, 28, 28), np.uint8), labels=np.arange(10))
        facts = [f"10 pictures of {tmp_path / 'mnist.npz'}, each label on 10.0% to 10.0% of them"]
        assert check(tmp_path, "multimnist").facts == check(tmp_path / "mnist.npz", "multimnist").facts == facts

    def test_four_arrays_are_expected(self, tmp_path):
        path = write_pairs(tmp_path, "multimnist", draw_pairs()[:3])
        with pytest.raises(ValueError, match=rf"{path} holds 3 arrays; expected four: train pictures \(N, 36, 36\)"):
            pairs_of(tmp_path, "train")

    def test_a_file_with_code_is_named_before_training(self, tmp_path):
        path = write_pairs(tmp_path, "multimnist", [*draw_pairs()[:3], Payload(os.system, f"touch {tmp_path}/opened")])
        with pytest.raises(
            ValueError, match=f"{path} .*: it names 'posix.system', which makes no array. Nothing in it"
        ):
            pairs_of(tmp_path, "train")
        assert not (tmp_path / "opened").exists()
