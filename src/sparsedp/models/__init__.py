"""Networks: our own, timm's and anyone's; their weights, what trains of them, and whether they can be trained privately."""

from sparsedp.models.batchnorm import convert_batchnorm as convert_batchnorm
from sparsedp.models.batchnorm import freeze_batchnorm as freeze_batchnorm
from sparsedp.models.head import classifier_name as classifier_name
from sparsedp.models.head import split_head as split_head
from sparsedp.models.layers import SameConv2d as SameConv2d
from sparsedp.models.layers import WSConv2d as WSConv2d
from sparsedp.models.preparation import check_model as check_model
from sparsedp.models.preparation import prepare as prepare
from sparsedp.models.registry import build as build
from sparsedp.models.trainable import set_trainable as set_trainable
from sparsedp.models.weights import load_weights as load_weights
