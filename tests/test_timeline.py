"""Latent frames of video autoencoders: every frame has its place, whatever the scenes' lengths."""

from comfyui_veostyle.veo_core.sampling.timeline import GROUP, Timeline
from comfyui_veostyle.veo_core.video.scenes import Scene
from hypothesis import given
from hypothesis import strategies as st


@given(st.lists(st.integers(1, 60), min_size=1, max_size=5), st.sampled_from([1, 4, 8]), st.data())
def test_frames_and_latents_fit(lengths, factor, data):
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    anchors = [data.draw(st.sampled_from(starts[: i + 1])) for i in range(len(lengths))]
    scenes = tuple(Scene(s, s + n, a) for s, n, a in zip(starts, lengths, anchors, strict=True))
    line = Timeline(scenes, factor)
    assert line.total == sum(1 + -(-(n - 1) // factor) for n in lengths)
    seen = []
    for latent in range(line.total):
        frames = range(line.frame(latent), line.end_frame(latent + 1))
        assert 1 <= len(frames) <= factor
        assert all(line.latent(f) == latent for f in frames)
        seen += frames
    assert seen == list(range(sum(lengths)))
    for scene, latents in zip(scenes, line.scenes, strict=True):
        assert line.frame(latents.anchor) == scene.anchor
        assert line.scene_of(latents.start) == scenes.index(scene)
    frame = data.draw(st.integers(0, sum(lengths) - 1))
    begin, end = line.group(frame)
    assert begin <= frame < end
    assert end - begin <= GROUP * factor
    assert line.group(begin) == line.group(end - 1) == (begin, end)


def test_one_for_one_is_no_change():
    scenes = (Scene(0, 7, 0), Scene(7, 9, 0))
    assert Timeline(scenes).scenes == scenes
