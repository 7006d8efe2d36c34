"""Training of veo-mini, stage by stage: autoencoder, flow, distillation, style, clips."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageOps
from safetensors.torch import load_file, save_file
from torch import Tensor

from ..backbones.mini.network import MiniNetwork
from ..errors import InputError
from ..layers.st_norm import TemporalContext
from ..motion.warp import warp
from .data import StyleBank, draw, exposure_and_noise, load_bank, synthetic_clips
from .loop import TrainingLoop
from .losses import (
    colour_loss,
    content_loss,
    feature_l1,
    flat_texture,
    gradient_l1,
    high_frequencies,
    luma,
    style_loss,
    temporal_l1,
)
from .teachers import Magenta, load_predictor, load_vgg19

# Judged on, so never trained on: the two paintings of the examples and four more of the judge's six.
HELD_OUT = frozenset(
    {
        "art_Katsushika_Hokusai_The_Great_Wave_off_Kanagawa_1823_1829",
        "art_VincentVanGogh0013",
        "art_Katsushika_Hokusa_Poppies_1833_1834",
        "art_Pieter_Brugel_The_Harvesters_1565",
        "art_VincentVanGoghBridge",
        "art_Mary_Cassatt_Summertime_1894",
    }
)

# The true picture's style against the source's structure; the teacher holds back where the colours go.
STYLE_WEIGHTS = {
    "latent": 0.05,
    "l1": 0.3,
    "palette": 4.0,
    "vgg": 0.1,
    "style": 12.0,
    "colour": 0.5,
    "content": 0.5,
    "flat": 25.0,
    "decoder": 1.0,
}
COHERENCE = 8.0
SHARPNESS = 1.35


class MiniTrainer:
    """Holds the networks, teachers and banks; each stage is a method that trains for so many seconds.

    Args:
        data: folder with ``content/``, ``styles/``, ``magenta/`` (the two ONNX files) and ``vgg19.safetensors``.
        device: where to train.
        size: side of the training pictures; clips take ``size - 32``.
        batch: pictures in a step.
    """

    def __init__(self, data: Path, device: torch.device, size: int = 256, batch: int = 16, resume: Path | None = None):
        torch.manual_seed(0)
        self.device, self.size, self.batch = device, size, batch
        self.net = MiniNetwork().to(device)
        if resume:
            self.net.load_state_dict({k: v.to(torch.float32) for k, v in load_file(resume).items()})
        else:
            self.net.predictor.load_state_dict(load_predictor(data / "magenta").state_dict())
        self.net.predictor.requires_grad_(False)
        self.magenta = Magenta(data / "magenta").to(device)
        self.vgg = load_vgg19(data / "vgg19.safetensors").to(device)
        self.content = load_bank(sorted((data / "content").glob("*.jpg")), device)
        self.styles = StyleBank.load(data, self.content, HELD_OUT, device)

    def save(self, path: Path) -> None:
        """Writes all networks as float16 safetensors."""
        save_file({k: v.half().contiguous().cpu() for k, v in self.net.state_dict().items()}, path)

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda", cache_enabled=False)

    def _features(self, pictures: Tensor) -> dict[str, Tensor]:
        with self._autocast():
            return self.vgg(pictures)

    def _train(self, name: str, step: Callable[[], dict[str, Tensor]], groups, seconds: float) -> None:
        TrainingLoop(step, groups, seconds, self.device).run(name)

    def autoencoder(self, seconds: float) -> None:
        """Reconstruction of photographs and of stylised pictures; then fixes the latents' mean and deviation."""
        net, b = self.net.autoencoder, self.batch

        def pictures() -> Tensor:
            plain = draw(self.content, b, self.size)
            with torch.no_grad():
                code = self.net.predictor(self.styles.draw(b // 2, 256))
                return torch.cat([plain[: b // 2], self.magenta(plain[b // 2 :], code)])

        def step() -> dict[str, Tensor]:
            x = pictures()
            with self._autocast():
                z = net.encode(x)
                noisy = z + 0.05 * z.detach().std() * torch.randn_like(z)
                y = net.decode(noisy).float()
            l1, grad = F.l1_loss(y, x), gradient_l1(y, x)
            perceptual = feature_l1(self._features(y), self._features(x))
            spread = z.float().square().mean()
            total = l1 + 0.5 * grad + 0.1 * perceptual + 1e-5 * spread
            return {"total": total, "l1": l1, "grad": grad, "vgg": perceptual, "psnr": -10 * F.mse_loss(y, x).log10()}

        self._train("autoencoder", step, [(net, 6e-4)], seconds)
        with torch.no_grad():
            z = torch.cat([net.encode(pictures()) for _ in range(16)]).float()
            net.latent_mean.copy_(z.mean((0, 2, 3))[:, None, None])
            net.latent_std.copy_(z.std((0, 2, 3))[:, None, None])
            codes = torch.cat([self.net.style_code(self.styles.draw(b, 256)) for _ in range(16)])
            self.net.mapping.code_mean.copy_(codes.mean(0))
            self.net.mapping.code_std.copy_(codes.std(0) + 1e-3)

    def flow(self, seconds: float) -> None:
        """Optical flow on clips of two frames with exact motion."""
        net, b, size = self.net.flow, self.batch, self.size

        def step() -> dict[str, Tensor]:
            with torch.no_grad():
                clips = synthetic_clips(self.content, b, 2, size, top_speed=28.0, still=0.1)
                frames = exposure_and_noise(clips.frames, drift=0.06, noise=0.08)
            with self._autocast():
                second, first = net.features(frames[:, 1]), net.features(frames[:, 0])
                flows = net.match(second, first)
            truth, seen = clips.flow[:, 1], clips.visible[:, 1]
            total = 0.0
            for i, flow in enumerate(flows):
                scale = size // flow.shape[-1]
                target = F.avg_pool2d(truth, scale) / scale
                weight = F.avg_pool2d(0.2 + 0.8 * seen, scale)
                error = ((flow - target).square().sum(1, keepdim=True) + 1e-4).sqrt() * scale
                total = total + (0.3, 0.4, 0.6, 1.0)[i] * (error * weight).sum() / weight.sum()
            error = (flow - target).norm(dim=1, keepdim=True) * scale
            return {"total": total, "epe": (error * (weight > 0.9)).sum() / (weight > 0.9).sum()}

        self._train("flow", step, [(net, 8e-4)], seconds)

    def _sigma(self, count: int) -> Tensor:
        somewhere = torch.empty(count, device=self.device).uniform_(0.05, 1.0)
        return torch.where(torch.rand(count, device=self.device) < 0.6, torch.ones_like(somewhere), somewhere)

    def _stylise(
        self, x: Tensor, frames: int, motion: Tensor | None = None, noisy: Tensor | None = None
    ) -> dict[str, Tensor]:
        """One pass of the denoiser over source frames, with everything that the losses need.

        A third of the clips mix the codes of two pictures; a tenth has no style and its source for target, which is
        what guidance extrapolates from.

        Args:
            x: source frames ``[(b t), 3, H, W]``.
            frames: t.
            motion: ``[(b t), 3, H / 8, W / 8]``.
            noisy: what the encoder sees in place of ``x``.
        """
        b, size = len(x) // frames, x.shape[-1]

        def every(v: Tensor) -> Tensor:
            return v.repeat_interleave(frames, 0)

        with torch.no_grad():
            pictures = self.styles.draw(b, size)
            code = self.net.style_code(pictures)
            mixed = torch.rand(b, 1, device=self.device) < 0.35
            code = torch.where(mixed, torch.lerp(code.roll(1, 0), code, torch.rand(b, 1, device=self.device)), code)
            dropped = torch.rand(b, 1, device=self.device) < 0.1
            painted = self.magenta(x, every(code[:, : self.net.predictor.head.out_features]))
            teacher = torch.where(every(dropped)[..., None, None], x, painted)
            style_target = torch.where(every(mixed | dropped)[..., None, None], teacher, every(pictures))
            with self._autocast():
                content = self.net.autoencoder.encode(x if noisy is None else noisy).float()
                target = self.net.autoencoder.encode(teacher).float()
            sigma = self._sigma(b)
            bridge = torch.lerp(target, content, every(sigma)[:, None, None, None])
            bridge = bridge + 0.03 * torch.randn_like(bridge)
            if motion is None:
                motion = bridge.new_zeros(len(x), 3, *bridge.shape[-2:])
        with self._autocast():
            style = torch.where(dropped, self.net.mapping.null, self.net.mapping(code).float())
            latent = self.net.predict(bridge, content, motion, style, sigma, TemporalContext(frames=frames))
            picture = self.net.autoencoder.decode(latent)
            again = self.net.autoencoder.decode(content)
        return {
            "latent": latent.float(),
            "target": target,
            "picture": picture.float(),
            "teacher": teacher,
            "style": style_target,
            "source": x,
            "reconstruction": again.float(),
        }

    def _still_losses(self, out: dict[str, Tensor], weights: dict[str, float]) -> dict[str, Tensor]:
        features = self._features(out["picture"])
        with torch.no_grad():
            teacher, style = (self._features(out[k]) for k in ("teacher", "style"))
            grey_source = self._features(luma(out["source"]))
        picture = out["picture"]
        losses = {
            "latent": F.mse_loss(out["latent"], out["target"]),
            "l1": F.l1_loss(picture, out["teacher"]),
            "palette": F.l1_loss(F.avg_pool2d(picture, 8), F.avg_pool2d(out["teacher"], 8)),
            "vgg": feature_l1(features, teacher),
            "style": style_loss(features, style),
            "colour": colour_loss(picture, out["style"]),
            "content": content_loss(self._features(luma(picture)), grey_source),
            "flat": flat_texture(picture, out["source"], out["teacher"]),
            "decoder": F.l1_loss(out["reconstruction"], out["source"]),
        }
        return {"total": sum(weight * losses[k] for k, weight in weights.items())} | losses

    def _modules(self, rate: float) -> list:
        net = self.net
        return [(net.unet, rate), (net.adapter, rate), (net.mapping, rate), (net.autoencoder.decoder, 0.25 * rate)]

    def distil(self, seconds: float) -> None:
        """Follows the teacher's pictures, with the true picture's style beside them."""
        weights = {"latent": 0.5, "l1": 2.0, "vgg": 0.5, "style": 2.0, "decoder": 1.0}

        def step() -> dict[str, Tensor]:
            return self._still_losses(self._stylise(draw(self.content, self.batch, self.size), 1), weights)

        self._train("distil", step, self._modules(4e-4), seconds)

    def style(self, seconds: float) -> None:
        """The true picture's style against the source's structure; the teacher only holds it back."""
        weights = STYLE_WEIGHTS

        def step() -> dict[str, Tensor]:
            return self._still_losses(self._stylise(draw(self.content, self.batch, self.size), 1), weights)

        self._train("style", step, self._modules(3e-4), seconds)

    def clips(self, seconds: float) -> None:
        """Clips of four frames with exact motion: what two frames see must look the same, and stay as sharp as a still."""
        weights = STYLE_WEIGHTS
        t, b, size = 4, self.batch // 4, self.size - 32

        def step() -> dict[str, Tensor]:
            with torch.no_grad():
                clips = synthetic_clips(self.content, b, t, size, top_speed=12.0)
                noisy = exposure_and_noise(clips.frames, noise=0.05).flatten(0, 1)
                source, flow, visible = (v.flatten(0, 1) for v in (clips.frames, clips.flow, clips.visible))
                motion = torch.cat([F.avg_pool2d(flow, 8) / 8, F.avg_pool2d(visible, 8)], dim=1)
            out = self._stylise(source, t, motion, noisy)
            losses = self._still_losses(out, weights)
            picture = out["picture"].unflatten(0, (b, t))
            before = torch.cat([picture[:, :1], picture[:, :-1]], dim=1)
            anchor = picture[:, :1].expand(-1, t, -1, -1, -1)
            losses["before"] = _warped_l1(picture, before, clips.flow, clips.visible)
            losses["anchor"] = _warped_l1(picture, anchor, clips.anchor_flow, clips.anchor_visible)
            losses["sharpness"] = _missing_sharpness(out["picture"], out["teacher"])
            losses["total"] = (
                losses["total"] + COHERENCE * (losses["before"] + 0.5 * losses["anchor"]) + 2.0 * losses["sharpness"]
            )
            return losses

        self._train("clips", step, self._modules(2e-4), seconds)


def _warped_l1(frames: Tensor, reference: Tensor, flow: Tensor, visible: Tensor) -> Tensor:
    """Difference of ``[b, t, 3, H, W]`` frames from references brought to them, the first frame of each left out."""
    frames, reference, flow, visible = (v[:, 1:].flatten(0, 1) for v in (frames, reference, flow, visible))
    return temporal_l1(frames, warp(reference, flow, "bicubic"), visible)


def _missing_sharpness(picture: Tensor, teacher: Tensor) -> Tensor:
    """Squared log ratio of the share of high frequencies, where ``picture`` has less of them than wanted.

    The share is against the picture's variance: contrast alone does not make a picture crisp.
    """

    def share(v: Tensor) -> Tensor:
        return (high_frequencies(v).square().mean((1, 2, 3)) + 1e-5) / (v.var((2, 3)).mean(1) + 1e-3)

    return (SHARPNESS * share(teacher) / share(picture)).log().clamp(min=0).square().mean()


STAGES = ("autoencoder", "flow", "distil", "style", "clips")


@torch.no_grad()
def contact_sheet(net: MiniNetwork, contents: list[Path], styles: list[Path], out: Path, side: int = 256) -> None:
    """Writes a picture: contents down, each beside its reconstruction and its look in every style."""

    def read(path: Path) -> Tensor:
        with Image.open(path) as picture:
            picture = ImageOps.fit(picture.convert("RGB"), (side, side))
            return torch.from_numpy(np.array(picture)).movedim(-1, 0)[None].float().div(255).to(net.mapping.null.device)

    style_pictures = [read(p) for p in styles]
    rows = [torch.cat([torch.ones_like(style_pictures[0])] * 2 + style_pictures, dim=3)]
    sigma = torch.ones(1, device=net.mapping.null.device)
    for path in contents:
        x = read(path)
        z = net.autoencoder.encode(x)
        cells = [x, net.autoencoder.decode(z)]
        for picture in style_pictures:
            motion = z.new_zeros(1, 3, *z.shape[-2:])
            style = net.mapping(net.style_code(picture))
            cells.append(net.autoencoder.decode(net.predict(z, z, motion, style, sigma, TemporalContext())))
        rows.append(torch.cat(cells, dim=3))
    pixels = (torch.cat(rows, dim=2)[0].clamp(0, 1) * 255).round().byte().movedim(0, -1).cpu().numpy()
    Image.fromarray(pixels).save(out, quality=92)


def train(
    data: Path, out: Path, stages: dict[str, float], device: torch.device, resume: Path | None = None, **sizes
) -> None:
    """Trains the named stages in order and writes the weights, and a contact sheet, after each.

    Args:
        data: as of :class:`MiniTrainer`; pictures in ``judge/content`` and ``judge/styles`` fill the sheets.
        out: a safetensors file; written again after every stage.
        stages: seconds for each stage of ``STAGES``.
        resume: weights to go on from.
    """
    trainer = MiniTrainer(data, device, resume=resume, **sizes)
    judge = [sorted((data / "judge" / kind).glob("*.jpg")) for kind in ("content", "styles")]
    for name, seconds in stages.items():
        getattr(trainer, name)(seconds)
        trainer.save(out)
        if all(judge):
            contact_sheet(trainer.net, *judge, out.with_name(f"{out.stem}_{name}.jpg"))


def parse_stages(text: str) -> dict[str, float]:
    """``"distil:170,style:150"`` to stages and seconds. Raises InputError for an unknown stage or a bad number."""
    stages: dict[str, float] = {}
    for part in text.split(","):
        name, _, seconds = part.strip().partition(":")
        if name not in STAGES or not seconds.replace(".", "", 1).isdigit():
            raise InputError(f"stages = {text}: '{part}' is not NAME:SECONDS with a name of {', '.join(STAGES)}")
        stages[name] = float(seconds)
    return stages
