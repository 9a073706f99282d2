"""What each operator becomes in the linearised network. Operators are known by name, whichever way a model calls them.

Kinds: *passes* (activations, normalisation, dropout, casts) return what they were given; *shapes* (reshaping, pooling,
padding) are applied as they are; *merges* add or join; *scales* multiply by the magnitude of a constant; *contracts*
(convolutions, linear layers, products with a constant matrix) multiply by the magnitude of a weight; *facts* (shape, dtype)
are not part of the function. Whatever is not listed is refused.
"""

from __future__ import annotations


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


PASSES = _words("""
    relu relu_ relu6 threshold threshold_ rrelu rrelu_ leaky_relu leaky_relu_ prelu elu elu_ selu selu_ celu celu_ gelu silu mish
    sigmoid sigmoid_ tanh tanh_ softplus softsign tanhshrink softshrink hardshrink hardtanh hardtanh_ hardswish hardsigmoid
    logsigmoid log_sigmoid clamp clamp_ clamp_min clamp_min_ clamp_max clamp_max_ clip softmax log_softmax softmin abs abs_
    batch_norm group_norm layer_norm instance_norm rms_norm local_response_norm normalize
    dropout dropout_ dropout1d dropout2d dropout3d feature_dropout feature_dropout_ alpha_dropout feature_alpha_dropout
    to float double half bfloat16 type type_as contiguous clone cpu cuda requires_grad_
""")
SHAPES = _words("""
    view reshape flatten unflatten view_as reshape_as permute transpose t swapaxes swapdims movedim moveaxis squeeze unsqueeze
    squeeze_ unsqueeze_ expand expand_as repeat repeat_interleave tile roll flip rot90 narrow select index_select gather chunk
    split tensor_split unbind __getitem__ __iter__ pixel_shuffle pixel_unshuffle channel_shuffle unfold fold T mT diagonal
    avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d
    max_pool1d max_pool2d max_pool3d adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d amax
    lp_pool2d interpolate upsample upsample_nearest upsample_bilinear mean sum cumsum
""")
MERGES = _words(
    "add add_ __add__ __radd__ __iadd__ sub sub_ __sub__ __rsub__ __isub__ rsub subtract neg __neg__ positive __pos__"
)
JOINS = _words("cat concat concatenate stack hstack vstack dstack")
SCALES = _words("mul mul_ __mul__ __rmul__ __imul__ multiply div div_ __truediv__ __itruediv__ divide true_divide")
CONTRACTS = _words("""
    conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d linear matmul __matmul__ __rmatmul__ mm bmm einsum
""")
FACTS = _words("""
    size dim ndim ndimension numel nelement shape dtype device layout is_floating_point is_complex is_cuda is_contiguous stride
    storage_offset element_size requires_grad is_sparse is_quantized is_nested is_meta is_mps is_xla names __len__ __repr__
    __hash__ get_device is_same_size is_leaf grad_fn
""")
CARDINAL_BIAS = {"conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "linear"}
"""Contracts whose third argument is a bias, which is dropped."""
