"""Tiny models with random weights in core's own classes, for tests inside a real ComfyUI."""

import json

import comfy.ldm.wan.vae
import comfy.model_management
import comfy.model_patcher
import comfy.sd
import comfy.supported_models as models
import torch


def randomised(module, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for name, p in module.named_parameters():
        if p.ndim > 1:
            p.data = torch.randn(p.shape, generator=generator) / p[0].numel() ** 0.5
        else:
            value = 1.0 if name.endswith(("weight", "gamma")) else 0.0
            p.data = torch.full(p.shape, value) + 0.02 * torch.randn(p.shape, generator=generator)
    return module.eval()


def patcher(config, unet):
    made = config(unet)
    made.set_inference_dtype(torch.float32, None)
    model = randomised(made.get_model({}, "", device=torch.device("cpu")))
    device = comfy.model_management.get_torch_device()
    return comfy.model_patcher.ModelPatcher(model, load_device=device, offload_device=torch.device("cpu"))


def unet(base, **more):
    small = {
        "image_size": 32, "in_channels": 4, "out_channels": 4, "model_channels": 32, "num_res_blocks": [1, 1],
        "channel_mult": [1, 2], "transformer_depth_middle": 1, "use_spatial_transformer": True, "legacy": False,
        "dtype": torch.float32,
    }  # fmt: skip
    return dict(base.unet_config) | small | more


def sd15():
    config = unet(
        models.SD15, transformer_depth=[1, 1], transformer_depth_output=[1, 1, 1, 1], num_heads=4, adm_in_channels=None
    )
    return patcher(models.SD15, config), image_vae(), Words(768)


def sdxl():
    config = unet(
        models.SDXL, transformer_depth=[0, 1], transformer_depth_output=[0, 0, 1, 1], num_head_channels=16,
        num_heads=-1, num_classes="sequential", adm_in_channels=2816, context_dim=2048,
    )  # fmt: skip
    return patcher(models.SDXL, config), image_vae(), Words(2048)


WAN = {
    "image_model": "wan2.1", "model_type": "t2v", "dim": 48, "ffn_dim": 96, "num_heads": 2, "num_layers": 3,
    "in_dim": 16, "out_dim": 16, "text_dim": 4096, "freq_dim": 64, "patch_size": (1, 2, 2), "window_size": (-1, -1),
    "qk_norm": True, "cross_attn_norm": True, "eps": 1e-6,
}  # fmt: skip


def variants():
    """MODELs that are Wan inside and take more than frames and words; those that this core knows."""
    more = {
        "WAN21_T2V": {"in_dim": 36},
        "WAN21_I2V": {"model_type": "i2v", "in_dim": 36},
        "WAN21_FunControl2V": {"model_type": "i2v", "in_dim": 48},
        "WAN22_T2V": {"in_dim": 100, "out_dim": 48},
        "WAN21_Vace": {"model_type": "vace", "vace_in_dim": 96, "vace_layers": 1},
        "WAN21_Camera": {"model_type": "camera", "in_dim": 32},
        "WAN22_S2V": {"model_type": "s2v", "audio_inject_layers": [0]},
        "WAN21_SCAIL": {"model_type": "scail", "in_dim": 20},
    }
    return {k: patcher(getattr(models, k), WAN | v) for k, v in more.items() if hasattr(models, k)}


def wan22():
    import comfy.ldm.wan.vae2_2 as package

    plain = package.WanVAE
    made = randomised(plain(dim=8, dec_dim=8, z_dim=48, dim_mult=[1, 2, 4, 4], num_res_blocks=2, attn_scales=[],
                            temperal_downsample=[False, True, True], dropout=0.0))  # fmt: skip
    package.WanVAE = lambda **settings: plain(**{**settings, "dim": 8, "dec_dim": 8})
    try:
        vae = comfy.sd.VAE(sd=made.state_dict())
    finally:
        package.WanVAE = plain
    return patcher(models.WAN22_T2V, WAN | {"in_dim": 48, "out_dim": 48}), vae, Words(4096)


def wan():
    config = WAN
    plain = comfy.ldm.wan.vae.WanVAE
    made = randomised(
        plain(
            dim=8,
            z_dim=16,
            dim_mult=[1, 2, 4, 4],
            num_res_blocks=2,
            attn_scales=[],
            temperal_downsample=[False, True, True],
            dropout=0.0,
        )
    )
    comfy.ldm.wan.vae.WanVAE = lambda **settings: plain(**{**settings, "dim": 8})
    try:
        vae = comfy.sd.VAE(sd=made.state_dict())
    finally:
        comfy.ldm.wan.vae.WanVAE = plain
    return patcher(models.WAN21_T2V, config), vae, Words(4096)


def ltxv():
    from comfy.ldm.lightricks.vae.causal_video_autoencoder import VideoVAE

    config = {
        "image_model": "ltxv", "in_channels": 128, "cross_attention_dim": 128, "attention_head_dim": 64,
        "num_attention_heads": 2, "caption_channels": 4096, "num_layers": 3,
    }  # fmt: skip
    blocks = [["res_x", 1], ["compress_all", 1], ["compress_all", 1], ["compress_all", 1], ["res_x", 1]]
    cfg = {
        "dims": 3, "in_channels": 3, "out_channels": 3, "latent_channels": 128, "blocks": blocks, "norm_layer": "pixel_norm",
        "patch_size": 4, "latent_log_var": "uniform", "causal_decoder": False, "encoder_base_channels": 32,
        "decoder_base_channels": 32,
    }  # fmt: skip
    made = randomised(VideoVAE(version=0, config=cfg))
    state = made.state_dict()
    state["per_channel_statistics.std-of-means"] = torch.ones(128)
    state["per_channel_statistics.mean-of-means"] = torch.zeros(128)
    vae = comfy.sd.VAE(sd=state, metadata={"config": json.dumps({"vae": cfg})})
    return patcher(models.LTXV, config), vae, Words(4096, mask=True)


def image_vae():
    from comfy.ldm.models.autoencoder import AutoencoderKL

    shape = {
        "double_z": True, "z_channels": 4, "resolution": 256, "in_channels": 3, "out_ch": 3, "ch": 32, "ch_mult": [1, 1, 1, 1],
        "num_res_blocks": 1, "attn_resolutions": [], "dropout": 0.0,
    }  # fmt: skip
    made = randomised(AutoencoderKL(ddconfig=shape, embed_dim=4))
    return comfy.sd.VAE(sd=made.state_dict(), config={"params": {"ddconfig": shape, "embed_dim": 4}})


class Words:
    """Stands in for a CLIP: random tokens that depend on the text."""

    def __init__(self, width, mask=False):
        self.width, self.mask = width, mask

    def tokenize(self, text, **_):
        return text

    def encode_from_tokens_scheduled(self, text, **_):
        generator = torch.Generator().manual_seed(sum(text.encode()))
        extra = {"pooled_output": torch.randn(1, 1280, generator=generator)}
        if self.mask:
            extra["attention_mask"] = torch.ones(1, 12, dtype=torch.long)
        return [[torch.randn(1, 77 if self.width < 4096 else 12, self.width, generator=generator), extra]]
