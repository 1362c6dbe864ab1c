"""One rank resumes the sharded state of a job of two ranks."""

import numpy as np

from tests.helpers.models import rank_variables
from tests.helpers.training import check_equal
from tests.launch import horovodrun
from tests.state.resuming import fit_with_checkpoint, sharded_adam

FIRST_HALF = """
import sys, keras, tfposeidon as tp
from tests.state.resuming import fit_with_checkpoint, sharded_adam
tp.init()
fit_with_checkpoint(sharded_adam, sys.argv[1], epochs=1, samples=32, rank=tp.rank(), ranks=2)
"""


def test_one_rank_resumes_a_run_of_two_ranks(tmp_path):
    done = horovodrun(2, "-c", FIRST_HALF, tmp_path / "two")
    assert done.returncode == 0, done.stdout
    resumed, whole = (
        fit_with_checkpoint(sharded_adam, tmp_path / folder, epochs=2, samples=32)
        for folder in ("two", "one")
    )
    assert int(resumed.optimizer.iterations) == 8
    check_equal(resumed.get_weights(), whole.get_weights())
    for a, b in zip(
        rank_variables(resumed.optimizer), rank_variables(whole.optimizer), strict=True
    ):
        np.testing.assert_allclose(a.numpy(), b.numpy(), atol=1e-6)
