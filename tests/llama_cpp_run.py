"""Logits and token ids by llama.cpp itself, in a process of its own: `python llama_cpp_run.py JOBS.json`.

JOBS.json: [{"file", "ids", "texts", "out"}]. Each job's logits go to ``out`` as .npy, its token ids to ``out``.json.
The interpreter that has llama-cpp-python is this one, or LLAMA_CPP_PYTHON names it.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def interpreter() -> str | None:
    if "LLAMA_CPP_PYTHON" in os.environ:
        return os.environ["LLAMA_CPP_PYTHON"]
    return sys.executable if importlib.util.find_spec("llama_cpp") else None


def run_llama_cpp(jobs: list[dict[str, Any]], folder: Path) -> None:
    path = folder / "jobs.json"
    path.write_text(json.dumps(jobs), encoding="utf-8")
    python = interpreter()
    assert python is not None
    done = subprocess.run([python, __file__, str(path)], capture_output=True, text=True)
    assert done.returncode == 0, (done.returncode, done.stderr[-2000:])


def _main(path: str) -> None:
    import llama_cpp
    import numpy

    defaults = llama_cpp.llama_cpp.llama_model_default_params

    def parameters() -> Any:
        # Repacked weights for AMX crash in some virtual machines.
        values = defaults()
        values.use_extra_bufts = False
        return values

    llama_cpp.llama_cpp.llama_model_default_params = parameters
    for job in json.loads(Path(path).read_text(encoding="utf-8")):
        model = llama_cpp.Llama(job["file"], logits_all=True, n_ctx=256, n_threads=1, verbose=False)
        model.eval(job["ids"])
        numpy.save(job["out"], model.scores[: len(job["ids"])])
        ids = [model.tokenize(text.encode(), add_bos=True, special=True) for text in job["texts"]]
        Path(job["out"] + ".json").write_text(json.dumps(ids), encoding="utf-8")


if __name__ == "__main__":
    _main(sys.argv[1])
