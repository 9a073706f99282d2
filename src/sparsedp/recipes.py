"""Named runs: functions that return a `Run`. A variant is a `dataclasses.replace` away, or an override on the command line."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from sparsedp.config import Data, Mechanism, Model, Optim, Run, Runtime, Sparsity
from sparsedp.errors import unknown


def smoke() -> Run:
    """Seconds: a few steps on the first MNIST images, to see that everything works."""
    return Run(
        data=Data(name="mnist", limit=2000),
        sparsity=Sparsity(prune="random", prune_rate=0.3, drop="random", drop_rate=0.3),
        mechanism=Mechanism(epsilon=3.0, delta=1e-4, steps=8, batch_size=128),
        optim=Optim(lr=1.0, average_decay=0.9),
        runtime=Runtime(checkpoint_every=4),
    )


def mnist() -> Run:
    """The demo: MNIST from scratch at epsilon 1."""
    return Run(
        data=Data(name="mnist"),
        model=Model(name="norm_cnn"),
        sparsity=Sparsity(prune="synflow", prune_rate=0.1, drop="random", drop_rate=0.1),
        mechanism=Mechanism(epsilon=1.0, steps=220, batch_size=2048, clip=0.2),
        optim=Optim(lr=5.0, average_decay=0.95),
        runtime=Runtime(evaluate_every=55),
    )


def cifar10() -> Run:
    """CIFAR-10 from scratch at epsilon 3: a small residual network, minutes on two cores."""
    return Run(
        data=Data(name="cifar10"),
        model=Model(name="wrn_10_1_s2"),
        mechanism=Mechanism(epsilon=3.0, steps=600, batch_size=1024),
        optim=Optim(lr=4.0, average_decay=0.98),
        runtime=Runtime(evaluate_every=100),
    )


def cifar10_wrn16_4(epsilon: float = 1.0) -> Run:
    """The paper's CIFAR-10 from scratch: WRN-16-4, 16 views, B 4096, sigma 10; days on a GPU. Rates of its combined cell."""
    return Run(
        data=Data(name="cifar10", augment="crop-flip", views=16),
        model=Model(name="wrn_16_4"),
        sparsity=Sparsity(prune="synflow", prune_rate=0.3, drop="random", drop_rate=0.5),
        mechanism=Mechanism(epsilon=epsilon, noise_multiplier=10.0, batch_size=4096, accountant="rdp"),
        optim=Optim(lr=2.0, average_decay=0.999),
    )


def cifar10_finetune() -> Run:
    """The paper's fine-tuning of WRN-28-10 on CIFAR-10 at epsilon 1; give --model.weights (pre-trained on 32x32 ImageNet)."""
    return Run(
        data=Data(name="cifar10", augment="crop-flip", views=16),
        model=Model(name="wrn_28_10"),
        sparsity=Sparsity(prune="synflow", prune_rate=0.2, drop="random", drop_rate=0.2),
        mechanism=Mechanism(noise_multiplier=21.1, steps=250, epsilon=1.0, batch_size=16384, accountant="rdp"),
        optim=Optim(lr=1.0, average_decay=0.9),
    )


def imagenet() -> Run:
    """The paper's ImageNet from scratch: NF-ResNet-50, 4 views, B 16384, sigma 2.5; give --data.dir."""
    return Run(
        data=Data(name="folder", size=268, augment="imagenet", views=4),
        model=Model(name="nf_resnet50"),
        sparsity=Sparsity(prune="synflow", prune_rate=0.3, drop="random", drop_rate=0.5),
        mechanism=Mechanism(epsilon=1.0, delta=8e-7, noise_multiplier=2.5, batch_size=16384, accountant="rdp"),
        optim=Optim(lr=4.0, average_decay=0.99999),
    )


def folder() -> Run:
    """Images of one's own, a folder per class: give --data.dir, --data.size."""
    return Run(
        data=Data(name="folder", size=32, augment="crop-flip"),
        model=Model(name="wrn_10_1"),
        mechanism=Mechanism(epsilon=3.0, steps=400, batch_size=512),
        optim=Optim(lr=1.0, average_decay=0.99),
        runtime=Runtime(workers=1, evaluate_every=100),
    )


RECIPES: Mapping[str, Callable[[], Run]] = {
    "smoke": smoke,
    "mnist": mnist,
    "cifar10": cifar10,
    "cifar10-wrn16-4": cifar10_wrn16_4,
    "cifar10-finetune": cifar10_finetune,
    "imagenet": imagenet,
    "folder": folder,
}


def recipe(name: str) -> Run:
    """The run of that name."""
    if name not in RECIPES:
        raise unknown("the recipe", name, RECIPES)
    return RECIPES[name]()
