"""One rank and two ranks resume each other's runs of `LocalUpdates` from checkpoints and files."""

import json

import numpy as np

from tests.launch import horovodrun
from tests.state.local_resuming import OPTIMIZERS, check_goes_on, check_loaded, fit, loaded

TWO_RANKS = """
import json, sys
from pathlib import Path
import tfposeidon as tp
from tests.state.local_resuming import OPTIMIZERS, check_loaded, fit, loaded
tp.init()
folder = Path(sys.argv[1])
ended = json.loads((folder / "ended").read_text())
found = {}
for name in OPTIMIZERS:
    check_loaded(loaded(name, folder / "one"), ended[name][0])
    found[name] = fit(name, folder / "one", 2), fit(name, folder / "two", 1)
if tp.rank() == 0:
    (folder / "found").write_text(json.dumps(found))
"""


def test_one_rank_and_two_ranks_resume_each_others_run(tmp_path):
    ended = {name: [end for _, end in fit(name, tmp_path / "one", 1)] for name in OPTIMIZERS}
    (tmp_path / "ended").write_text(json.dumps(ended))
    done = horovodrun(2, "-c", TWO_RANKS, tmp_path)
    assert done.returncode == 0, done.stdout
    found = json.loads((tmp_path / "found").read_text())
    for name in OPTIMIZERS:
        resumed, begun = found[name]
        for rank, (_, end) in enumerate(begun):
            check_loaded(loaded(name, tmp_path / "two", rank), end)
        check_goes_on([begin for begin, _ in resumed], ended[name])
        check_goes_on(
            [begin for begin, _ in fit(name, tmp_path / "two", 2)], [end for _, end in begun]
        )
        assert any(np.any(v) for v in begun[0][1]["kept"][3:]) == (name == "outer, late")
        assert any(np.any(v) for v in begun[0][1]["residual"]) == (name == "sparse")
