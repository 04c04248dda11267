"""The way of a study from its file to its report, a file a phase.

    prepare -> pretrain -> model_folders -> sweep -> report

Each phase looks at the store first and does only what is missing there: a study that was killed goes on where it stopped, and a
finished one costs seconds. Nothing heavy (torch, Ray) is imported before something is missing.
"""
