"""mlmclm: how should this text encoder be pretrained, and how sure can we be?

    import mlmclm

    study = mlmclm.study("quickstart")
    print(study.plan())
    results = study.run()
    results.best

Each name is imported when it is first used, because torch and Ray take seconds to load.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from mlmclm.versions import PACKAGE as __version__  # noqa: F401  # the public name

if TYPE_CHECKING:
    from mlmclm import tune
    from mlmclm.answers.comparison_of_scores import compare
    from mlmclm.answers.imported_results import import_results
    from mlmclm.answers.study_results import Results
    from mlmclm.errors import EnvironmentFault, MlmclmError, UserError
    from mlmclm.registry import register
    from mlmclm.studies.api import Store, finetune, open, pretrain, study, study_on_file, sweep
    from mlmclm.studies.plan import StudyPlan
    from mlmclm.studies.study import Study
    from mlmclm.sweeps.zero_shot import evaluate
    from mlmclm.tasks.look import check_task

_MODULES = {
    "mlmclm.errors": ("EnvironmentFault", "MlmclmError", "UserError"),
    "mlmclm.registry": ("register",),
    "mlmclm.tasks.look": ("check_task",),
    "mlmclm.answers.comparison_of_scores": ("compare",),
    "mlmclm.studies.api": ("Store", "finetune", "open", "pretrain", "study", "study_on_file", "sweep"),
    "mlmclm.sweeps.zero_shot": ("evaluate",),
    "mlmclm.answers.imported_results": ("import_results",),
    "mlmclm.studies.study": ("Study",),
    "mlmclm.studies.plan": ("StudyPlan",),
    "mlmclm.answers.study_results": ("Results",),
}
_WHERE = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "EnvironmentFault",
    "MlmclmError",
    "Results",
    "Store",
    "Study",
    "StudyPlan",
    "UserError",
    "check_task",
    "compare",
    "evaluate",
    "finetune",
    "import_results",
    "open",
    "pretrain",
    "register",
    "study",
    "study_on_file",
    "sweep",
    "tune",
]


def __getattr__(name: str) -> Any:
    if name == "tune":
        return import_module("mlmclm.tune")
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_WHERE[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
