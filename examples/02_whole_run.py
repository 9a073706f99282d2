"""A whole run from Python: the same as `sparsedp train smoke`, with one setting changed."""

import dataclasses
import tempfile

import sparsedp

run = sparsedp.recipe("smoke")
run = dataclasses.replace(run, optim=dataclasses.replace(run.optim, momentum=0.5))

with tempfile.TemporaryDirectory() as folder:
    result = sparsedp.train(run, folder)
    print(f"accuracy {100 * result.summary['accuracy']:.1f} %, epsilon {result.summary['epsilon']:.3f}")
    print(sorted(path.name for path in (result.path / "public").iterdir()))
