"""The command `flatmtl` in a process that ends itself, as by ``kill -9``, at a chosen moment."""

import builtins
import os
import re
import signal
import warnings
from pathlib import Path

import torch
from tests.bench.small import small_config
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from flatmtl_bench import cli, commands, files, progress
from flatmtl_bench.trainer import Trainer

torch.set_num_threads(1)
LOADED = commands, progress, Trainer(small_config())  # what processes forked from this one need not load again


class Moments:
    """Counts moments of a run that a kill could fall into, notes what they are, and kills at one of them."""

    def __init__(self, record, fatal):
        self.record = record
        self.fatal = fatal
        self.count = 0

    def __call__(self, what):
        if self.count == self.fatal:
            os.kill(os.getpid(), signal.SIGKILL)
        self.count += 1
        os.write(self.record, (re.sub("-[0-9a-f]{16}", "", what) + "\n").encode())  # checksums cover times

    def around(self, module, name):
        """Make moments of before and after each call of a function that has a path or descriptor first."""
        function = getattr(module, name)

        def surrounded(where, *rest, **options):
            file = os.path.basename(where if isinstance(where, str | Path) else os.readlink(f"/proc/self/fd/{where}"))
            self(f"before {name} {file}")
            result = function(where, *rest, **options)
            self(f"after {name} {file}")
            return result

        setattr(module, name, surrounded)

    def open(self, path, mode="r", **options):
        """Open a file, which is on the disk by half in the middle of a write."""
        file = builtins.open(path, mode, **options)  # noqa: SIM115 (the caller closes it)
        if "r" not in mode:
            write = file.write

            def write_in_halves(content):
                write(content[: len(content) // 2])
                file.flush()
                self(f"half of {os.path.basename(path)}")
                write(content[len(content) // 2 :])

            file.write = write_in_halves
        return file


def run(words, folder, fatal=None):
    """Run the command in a folder; note its moments in ``moments`` there, and kill it at the one with this number."""
    os.chdir(folder)
    warnings.simplefilter("error")
    quiet = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(quiet, stream)
    moment = Moments(os.open("moments", os.O_WRONLY | os.O_CREAT | os.O_APPEND), fatal)
    for name in ("fsync", "replace", "unlink"):
        moment.around(os, name)
    files.open = moment.open
    register_optimizer_step_pre_hook(lambda *_: moment("before a step"))
    register_optimizer_step_post_hook(lambda *_: moment("after a step"))
    raise SystemExit(cli.main(words))
