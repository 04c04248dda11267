"""A cluster job that pretrains a study whose states are divided into parts of at most half a megabyte.

python parts_job.py STUDY STORE DATA
"""

from __future__ import annotations

import sys
from functools import partial

import mlmclm
from mlmclm.launches import run_stage

if __name__ == "__main__":
    study, store, data = sys.argv[1:]
    run_stage.StageJob = partial(run_stage.StageJob, part_bytes=500_000)  # type: ignore[assignment,misc]
    mlmclm.pretrain(study, store=store, data=data)
