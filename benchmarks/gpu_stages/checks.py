"""Checks of a stage: each is one line, `ok`, `FAIL` or `skip`, with seconds and figures."""

import os
import time
import traceback

from tfposeidon.communication import launcher

BEGIN_S = time.perf_counter()


class Figures(list):
    """Collects the results of a check, which its line shows."""

    def __call__(self, *words):
        """Adds words, joined by spaces."""
        self.append(" ".join(map(str, words)))


class Checks:
    """Runs checks one after the other; a failure does not end the stage.

    Args:
      stage: Name of the stage, which begins each line.
      small: True for sizes that a CPU finishes in seconds.
      budget_s: Seconds after which no further check begins.
      gather: Function that maps this rank's text to the texts of all ranks, if each check runs on
        all ranks together.
    """

    def __init__(self, stage, small, budget_s, gather=lambda text: [text]):
        self.stage, self.small, self.budget_s, self.gather = stage, small, budget_s, gather
        self.failures = 0

    def __call__(self, name, function, *arguments):
        """Runs `function(say, *arguments)`, which reports results by `say` and fails by raising."""
        begin_s, say, problem = time.perf_counter(), Figures(), ""
        late = time.perf_counter() - BEGIN_S > self.budget_s
        if self.gather("late" if late else "")[0]:
            self._report("skip", name, begin_s, "no time left")
            return
        try:
            function(say, *arguments)
        except Exception as error:  # noqa: BLE001
            traceback.print_exc()
            problem = " | ".join(f"{type(error).__name__}: {error}".splitlines()[:4])[:500]
        problems = [f"rank {i}: {text}" for i, text in enumerate(self.gather(problem)) if text]
        self._report("FAIL" if problems else "ok", name, begin_s, "; ".join([*say, *problems]))

    def _report(self, word, name, begin_s, text):
        self.failures += word == "FAIL"
        if launcher.process_rank().rank:
            return
        seconds = time.perf_counter() - begin_s
        line = f"{word:4} {self.stage}.{name} [{seconds:.1f} s] {text}".rstrip()
        print(line, flush=True)
        for variable in ("RESULTS", "RESULTS_OF_STAGE"):
            if variable in os.environ:
                with open(os.environ[variable], "a") as file:
                    file.write(f"{line}\n")
