"""Every published layout loads to the same network; everything else is refused with its own sentence."""

import json
from pathlib import Path

import pytest
import torch
from golden import h3_weights as h3
from golden.pixels import latent, pixels
from safetensors.torch import save_file

from h3spool import errors
from h3spool.vae import audio, video, weights

CPU = torch.device("cpu")
VIDEO, AUDIO = h3.video_weights(), h3.audio_weights()
STATS = {"latents_mean": torch.tensor(video.LATENTS_MEAN), "latents_std": torch.tensor(video.LATENTS_STD)}
AUDIO_STATS = {"latents_mean": torch.tensor(audio.LATENTS_MEAN), "latents_std": torch.tensor(audio.LATENTS_STD)}
CONFIG = {"latents_mean": list(video.LATENTS_MEAN), "latents_std": list(video.LATENTS_STD)}


def load_video(path, dtype=torch.float32):
    return weights.load_video(path, dtype, CPU)


VIDEO_LAYOUTS = {
    "official": ("official", lambda at: h3.save(at / "x", VIDEO)),
    "official, whole": ("official", lambda at: h3.save(at / "x", VIDEO | h3.video_encoder())),
    "official, prefixed": ("official", lambda at: h3.save(at / "x", VIDEO | h3.video_encoder(), "model.vae.")),
    "comfyui F16": ("comfyui", lambda at: h3.save(at / "x", VIDEO | STATS | h3.video_encoder(), dtype=torch.float16)),
    "comfyui F16, prefixed": ("comfyui", lambda at: h3.save(at / "x", VIDEO | STATS, "vae.", torch.float16)),
    "diffusers, one file": ("diffusers", lambda at: h3.save(at / "x", h3.to_diffusers(VIDEO | h3.video_encoder()))),
    "diffusers, folder": ("diffusers", lambda at: h3.save_sharded(at / "x", h3.to_diffusers(VIDEO), CONFIG)),
}


@pytest.fixture(scope="module")
def picture(tmp_path_factory):
    net, _ = load_video(h3.save(tmp_path_factory.mktemp("vae") / "x", VIDEO))
    return pixels(net, latent(3, 3, 2))


@pytest.mark.parametrize("name", VIDEO_LAYOUTS)
def test_every_video_layout_decodes_to_the_same_pixels(tmp_path, picture, name):
    layout, make = VIDEO_LAYOUTS[name]
    net, facts = load_video(make(tmp_path))
    assert torch.equal(pixels(net, latent(3, 3, 2)), picture)
    assert (facts["layout"], facts["blocks"], facts["width"]) == (layout, 2, 128)
    assert json.loads(json.dumps(facts)) == facts


AUDIO_LAYOUTS = {
    "official": ("official", lambda at: h3.save(at / "x", AUDIO)),
    "official, whole": ("official", lambda at: h3.save(at / "x", AUDIO | h3.audio_encoder())),
    "official, prefixed": ("official", lambda at: h3.save(at / "x", AUDIO, "audio_vae.model.")),
    "parametrizations": ("parametrizations", lambda at: h3.save(at / "x", h3.to_parametrizations(AUDIO))),
    "comfyui": ("comfyui", lambda at: h3.save(at / "x", h3.to_folded(AUDIO) | AUDIO_STATS | h3.audio_encoder())),
    "diffusers, folder": ("official", lambda at: h3.save_sharded(at / "x", AUDIO, {}, shards=2)),
}


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    return wave(weights.load_audio(h3.save(tmp_path_factory.mktemp("vae") / "x", AUDIO), CPU)[0])


@torch.inference_mode()
def wave(net):
    return torch.cat(list(net(torch.randn(2, 32, 3, generator=torch.Generator().manual_seed(1)))), dim=1)


@pytest.mark.parametrize("name", AUDIO_LAYOUTS)
def test_every_audio_layout_decodes_to_the_same_sound(tmp_path, sound, name):
    layout, make = AUDIO_LAYOUTS[name]
    net, facts = weights.load_audio(make(tmp_path), CPU)
    torch.testing.assert_close(wave(net), sound, rtol=0, atol=1e-5)
    assert facts["layout"] == layout


def test_blocks_are_counted(tmp_path):
    assert load_video(h3.save(tmp_path / "x", h3.video_weights(64, 5)))[1]["blocks"] == 5


# ---- statistics ----


def mean_of(path):
    return load_video(path)[0].latents_mean


def test_statistics_come_from_the_file_if_f32(tmp_path):
    other = {"latents_mean": torch.full((24,), 0.5), "latents_std": torch.full((24,), 2.0)}
    assert mean_of(h3.save(tmp_path / "x", VIDEO | other)).eq(0.5).all()


def test_statistics_in_half_precision_are_not_used(tmp_path):
    half = {name: value.half() for name, value in STATS.items()}
    assert torch.equal(mean_of(h3.save(tmp_path / "x", VIDEO | half)), STATS["latents_mean"])


def test_statistics_come_from_the_config_of_a_folder(tmp_path):
    config = {"latents_mean": [0.25] * 24, "latents_std": [1.0] * 24}
    assert mean_of(h3.save_sharded(tmp_path / "x", h3.to_diffusers(VIDEO), config)).eq(0.25).all()


# ---- memory ----


def mapped(path):
    """Address ranges of this process that map `path`."""
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    return [tuple(int(n, 16) for n in line[0].split("-")) for line in lines if line[-1] == str(path)]


@pytest.mark.parametrize(("file_dtype", "dtype"), [(torch.float16, torch.float32), (torch.float32, torch.float32)])
def test_weights_stay_in_the_file(tmp_path, file_dtype, dtype):
    path = h3.save(tmp_path / "x", VIDEO, dtype=file_dtype)
    net, _ = load_video(path, dtype)
    ranges = mapped(path)
    for block in net.decoder.transformer_blocks:
        for linear in (block.attn.to_qkv, block.attn.to_out, block.ff.w1, block.ff.w2):
            assert any(low <= linear.weight.data_ptr() < high for low, high in ranges)


def test_wider_weights_are_narrowed_once(tmp_path):
    net, _ = load_video(h3.save(tmp_path / "x", VIDEO), torch.bfloat16)
    assert net.decoder.transformer_blocks[1].ff.w2.weight.dtype == torch.bfloat16


# ---- refusals ----


def refused(load, path, *words):
    with pytest.raises(errors.NotUsable) as caught:
        load(path)
    assert caught.value.exit_code == 78
    for word in (str(path.name), *words):
        assert word in str(caught.value)


def load_audio(path):
    return weights.load_audio(path, CPU)


def test_a_missing_path_is_not_found(tmp_path):
    for load in (load_video, load_audio):
        with pytest.raises(errors.NotFound, match="there is no checkpoint") as caught:
            load(tmp_path / "nothing.safetensors")
        assert caught.value.exit_code == 66


def test_missing_tensors_are_named(tmp_path):
    lacking = {k: v for k, v in VIDEO.items() if ".1.ff.w2." not in k and "norm_out.bias" not in k}
    refused(load_video, h3.save(tmp_path / "x", lacking), "lacks 3", "norm_out.bias", "transformer_blocks.1.ff.w2.bias")


def test_a_gap_in_the_blocks_is_named(tmp_path):
    gap = {k: v for k, v in h3.video_weights(64, 3).items() if ".transformer_blocks.1." not in k}
    refused(load_video, h3.save(tmp_path / "x", gap), "transformer_blocks.1.")


def test_an_unknown_decoder_tensor_is_refused(tmp_path):
    extra = {"decoder.transformer_blocks.0.attn.norm_q.weight": torch.ones(64)}
    refused(load_video, h3.save(tmp_path / "x", VIDEO | extra), "no place for", "norm_q")


def test_a_shape_of_another_network_is_refused(tmp_path):
    other = {"decoder.proj_out.weight": torch.ones(768, 128)}
    refused(load_video, h3.save(tmp_path / "x", VIDEO | other), "proj_out.weight", "[768, 128]", "[3072, 128]")


def test_a_diffusers_shape_that_does_not_join_is_refused(tmp_path):
    state = h3.to_diffusers(VIDEO)
    state["decoder.transformer_blocks.0.attn.to_k.weight"] = torch.ones(64, 128)
    refused(load_video, h3.save(tmp_path / "x", state), "to_qkv.weight", "[64, 128]")


@pytest.mark.parametrize("dtype", [torch.float64, torch.int16, torch.float8_e4m3fn])
def test_another_dtype_is_refused(tmp_path, dtype):
    key = "decoder.transformer_blocks.0.ff.w1.weight"
    save_file(VIDEO | {key: VIDEO[key].to(dtype)}, tmp_path / "x")
    refused(load_video, tmp_path / "x", key, "F32, F16, BF16")


def test_a_truncated_file_is_refused(tmp_path):
    path = h3.save(tmp_path / "x", VIDEO)
    path.write_bytes(path.read_bytes()[:-100])
    refused(load_video, path, "not a whole safetensors file")


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 a pickle of torch", b"\xff" * 100])
def test_what_is_no_safetensors_is_refused(tmp_path, content):
    (tmp_path / "taeh3.pth").write_bytes(content)
    refused(load_video, tmp_path / "taeh3.pth", "not a whole safetensors file")
    refused(load_audio, tmp_path / "taeh3.pth", "not a whole safetensors file")


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (("decoder.1.weight", "decoder.22.bias"), "TAEH3"),
        (("dec_in_proj.weight", "decoder.model.0.weight_g"), "Music3"),
        (("unet.conv.weight",), "none of its 1 keys is known"),
    ],
)
def test_other_networks_are_called_by_their_name(tmp_path, keys, words):
    save_file({key: torch.ones(12) for key in keys}, tmp_path / "x")
    refused(load_video, tmp_path / "x", "not an H3 video VAE", words)
    refused(load_audio, tmp_path / "x", "not an H3 audio VAE", words)


def test_the_two_vaes_are_not_mixed_up(tmp_path):
    picture, sound = h3.save(tmp_path / "picture", VIDEO), h3.save(tmp_path / "sound", AUDIO)
    refused(load_video, sound, "give it as --audio-vae")
    refused(load_audio, picture, "give it as --video-vae")


def test_two_networks_in_one_file_are_refused(tmp_path):
    both = {f"{name}.{key}": value.clone() for name in ("a", "b") for key, value in VIDEO.items()}
    refused(load_video, h3.save(tmp_path / "x", both), "'a.'", "'b.'")


def test_a_missing_shard_is_named(tmp_path):
    folder = h3.save_sharded(tmp_path / "x", h3.to_diffusers(VIDEO), CONFIG)
    (folder / "diffusion_pytorch_model-00002-of-00003.safetensors").unlink()
    refused(load_video, folder, "00002-of-00003")


def test_one_shard_of_several_is_refused(tmp_path):
    folder = h3.save_sharded(tmp_path / "x", h3.to_diffusers(VIDEO), CONFIG)
    refused(load_video, folder / "diffusion_pytorch_model-00002-of-00003.safetensors", "as its folder")


@pytest.mark.parametrize("names", [(), ("a.safetensors", "b.safetensors")])
def test_a_folder_that_is_no_checkpoint_is_refused(tmp_path, names):
    for name in names:
        h3.save(tmp_path / name, VIDEO)
    refused(load_video, tmp_path, *(names or ("no .safetensors file",)))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("diffusion_pytorch_model.safetensors.index.json", "{"),
        ("diffusion_pytorch_model.safetensors.index.json", '{"weight_map": ["a"]}'),
        ("diffusion_pytorch_model.safetensors.index.json", '{"weight_map": {}}'),
        ("config.json", "[]"),
        ("config.json", '{"latents_std": [1, 2]}'),
        ("config.json", json.dumps({"latents_std": [0.0] * 24})),
    ],
)
def test_a_broken_index_or_config_is_refused(tmp_path, name, text):
    folder = h3.save_sharded(tmp_path / "x", h3.to_diffusers(VIDEO), {})
    (folder / name).write_text(text)
    with pytest.raises(errors.NotUsable):
        load_video(folder)


# ---- fingerprint ----


def test_the_fingerprint_tells_fine_tunes_apart_and_ignores_the_name(tmp_path):
    def fingerprint(name, state):
        return load_video(h3.save(tmp_path / name, state))[1]["fingerprint"]

    tuned = {key: value * 1.5 if ".w1." in key else value for key, value in VIDEO.items()}
    assert fingerprint("one", VIDEO) == fingerprint("two", VIDEO) != fingerprint("tuned", tuned)
