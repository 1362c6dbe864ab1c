"""Reads some steps of a cache, starting where the last job ended.

part_of_an_epoch.py FOLDER SAMPLES STEPS
"""

import json
import sys
from pathlib import Path

import datacache
import tfposeidon as tp
from tests import drawn

BATCH = 12


def main(folder, samples, steps):
    folder, samples = Path(folder), int(samples)
    tp.init()
    source = datacache.from_folder(folder / "images")
    cache = datacache.Cache(source, drawn.decode, memory=folder / "memory")
    state = folder / "state.json"
    before = json.loads(state.read_text()) if state.exists() else None
    batches = []
    for batch in cache.counted(cache.dataset(BATCH, seed=4, state=before)):
        if len(batches) == int(steps):
            break
        batches.append(batch)
    numbers = drawn.numbers(batches, samples)
    with (folder / f"numbers-{tp.rank()}.txt").open("a") as stream:
        stream.writelines(f"{number}\n" for number in numbers)
    if tp.rank() == 0:
        state.write_text(json.dumps(cache.state_dict()))
    cache.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
