"""What is protected is a patient, not an image: rows that carry one unit number are averaged before clipping."""

import torch
from torch import nn

import sparsedp

torch.manual_seed(0)
patients = torch.randint(0, 500, (2000,)).unique(return_inverse=True)[1]  # 2000 images of about 500 patients
images = torch.randn(2000, 1, 8, 8)
labels = (images.mean(dim=(1, 2, 3)) > 0).long()

model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.GroupNorm(4, 8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 2))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

count = int(patients.max()) + 1
private = sparsedp.attach(
    model,
    optimizer,
    nn.CrossEntropyLoss(reduction="none"),
    num_examples=count,
    batch_size=100,
    epsilon=4.0,
    delta=1e-4,
    steps=40,
)
for batch in private.batches((images, labels), units=patients):
    private.backward(batch)
    optimizer.step()

print(f"{count} patients, epsilon {private.spent(1e-4).epsilon:.3f} for each of them")
