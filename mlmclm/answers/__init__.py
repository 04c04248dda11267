"""Answers from the record of a study, wherever it is from: analysis, advice, claims, figures, comparisons."""
