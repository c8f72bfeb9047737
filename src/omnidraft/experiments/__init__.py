"""The machinery of `omnidraft experiment`; the experiments themselves are files in the repository's `experiments/`.

An experiment is a class of cells (settings), of how one is measured and of how the results are told
(`omnidraft.experiments.experiment.Experiment`). What they share: scales, recorded streams, replaying, learning from a
stream, grading, statistics, pictures.
"""
