"""The ComfyUI custom node: what it exports, what it says, and that it needs nothing but numpy."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from h3spool import latent, node
from h3spool.errors import BadData, NotFound, NotPermitted
from h3spool.importers import sampling_facts
from h3spool.node.nodes import NODE_CLASS_MAPPINGS, NODE_DISPLAY_NAME_MAPPINGS
from h3spool.spool import Spool

Save, Load = (NODE_CLASS_MAPPINGS[f"{verb}MiniMaxH3AVLatent"] for verb in ("Save", "Load"))
LATENTS = Path(__file__).parent / "fixtures" / "latents"
GRAPH = {
    "1": {"class_type": "RandomNoise", "inputs": {"noise_seed": 42}},
    "2": {"class_type": "XFuserSamplerCustomAdvanced", "inputs": {"noise": ["1", 0]}},
    "3": {"class_type": "SaveMiniMaxH3AVLatent", "inputs": {"samples": ["2", 0]}},
    "4": {"class_type": "KSampler", "inputs": {"seed": 7}},
}


class NestedTensor:
    """As comfy.nested_tensor has it."""

    is_nested = True

    def __init__(self, tensors):
        self.tensors = list(tensors)

    def unbind(self):
        return self.tensors


def samples(clips=1, seed=0):
    generator = torch.Generator().manual_seed(seed)
    video = torch.randn(clips, 24, 2, 2, 2, generator=generator)
    return {"samples": NestedTensor([video, torch.randn(clips, 32, 2, 8, generator=generator)])}


@pytest.fixture
def spool(tmp_path):
    return Spool.create(tmp_path / "spool", "sampler", "gpu1")


@pytest.fixture
def output(tmp_path, monkeypatch):
    folder = tmp_path / "output"
    folder.mkdir()
    monkeypatch.setitem(sys.modules, "folder_paths", SimpleNamespace(get_output_directory=lambda: str(folder)))
    return folder


def saved(spool):
    return [latent.read(spool.job("incoming", name).latent) for name in spool.names("incoming")]


def test_a_clip_is_exported_and_goes_through_unchanged(spool):
    given = samples()
    answer = Save().save(
        given, str(spool.root), "a cat", prompt=GRAPH, extra_pnginfo={"workflow": {"v": 1}}, unique_id="3"
    )
    assert answer["result"][0] is given
    (job,) = spool.names("incoming")
    assert answer["ui"] == {"text": [f"h3spool: {job}"]}
    (clip,) = saved(spool)
    assert np.array_equal(clip.video.array(), given["samples"].tensors[0].numpy())
    assert np.array_equal(clip.audio.array(), given["samples"].tensors[1].numpy())
    assert (clip.metadata["title"], clip.metadata["seed"]) == ("a cat", "42")
    producer = json.loads((spool.job("incoming", job).path / f"{job}.producer.json").read_text())
    assert producer["prompt"] == GRAPH
    assert producer["workflow"] == {"v": 1}


def test_a_batch_becomes_one_job_a_clip(spool):
    Save().save(samples(clips=3), str(spool.root), "cats")
    assert [clip.metadata["title"] for clip in saved(spool)] == ["cats 1", "cats 2", "cats 3"]


def test_a_latent_without_sound_needs_the_allowance(spool, output):
    video = {"samples": samples()["samples"].tensors[0]}
    with pytest.raises(BadData, match="--allow no-audio"):
        Save().save(video, str(spool.root), "")
    Save().save(video, str(spool.root), "", allow="no-audio")
    assert saved(spool)[0].audio is None


def test_a_refused_latent_is_kept_and_the_error_says_where(spool, output):
    broken = samples()
    broken["samples"].tensors[1][0, 3, 1, 2] = float("nan")
    with pytest.raises(BadData, match=r"1 of 512 values of `audio` are NaN.*h3spool export .*h3latent") as caught:
        Save().save(broken, str(spool.root), "title", prompt=GRAPH, unique_id="3")
    (kept,) = (output / "h3spool_rescue").iterdir()
    assert str(kept) in str(caught.value)
    assert latent.read(kept).metadata["seed"] == "42"
    assert spool.names("incoming") == []


def test_another_models_latent_is_refused(spool, output):
    with pytest.raises(BadData, match="no latent of MiniMax H3"):
        Save().save({"samples": torch.zeros(1, 16, 64, 64)}, str(spool.root), "")
    assert list(output.iterdir()) == []


def test_a_missing_spool_is_seen_before_anything_is_sampled(spool, tmp_path):
    assert Save.VALIDATE_INPUTS(str(spool.root), "black") is True
    assert "h3spool init" in Save.VALIDATE_INPUTS("", "")
    assert "not a spool" in Save.VALIDATE_INPUTS(str(tmp_path), "")
    assert "unknown allowance" in Save.VALIDATE_INPUTS(str(spool.root), "blak")
    assert Save.VALIDATE_INPUTS(None, None) is True


def test_what_the_nodes_declare_is_what_they_take():
    for name, cls in NODE_CLASS_MAPPINGS.items():
        kinds = cls.INPUT_TYPES()
        names = {key for group in kinds.values() for key in group}
        function = getattr(cls, cls.FUNCTION)
        assert names == set(function.__code__.co_varnames[1 : function.__code__.co_argcount])
        assert name in NODE_DISPLAY_NAME_MAPPINGS
    assert Save.OUTPUT_NODE


def test_metadata_stays_out_when_comfyui_runs_without(spool, monkeypatch):
    arguments = SimpleNamespace(args=SimpleNamespace(disable_metadata=True))
    monkeypatch.setitem(sys.modules, "comfy.cli_args", arguments)
    Save().save(samples() | {"noise_mask": 1}, str(spool.root), "", prompt=GRAPH, unique_id="3")
    (job,) = spool.names("incoming")
    producer = json.loads((spool.job("incoming", job).path / f"{job}.producer.json").read_text())
    assert "prompt" not in producer
    assert producer["not_saved"] == ["noise_mask"]
    assert "seed" not in saved(spool)[0].metadata


# ---------------------------------------------------------------- load


@pytest.fixture
def comfy(monkeypatch):
    monkeypatch.setitem(sys.modules, "comfy", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "comfy.nested_tensor", SimpleNamespace(NestedTensor=NestedTensor))


def test_a_job_or_a_file_comes_back_as_it_was_saved(spool, comfy):
    given = samples()
    Save().save(given, str(spool.root), "")
    (job,) = spool.names("incoming")
    for name in (job, str(spool.job("incoming", job).latent)):
        (loaded,) = Load().load(name, str(spool.root))
        for mine, theirs in zip(loaded["samples"].tensors, given["samples"].tensors, strict=True):
            assert torch.equal(mine, theirs)


def test_foreign_files_load_and_wrong_ones_are_refused(spool, comfy):
    (loaded,) = Load().load(str(LATENTS / "musubi_latent.safetensors"))
    assert loaded["samples"].tensors[0].shape == (1, 24, 7, 4, 6)
    with pytest.raises(BadData, match="no-audio"):
        Load().load(str(LATENTS / "video_only.safetensors"))
    (loaded,) = Load().load(str(LATENTS / "video_only.safetensors"), allow="no-audio")
    assert loaded["samples"].shape == (1, 24, 7, 4, 6)
    assert "no such file" in Load.VALIDATE_INPUTS("nope", str(spool.root))
    assert Load.VALIDATE_INPUTS(str(LATENTS / "video_only.safetensors"), "") is True


def test_a_changed_file_is_loaded_anew(tmp_path):
    path = tmp_path / "x.h3latent"
    path.write_bytes(b"1")
    before = Load.IS_CHANGED(str(path))
    assert Load.IS_CHANGED(str(path)) == before
    path.write_bytes(b"22")
    assert Load.IS_CHANGED(str(path)) != before


# ---------------------------------------------------------------- install

RUN = """
import importlib.util, json, sys

class Only:  # as in a Python that has numpy and nothing else
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"click", "rich", "torch", "safetensors", "xxhash", "imageio_ffmpeg", "httpx"}:
            raise ImportError(name + " is not installed here")

sys.meta_path.insert(0, Only())
spec = importlib.util.spec_from_file_location("custom", sys.argv[1] + "/__init__.py")
custom = importlib.util.module_from_spec(spec)
before = set(sys.modules)
spec.loader.exec_module(custom)
loaded = set(sys.modules) - before
import numpy as np

class NestedTensor:
    is_nested = True
    tensors = [np.random.randn(1, 24, 2, 2, 2).astype("f4"), np.random.randn(1, 32, 2, 8).astype("f4")]
    def unbind(self):
        return self.tensors

Save = custom.NODE_CLASS_MAPPINGS["SaveMiniMaxH3AVLatent"]
print(json.dumps([sorted(loaded), Save().save({"samples": NestedTensor()}, sys.argv[2], "")["ui"]]))
"""


def test_the_installed_node_works_in_a_python_with_numpy_alone(spool, tmp_path):
    (tmp_path / "ComfyUI" / "custom_nodes").mkdir(parents=True)
    folder = node.install(tmp_path / "ComfyUI")
    assert folder == tmp_path / "ComfyUI" / "custom_nodes" / "h3_latent_handoff"
    argv = [sys.executable, "-c", RUN, str(folder), str(spool.root)]
    done = subprocess.run(argv, capture_output=True, text=True, cwd="/", check=False)
    assert done.returncode == 0, done.stderr
    loaded, shown = json.loads(done.stdout)
    assert "numpy" not in loaded
    assert shown == {"text": [f"h3spool: {name}" for name in spool.names("incoming")]}


def test_install_renews_its_own_and_leaves_others(tmp_path):
    place = tmp_path / "custom_nodes"
    with pytest.raises(NotFound):
        node.install(place)
    place.mkdir()
    folder = node.install(place)
    text = (folder / "__init__.py").read_text()
    (folder / "__init__.py").write_text(text.replace("H3SPOOL = ", "H3SPOOL = '/gone' + "))
    node.install(place)
    assert (folder / "__init__.py").read_text() == text
    (folder / "__init__.py").write_text("# somebody else's")
    with pytest.raises(NotPermitted):
        node.install(place)


def test_a_moved_h3spool_says_what_to_do(tmp_path):
    (tmp_path / "custom_nodes").mkdir()
    stub = node.install(tmp_path / "custom_nodes") / "__init__.py"
    stub.write_text(stub.read_text().replace("H3SPOOL = ", "H3SPOOL = '/gone' + "))
    done = subprocess.run([sys.executable, str(stub)], capture_output=True, text=True, cwd="/", check=False)
    assert "run `h3spool comfyui install` again" in done.stderr


# ---------------------------------------------------------------- examples

EXAMPLES = Path(__file__).parents[1] / "examples" / "comfyui"


@pytest.mark.parametrize("name", ["sampler_tail", "decode_only"])
def test_the_example_graphs_hold_together(name):
    graph = json.loads((EXAMPLES / f"{name}.api.json").read_text())
    for node_ in graph.values():
        for value in node_["inputs"].values():
            assert not isinstance(value, list) or value[0] in graph
        if node_["class_type"] in NODE_CLASS_MAPPINGS:
            kinds = NODE_CLASS_MAPPINGS[node_["class_type"]].INPUT_TYPES()
            assert set(node_["inputs"]) == set(kinds["required"]) | set(kinds["optional"])


def test_the_sampler_example_tells_its_facts():
    graph = json.loads((EXAMPLES / "sampler_tail.api.json").read_text())
    facts = sampling_facts(graph, "12")
    assert facts["lora"] == "minimax_h3_fl2v_turbo_8step_v1.0_comfyui_bf16.safetensors:1.0"
    assert (facts["seed"], facts["steps"], facts["shift_video"], facts["shift_audio"]) == ("42", "8", "12.0", "3.0")
    assert facts["prompt"].startswith("A red fox")


def test_the_ui_example_is_the_same_graph():
    graph = json.loads((EXAMPLES / "sampler_tail.api.json").read_text())
    drawn = json.loads((EXAMPLES / "sampler_tail.json").read_text())
    wires = {(str(source), slot, str(target)) for _, source, slot, target, _, _ in drawn["links"]}
    assert wires == {
        (*value, key) for key, node_ in graph.items() for value in node_["inputs"].values() if isinstance(value, list)
    }
    assert {str(each["id"]): each["type"] for each in drawn["nodes"]} == {
        key: node_["class_type"] for key, node_ in graph.items()
    }


def test_the_decoder_is_started_apart(tmp_path):
    (tmp_path / "main.py").write_text(
        "import json, os, sys\nprint(json.dumps([sys.argv, os.environ['CUDA_VISIBLE_DEVICES']]))"
    )
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "COMFYUI_PYTHON": sys.executable}
    argv = ["sh", str(EXAMPLES / "start-decoder.sh"), str(tmp_path), "3", "--max-upload-size", "200"]
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, check=True)
    words, gpu = json.loads(done.stdout)
    assert gpu == "3"
    assert words[1:5] == ["--listen", "127.0.0.1", "--port", "8192"]
    assert words[-2:] == ["--max-upload-size", "200"]
    assert (tmp_path / ".cache" / "h3spool" / "comfyui-8192" / "user").is_dir()
