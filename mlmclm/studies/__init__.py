"""The phases of a study, from its file to the facts of its report, one module per phase.

    prepare -> work (pretraining) -> exports -> study_sweep -> work (cells) -> study_record

Each phase first looks in the store and does only what is missing there. A study that was killed resumes where it
stopped, and a finished one takes seconds. Heavy libraries (torch, Ray) are not imported until something is missing.
"""
