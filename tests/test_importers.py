"""Latent files of other tools: recognised by keys and shapes, or refused with what they hold."""

import io
import json
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from h3spool import container, importers, latent
from h3spool.errors import BadData

LATENTS = Path(__file__).parent / "fixtures" / "latents"
CLIP, _ = container.parse((LATENTS / "latent_io.h3latent").read_bytes())
VIDEO, AUDIO = CLIP["latent_0"], CLIP["latent_1"]


def same(tensor, other):
    return (tensor.dtype, tensor.shape, bytes(tensor.data)) == (other.dtype, other.shape, bytes(other.data))


def write(path, tensors, metadata=None):
    path.write_bytes(b"".join(container.serialize(tensors, metadata or {})))
    return path


def refusal(*paths, **options):
    with pytest.raises(BadData) as caught:
        importers.load(paths, **options)
    return str(caught.value)


@pytest.mark.parametrize(
    "name",
    [
        "cartridge.lc",
        "diffusers_pair.safetensors",
        "latent_io.h3latent",
        "musubi_latent.safetensors",
        "nested.h3latent.pt",
        "staged.h3latent.pt",
    ],
)
def test_every_known_format_gives_the_same_clip(name):
    clip = importers.load([LATENTS / name], allow_pickle=True)
    assert same(clip.video, VIDEO)
    assert same(clip.audio, AUDIO)
    latent.check(latent.build(clip.video, clip.audio, clip.facts))


def test_a_half_precision_file_stays_half():
    clip = importers.load([LATENTS / "easy_f16.h3latent.safetensors"])
    assert clip.video.dtype == clip.audio.dtype == "F16"
    assert np.array_equal(clip.video.array(), VIDEO.array().astype(np.float16))


def test_a_core_pair_joins_in_either_order():
    pair = [LATENTS / "core_video.latent", LATENTS / "core_audio.latent"]
    for paths in (pair, pair[::-1]):
        clip = importers.load(paths)
        assert same(clip.video, VIDEO)
        assert same(clip.audio, AUDIO)
        assert clip.facts["producer"] == "ComfyUI SaveLatent"


def test_what_a_real_comfyui_saved_is_read_and_its_empty_streams_are_refused():
    clip = importers.load([LATENTS / f"comfyui_0_33_saved_{kind}.latent" for kind in ("video", "audio")])
    assert (clip.video.shape, clip.audio.shape) == ((1, 24, 7, 4, 4), (1, 32, 2, 37))
    assert "LTXVSeparateAVLatent" in clip.producer["files"][0]["metadata"]["prompt"]
    with pytest.raises(BadData, match="every value of `video` is 0"):
        latent.check(latent.build(clip.video, clip.audio, clip.facts))


def test_a_video_alone_has_no_audio_and_audio_alone_is_refused():
    assert importers.load([LATENTS / "video_only.safetensors"]).audio is None
    assert "sound only" in refusal(LATENTS / "core_audio.latent")
    assert "both files hold a video" in refusal(LATENTS / "core_video.latent", LATENTS / "video_only.safetensors")


@pytest.mark.parametrize(
    ("video", "audio"),
    [
        ("video", "audio"),
        ("samples_video", "samples_audio"),
        ("streams.video", "streams.audio"),
        ("t0", "t1"),
        ("latent_video", "latent_audio"),
    ],
)
def test_known_names_under_any_extension(tmp_path, video, audio):
    clip = importers.load([write(tmp_path / "clip.bin", {video: VIDEO, audio: AUDIO})])
    assert same(clip.video, VIDEO)
    assert same(clip.audio, AUDIO)


def test_our_own_file_keeps_its_facts(tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes(b"".join(latent.serialize(latent.build(VIDEO, AUDIO, {"title": "a cat", "seed": 7}))))
    clip = importers.load([path])
    assert clip.facts == {"title": "a cat", "seed": "7"}
    assert clip.producer is None


def test_bytes_already_read_are_not_read_again():
    raw = (LATENTS / "latent_io.h3latent").read_bytes()
    assert same(importers.load([Path("gone")], raws=[raw]).video, VIDEO)


def test_an_unknown_file_is_refused_with_what_it_holds(tmp_path):
    said = refusal(write(tmp_path / "x.h3latent", {"weird": VIDEO, "mask": AUDIO}))
    assert f"{tmp_path}/x.h3latent: not a known H3 latent" in said
    assert "'weird' F32 [1, 24, 7, 4, 6]" in said
    assert "video [1, 24, T, H, W]" in said


def test_known_names_of_other_shapes_are_refused(tmp_path):
    image = container.tensor_of(np.zeros((1, 16, 64, 64), np.float32))
    assert "'latent_tensor' F32 [1, 16, 64, 64]" in refusal(write(tmp_path / "sd.latent", {"latent_tensor": image}))
    assert "more than one video" in refusal(write(tmp_path / "two", {"video": VIDEO, "t0": VIDEO}))


def test_a_core_latent_without_its_version_is_refused(tmp_path):
    assert "latent_format_version_0" in refusal(write(tmp_path / "old.latent", {"latent_tensor": VIDEO}))


def test_a_damaged_file_is_refused(tmp_path):
    raw = (LATENTS / "musubi_latent.safetensors").read_bytes()
    for damage, why in (
        (raw[:-1], "truncated"),
        (raw + b"x", "padded"),
        (b"<html>" * 9, "header claims"),
        (b"", "0 bytes"),
    ):
        (tmp_path / "x").write_bytes(damage)
        assert why in refusal(tmp_path / "x")


# ---------------------------------------------------------------- metadata


def test_facts_that_musubi_states_are_read():
    clip = importers.load([LATENTS / "musubi_latent.safetensors"])
    assert clip.facts == {"seed": "7", "steps": "6", "producer": "musubi-tuner"}
    assert clip.producer["files"][0]["metadata"]["format"] == "minimax-h3-latents-v1"


def test_long_foreign_metadata_goes_to_the_producer_whole(tmp_path):
    workflow = json.dumps({"nodes": "x" * (1 << 20)})
    header = {"__metadata__": {"workflow": workflow}, "video": {"dtype": "F32", "shape": list(VIDEO.shape)}}
    header["video"]["data_offsets"] = [0, len(VIDEO.data)]
    text = json.dumps(header).encode()
    (tmp_path / "x").write_bytes(len(text).to_bytes(8, "little") + text + bytes(VIDEO.data))
    clip = importers.load([tmp_path / "x"])
    assert clip.producer["files"][0]["metadata"]["workflow"] == workflow
    latent.serialize(latent.build(clip.video, AUDIO, clip.facts))


def test_relay_notes_and_left_out_tensors_are_named(tmp_path):
    note = json.dumps({"format": 1, "note": "hello"}).encode()
    header = {"relay_kit_meta": {"dtype": "U8", "shape": [len(note)], "data_offsets": [0, len(note)]}}
    header["streams.video"] = {"dtype": "F32", "shape": list(VIDEO.shape)}
    header["streams.video"]["data_offsets"] = [len(note), len(note) + len(VIDEO.data)]
    text = json.dumps(header).encode()
    (tmp_path / "x").write_bytes(len(text).to_bytes(8, "little") + text + note + bytes(VIDEO.data))
    clip = importers.load([tmp_path / "x"])
    assert clip.producer["files"][0]["relay_kit_meta"] == {"format": 1, "note": "hello"}
    masked = importers.load([write(tmp_path / "y", {"samples_video": VIDEO, "noise_mask_video": AUDIO})])
    assert "noise_mask_video" in masked.producer["files"][0]["left_out"]


GRAPH = {
    "1": {"class_type": "UNETLoader", "inputs": {"unet_name": "h3.safetensors"}},
    "2": {
        "class_type": "LoraLoaderModelOnly",
        "inputs": {"model": ["1", 0], "lora_name": "turbo.st", "strength_model": 0.8},
    },
    "3": {"class_type": "MiniMaxH3SigmaShift", "inputs": {"model": ["2", 0], "shift_video": 6.0, "shift_audio": 3.0}},
    "4": {"class_type": "CLIPTextEncode", "inputs": {"text": ["14", 0]}},
    "5": {"class_type": "CLIPTextEncode", "inputs": {"text": "ugly"}},
    "6": {
        "class_type": "CFGGuider",
        "inputs": {"negative": ["5", 0], "model": ["3", 0], "positive": ["4", 0], "cfg": 1},
    },
    "7": {"class_type": "RandomNoise", "inputs": {"noise_seed": ["13", 0]}},
    "8": {"class_type": "KSamplerSelect", "inputs": {"sampler_name": "euler"}},
    "9": {"class_type": "BasicScheduler", "inputs": {"model": ["3", 0], "steps": 8, "scheduler": "simple"}},
    "10": {
        "class_type": "SamplerCustomAdvanced",
        "inputs": {"noise": ["7", 0], "guider": ["6", 0], "sampler": ["8", 0], "sigmas": ["9", 0]},
    },
    "11": {"class_type": "SaveMiniMaxH3AVLatent", "inputs": {"samples": ["10", 0], "spool": "/s"}},
    "12": {"class_type": "KSampler", "inputs": {"seed": 1, "steps": 99}},
    "13": {"class_type": "PrimitiveInt", "inputs": {"value": 42}},
    "14": {"class_type": "PrimitiveString", "inputs": {"value": "a cat"}},
}


def test_a_graph_tells_how_its_result_was_sampled():
    assert importers.sampling_facts(GRAPH, "11") == {
        "seed": "42",
        "steps": "8",
        "sampler": "euler",
        "shift_video": "6.0",
        "shift_audio": "3.0",
        "prompt": "a cat",
        "lora": "turbo.st:0.8",
    }


@pytest.mark.parametrize(("on", "steps", "lora"), [(True, "8", "turbo.st:0.8"), (False, "20", None)])
def test_the_side_of_a_switch_that_is_off_is_not_told(on, steps, lora):
    graph = GRAPH | {
        "3": {"class_type": "MiniMaxH3SigmaShift", "inputs": {"model": ["20", 0]}},
        "9": {"class_type": "BasicScheduler", "inputs": {"model": ["3", 0], "steps": ["21", 0]}},
        "20": {
            "class_type": "ComfySwitchNode",
            "inputs": {"on_false": ["1", 0], "on_true": ["2", 0], "switch": ["22", 0]},
        },
        "21": {
            "class_type": "ComfySwitchNode",
            "inputs": {"on_false": ["24", 0], "on_true": ["23", 0], "switch": ["22", 0]},
        },
        "22": {"class_type": "PrimitiveBoolean", "inputs": {"value": on}},
        "23": {"class_type": "PrimitiveInt", "inputs": {"value": 8}},
        "24": {"class_type": "PrimitiveInt", "inputs": {"value": 20}},
    }
    facts = importers.sampling_facts(graph, "11")
    assert facts["steps"] == steps
    assert facts.get("lora") == lora


def test_a_graph_in_a_foreign_file_is_read(tmp_path):
    tensors = {"latent_tensor": VIDEO, "latent_format_version_0": container.tensor_of(np.zeros(0, np.float32))}
    graph = {key: node for key, node in GRAPH.items() if key != "12"}
    clip = importers.load([write(tmp_path / "x.latent", tensors, {"prompt": json.dumps(graph)})])
    assert clip.facts["seed"] == "42"
    assert clip.facts["lora"] == "turbo.st:0.8"


@pytest.mark.parametrize(
    "graph", [{}, {"1": 3}, {"1": {"inputs": {"seed": [1, [2]], "x": ["1", 0]}}}, {"a": {"inputs": []}}]
)
def test_a_strange_graph_gives_no_facts(graph):
    assert importers.sampling_facts(graph, "1") == {}


# ---------------------------------------------------------------- zip and pickle


def test_a_pickle_is_not_read_unless_asked_for():
    assert "--allow-pickle" in refusal(LATENTS / "staged.h3latent.pt")


def test_a_hostile_pickle_runs_nothing(capfd):
    said = refusal(LATENTS / "hostile.h3latent.pt", allow_pickle=True)
    assert "print" in said
    assert "nothing of it was run" in said
    assert "weights_only" not in said
    assert capfd.readouterr() == ("", "")


def test_pickles_of_other_trees_are_read(tmp_path):
    video, audio = (torch.from_numpy(tensor.array().copy()) for tensor in (VIDEO, AUDIO))
    for tree in ({"data": {"a": video, "b": {"c": audio}}}, {"samples": [video, audio], "notes": "n"}):
        torch.save(tree, tmp_path / "x.pt")
        clip = importers.load([tmp_path / "x.pt"], allow_pickle=True)
        assert same(clip.video, VIDEO)
        assert same(clip.audio, AUDIO)


def test_a_pickle_of_two_clips_or_of_a_huge_view_is_refused(tmp_path):
    video = torch.from_numpy(VIDEO.array().copy())
    torch.save([video, video + 1], tmp_path / "two.pt")
    assert "more than one clip" in refusal(tmp_path / "two.pt", allow_pickle=True)
    torch.save({"video": torch.zeros(1).expand(1, 24, 7, 10000, 10000)}, tmp_path / "huge.pt")
    assert "larger than any latent" in refusal(tmp_path / "huge.pt", allow_pickle=True)


def zipped(path, **members):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name.replace("__", "/").replace("_dot_", "."), data)
    return path


def test_a_zip_bomb_is_refused_before_it_is_unpacked(tmp_path):
    bomb = io.BytesIO()
    with zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("manifest.json", "{}")
        with archive.open("payloads/h3.safetensors", "w", force_zip64=True) as member:
            for _ in range(257):
                member.write(bytes(1 << 20))
    (tmp_path / "bomb.lc").write_bytes(bomb.getvalue())
    assert "would unpack to more than" in refusal(tmp_path / "bomb.lc")


def test_other_zips_are_refused(tmp_path):
    assert "readme.txt" in refusal(zipped(tmp_path / "a.zip", readme_dot_txt=b"hello"))
    damaged = bytearray((LATENTS / "cartridge.lc").read_bytes())
    damaged[5000] ^= 1
    (tmp_path / "b.lc").write_bytes(damaged)
    assert "damaged" in refusal(tmp_path / "b.lc")
