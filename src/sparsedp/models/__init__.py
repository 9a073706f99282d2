"""Networks: our own, timm's and anyone's; their weights, what trains of them, and whether they can be trained privately."""

from sparsedp.models.layers import SameConv2d as SameConv2d
from sparsedp.models.layers import WSConv2d as WSConv2d
from sparsedp.models.registry import build as build
