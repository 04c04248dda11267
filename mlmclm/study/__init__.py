"""The phases of a study, from its file to its report, one module per phase.

    prepare -> pretrain -> model_folders -> sweep -> report

Each phase first looks in the store and does only what is missing there. A study that was killed resumes where it
stopped, and a finished one takes seconds. Heavy libraries (torch, Ray) are not imported until something is missing.
"""
