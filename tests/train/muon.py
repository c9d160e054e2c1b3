"""Muon in float64, from its definition: the yardstick of test_muon.py, as reference.py's AdamW is of all other tests.

Matrices of the layers are orthogonalised, queries, keys and values apart, a Llama's gate and up, too; all other tensors are AdamW's. The iteration is
torch.optim.Muon's, written plainly: X Xᵀ of the wide form of the matrix, no factor moved elsewhere.
"""
import math

import numpy as np

import reference

MATRICES = "qkvw", "attprojw", "fcw", "fcprojw"


def orthogonalised(u):
    x = u.T if u.shape[0] > u.shape[1] else u
    x = x / (np.linalg.norm(x) + 1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.T if u.shape[0] > u.shape[1] else x


def cuts(shape, name):
    """Rows at which the next matrix of a tensor begins."""
    if name == "qkvw":
        return shape.C, (shape.C + shape.qkv) // 2
    return (shape.units,) if name == "fcw" and shape.block.swiglu else ()


class Muon(reference.AdamW):
    def __init__(self, shape, model, momentum=0.95, **adamw):
        super().__init__(model, **adamw)
        self.shape, self.momentum = shape, momentum
        self.buffer = {name: np.zeros_like(model[name]) for name in MATRICES}

    def update(self, model, gradients, lr):
        """As AdamW.update()."""
        before = {name: model[name].copy() for name in MATRICES}
        norm = super().update(model, gradients, lr)
        scale = self.clip / norm if 0 < self.clip < norm else 1.0
        for name in MATRICES:
            model[name][:] = before[name] * (1 - lr * self.weight_decay)
            for layer, g in enumerate(gradients[name] * scale):
                buffer = self.buffer[name][layer]
                buffer += (1 - self.momentum) * (g - buffer)
                u = g + self.momentum * (buffer - g)
                for rows in np.split(np.arange(len(u)), cuts(self.shape, name)):
                    part = orthogonalised(u[rows])
                    model[name][layer][rows] -= lr * 0.2 * math.sqrt(max(part.shape)) * part
        return norm


def train(shape, model, batches, schedule="constant", lr=1e-3, min_lr=0.0, warmup=0, **muon):
    """As reference.train()."""
    optimizer, history = Muon(shape, model, **muon), []
    for step, (inputs, targets) in enumerate(batches):
        loss, gradients = reference.loss_and_gradients(shape, model, inputs, targets)
        rate = reference.learning_rate(schedule, step, len(batches), lr, min_lr, warmup)
        norm = optimizer.update(model, gradients, rate)
        history.append((loss, norm, rate))
    return history
