"""Networks that veo-mini learns from: Magenta's stylisation networks and VGG19. None of them is needed to run it."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from ..backbones.mini.style_path import StylePredictor
from ..errors import ModelError

_VGG19 = (("1", 64, 2), ("2", 128, 2), ("3", 256, 4), ("4", 512, 4))


class VGG19(nn.Module):
    """VGG19's convolutions up to relu4_1 (Simonyan and Zisserman 2015), for losses.

    Weights: safetensors with ``blockB_convI.weight`` and ``.bias``, for BGR 0..255 less the ImageNet mean.
    """

    def __init__(self):
        super().__init__()
        cin = 3
        for block, cout, count in _VGG19:
            for i in range(1, count + 1):
                if block == "4" and i > 1:
                    break
                self.add_module(f"block{block}_conv{i}", nn.Conv2d(cin, cout, 3, 1, 1))
                cin = cout
        self.register_buffer("mean", torch.tensor([103.939, 116.779, 123.68])[:, None, None], persistent=False)

    def forward(self, pictures: Tensor) -> dict[str, Tensor]:
        """``pictures [n, 3, H, W]``, RGB 0..1 -> relu1_1, relu2_1, relu3_1, relu4_1."""
        h = pictures.flip(1) * 255 - self.mean
        out = {}
        for name, conv in self.named_children():
            block, i = name[5], name[-1]
            if i == "1" and block != "1":
                h = F.max_pool2d(h, 2)
            h = F.relu(conv(h))
            if i == "1":
                out[f"relu{block}_1"] = h
        return out


def load_vgg19(path: Path) -> VGG19:
    """Reads VGG19 from safetensors. Raises ModelError when a tensor is missing or of another shape."""
    net = VGG19()
    try:
        net.load_state_dict(load_file(path), strict=False)
    except (OSError, RuntimeError) as e:
        raise ModelError(f"{path} does not hold VGG19's convolutions: {e}") from e
    return net.eval().requires_grad_(False)


class OnnxInterpreter(nn.Module):
    """Runs an ONNX graph of convolutions and elementwise operations in torch: batched, differentiable.

    Only the operations of Magenta's two networks are known; another one raises ModelError when the graph is read.
    """

    def __init__(self, path: Path):
        super().__init__()
        import onnx
        from onnx import numpy_helper

        graph = onnx.load(path).graph
        self.names: dict[str, str] = {}
        for i, tensor in enumerate(graph.initializer):
            self.names[tensor.name] = f"t{i}"
            self.register_buffer(f"t{i}", torch.from_numpy(numpy_helper.to_array(tensor).copy()))
        self.inputs = [x.name for x in graph.input if x.name not in self.names]
        self.output = graph.output[0].name
        self.nodes = [
            (n.op_type, list(n.input), n.output[0], {a.name: onnx.helper.get_attribute_value(a) for a in n.attribute})
            for n in graph.node
        ]
        unknown = {op for op, *_ in self.nodes} - set(_OPERATIONS)
        if unknown:
            raise ModelError(f"{path} uses operations that are not known here: {', '.join(sorted(unknown))}")
        shapes = {names[i] for op, names, *_ in self.nodes for i in range(1, len(names)) if op in _TAKES_CONSTANT}
        self.constants = {k: self.get_buffer(self.names[k]).tolist() for k in shapes if k in self.names}

    def forward(self, *inputs: Tensor) -> Tensor:
        values: dict[str, Tensor] = {k: self.get_buffer(v) for k, v in self.names.items()}
        values.update(zip(self.inputs, inputs, strict=True))
        for op, names, out, attributes in self.nodes:
            constants = next((self.constants[n] for n in names[1:] if self.constants.get(n)), None)
            arguments = [values[n] if n else None for n in names]
            values[out] = _OPERATIONS[op](attributes, constants, *arguments)
        return values[self.output]


def _conv(attributes, _, x, w, bias=None):
    top, left, bottom, right = attributes.get("pads", [0, 0, 0, 0])
    if any((top, left, bottom, right)):
        x = F.pad(x, (left, right, top, bottom))
    w = w.to(x.dtype)
    bias = None if bias is None else bias.to(x.dtype)
    return F.conv2d(x, w, bias, attributes.get("strides", [1, 1]), groups=attributes.get("group", 1))


def _pad(attributes, pads, x, *_):
    mode = attributes["mode"].decode()
    if pads[1]:  # the picture itself is padded before it becomes NCHW
        return F.pad(x.movedim(-1, 1), (pads[2], pads[6], pads[1], pads[5]), mode=mode).movedim(1, -1)
    return F.pad(x, (pads[3], pads[7], pads[2], pads[6]), mode=mode)


def _resize(_, scales, x, *__):
    return F.interpolate(x, scale_factor=(scales[2], scales[3]), mode="nearest")


_TAKES_CONSTANT = ("Pad", "Reshape", "Resize")
_OPERATIONS = {
    "Conv": _conv,
    "Pad": _pad,
    "Resize": _resize,
    "Clip": lambda a, c, x, *_: x.clamp(0, 6),
    "Relu": lambda a, c, x: x.relu(),
    "Sigmoid": lambda a, c, x: x.sigmoid(),
    "Add": lambda a, c, x, y: x + y,
    "Sub": lambda a, c, x, y: x - y,
    "Mul": lambda a, c, x, y: x * y,
    "Sqrt": lambda a, c, x: x.sqrt(),
    "Reciprocal": lambda a, c, x: x.reciprocal(),
    "GlobalAveragePool": lambda a, c, x: x.mean((-2, -1), keepdim=True),
    "Reshape": lambda a, shape, x, _: x.reshape(-1, *shape[1:]) if len(shape) > 1 else x.reshape(shape),
    "Transpose": lambda a, c, x: x.permute(*a["perm"]),
    "Identity": lambda a, c, x: x,
}


class Magenta(nn.Module):
    """The teacher: Magenta's arbitrary style transfer (Ghiasi et al. 2017), frame by frame."""

    def __init__(self, folder: Path):
        super().__init__()
        self.transform = OnnxInterpreter(folder / "transform_f32.onnx")
        self.eval().requires_grad_(False)

    def forward(self, content: Tensor, code: Tensor) -> Tensor:
        """``content [n, 3, H, W]`` in 0..1, ``code [n, 100]`` -> stylised ``[n, 3, H', W']``, H' and W' rounded up to 4."""
        out = self.transform(content.movedim(1, -1), code.to(content.dtype)[:, None, None])
        return out.movedim(-1, 1)


def load_predictor(folder: Path) -> StylePredictor:
    """Magenta's style prediction network from its ONNX file, weights in the order of the graph."""
    graph = OnnxInterpreter(folder / "predict_f32.onnx")
    pairs = [
        (graph.get_buffer(graph.names[n[1]]), graph.get_buffer(graph.names[n[2]]))
        for op, n, *_ in graph.nodes
        if op == "Conv"
    ]
    net = StylePredictor()
    layers = [m for m in net.modules() if isinstance(m, (nn.Conv2d, nn.Linear))]
    for layer, (weight, bias) in zip(layers, pairs, strict=True):
        layer.weight.data.copy_(weight.reshape(layer.weight.shape))
        layer.bias.data.copy_(bias)
    return net.eval().requires_grad_(False)
