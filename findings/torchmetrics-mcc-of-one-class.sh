#!/bin/bash
# torchmetrics 1.9.0, Matthews correlation of a classifier with two classes that predicts one class always.
# Guess: 0, as everywhere else: such predictions say nothing of the labels.
# In fact it is (a - b) / sqrt(n a b) for a examples of the predicted class and b of the other: above 0 for the frequent class, below for
# the rare one. It shrinks with the number of examples, so it is largest in small splits, subsamples and single batches. With a third
# class in the task, or in scikit-learn, it is 0.
# Hurts: fine-tuning whose failed runs predict the majority (CoLA's metric is this one): they score above 0, and above some real ones.
# Source: Lightning-AI/torchmetrics 2743 made it so; 3371, open, would make it 0.
# Output seen, frequent class predicted: 70 and 30 examples 0.087, 90 and 10: 0.267, 7 and 1: 0.802, 721 and 322: 0.026; else 0.
set -u
place=$(mktemp -d) && trap 'rm -rf "$place"' EXIT
"${PYTHON:-python3}" -m venv "$place/venv" || exit 2
"$place/venv/bin/pip" install -q torchmetrics==1.9.0 torch==2.13.0 scikit-learn==1.9.1 || exit 2
"$place/venv/bin/python" -W ignore - <<'PYTHON'
import math
import sys

import torch
import torchmetrics
from sklearn.metrics import matthews_corrcoef
from torchmetrics.classification import BinaryMatthewsCorrCoef, MulticlassMatthewsCorrCoef

print(f"torchmetrics {torchmetrics.__version__}; all predicted 1 (and 0), torchmetrics, with three classes, scikit-learn:")
same = True
for a, b in ((70, 30), (90, 10), (99, 1), (7, 1), (721, 322)):
    labels = torch.tensor([1] * a + [0] * b)
    values = []
    for predicted in (1, 0):
        predictions = torch.full_like(labels, predicted)
        values.append(float(BinaryMatthewsCorrCoef()(predictions, labels)))
        rest = float(MulticlassMatthewsCorrCoef(3)(predictions, labels)), float(matthews_corrcoef(labels, predictions))
        same = same and rest == (0, 0)
    print(f"{a} of 1, {b} of 0: {values[0]:.3f} ({values[1]:.3f}), {rest[0]:.0f}, {rest[1]:.0f}")
    same = same and all(math.isclose(abs(value), (a - b) / math.sqrt((a + b) * a * b), rel_tol=1e-3) for value in values)
    same = same and values[0] > 0 > values[1]
print("as described" if same else "CHANGED")
sys.exit(0 if same else 1)
PYTHON
