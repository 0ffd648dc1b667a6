"""An optimiser in a file of its own: optimizer.name = "lion:LION", with this folder on PYTHONPATH.

Lion (arXiv:2302.06675): the sign of a mean of momentum and gradient; one moment, one pass.
"""

from mpitrain.plan.declared.optimizers import OptimizerKind


def update(settings, batch, lr, decay, num_updates):
    beta1, beta2 = settings.betas
    for weight, grad, m in zip(batch.weights, batch.grads, *batch.moments):
        weight.mul_(1 - lr * decay).sub_(m.lerp(grad, 1 - beta1).sign_(), alpha=lr)
        m.lerp_(grad, 1 - beta2)


def build(parts):
    from mpitrain.optim.elementwise import Elementwise  # torch

    return Elementwise(parts, update)


LION = OptimizerKind("lion", dict(betas=(0.9, 0.99)), lambda settings, group: ("lion/m",), build)
