"""Five lines make a training loop private; the model, the optimiser and the scheduler stay what they are."""

import torch
from torch import nn

import sparsedp

torch.manual_seed(0)  # for the toy data and the initial weights; the privacy noise never depends on it
inputs = torch.randn(5000, 20)
targets = (inputs @ torch.randn(20, 3)).argmax(1)
inputs, targets, test_inputs, test_targets = inputs[:4000], targets[:4000], inputs[4000:], targets[4000:]

model = nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=2.0)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 60)
loss = nn.CrossEntropyLoss(reduction="none")  # one loss per row: each example is clipped by itself

private = sparsedp.attach(
    model, optimizer, loss, num_examples=4000, batch_size=400, epsilon=3.0, steps=60, drop="random", drop_rate=0.3
)
for batch in private.batches((inputs, targets)):  # in place of a DataLoader: every example joins by a coin of its own
    private.backward(batch)  # in place of loss.backward()
    optimizer.step()
    scheduler.step()

spent = private.spent()
accuracy = float(
    (model(test_inputs).argmax(1) == test_targets).float().mean()
)  # on the training data it would be one more release
print(f"accuracy {100 * accuracy:.1f} %, epsilon {spent.epsilon:.3f} at delta {spent.delta:g}")
